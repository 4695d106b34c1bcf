"""What becomes of files, decoded and preprocessed in a process of their own; no test module.

Arguments: the pixel limit, the files. Prints a JSON object: for each file ``embedded`` or a code, a message, and the
most memory that the process had meanwhile beyond what it had after some ordinary pictures, in bytes. Where that cannot
be reset (Linux can) it includes the files before.
"""

from __future__ import annotations

import io
import json
import resource
import sys
from contextlib import suppress
from pathlib import Path

from PIL import Image

from vlmembed.decode import decode, own_pillow_settings
from vlmembed.errors import ImageError
from vlmembed.layout import ResizeRule, TowerLayout
from vlmembed.preprocess import preprocess
from vlmembed.resize import AreaResize


def builtin_rule(max_source_pixels: int) -> ResizeRule:
    """The rule of the built-in model."""
    area = AreaResize(patch_size=14, min_pixels=224**2, max_pixels=224**2)
    layout = TowerLayout(patch_size=14, native=area, official=None, image_mean=(0, 0, 0), image_std=(1, 1, 1))
    return ResizeRule(mode="native", resize=area, layout=layout, max_source_pixels=max_source_pixels)


def outcome_of(content: bytes, rule: ResizeRule) -> tuple[str, str]:
    """``embedded`` and the EXIF problem, or a code and its message."""
    try:
        decoded = decode(content, max_source_pixels=rule.max_source_pixels)
        preprocess(decoded.rgb, 0, rule)
    except ImageError as error:
        return error.code.value, str(error)
    return "embedded", decoded.exif_problem


def peak_bytes() -> int:
    """The most memory that this process has had."""
    status = Path("/proc/self/status")
    if status.exists():  # on Linux `ru_maxrss` counts what the process was forked from, too
        return next(int(line.split()[1]) * 1024 for line in status.read_text().splitlines() if line.startswith("VmHWM"))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def reset_peak() -> None:
    """Let the peak begin at what is held now."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def main() -> None:
    """See the module."""
    rule = builtin_rule(int(sys.argv[1]))
    with own_pillow_settings(rule.max_source_pixels):
        for kind in ("PNG", "JPEG", "GIF", "WEBP", "AVIF", "TIFF", "JPEG2000"):  # loads what every run has loaded
            buffer = io.BytesIO()
            Image.new("RGB", (300, 200)).save(buffer, kind)
            outcome_of(buffer.getvalue(), rule)
        reset_peak()
        idle_bytes = peak_bytes()
        outcomes = {}
        for path in sys.argv[2:]:
            content = Path(path).read_bytes()
            reset_peak()
            outcomes[path] = (*outcome_of(content, rule), peak_bytes() - idle_bytes)
    json.dump(outcomes, sys.stdout)


if __name__ == "__main__":
    main()
