"""What Pillow alone says of files: opened, decoded in full, converted to RGB. No test module.

Arguments: the pixel limit, a file that lists paths. Prints a line of JSON for each file as soon as it is judged, since
the next one may end the process: its path, ``""`` or why Pillow does not accept it, and the mode it was decoded to.
"""

from __future__ import annotations

import json
import signal
import sys
import warnings
from pathlib import Path

import pillow_heif
from PIL import Image

FILE_SECONDS = 60

NOT_READ = {
    "EPS": "a program, which Pillow would have Ghostscript run where there is one",
    "IPTC": "a wrapper, and Pillow would run a program that is inside",
    "WMF": "a program, which Pillow would have Windows run",
}
"""What vlmembed does not read although some Pillow might."""


def judge(path: str) -> tuple[str, str]:
    """Why Pillow does not accept a file, and its mode."""
    try:
        with Image.open(path) as image:
            if image.format in NOT_READ:
                return NOT_READ[image.format], ""
            image.load()
            if image.mode != "LAB":  # decoded, but only a colour profile makes RGB of it
                image.convert("RGB")
            return "", image.mode
    except Exception as error:  # noqa: BLE001  that is the question
        return f"{type(error).__name__}: {error}", ""


def main() -> None:
    """See the module."""
    Image.MAX_IMAGE_PIXELS = int(sys.argv[1]) // 2  # Pillow refuses what has twice as many
    warnings.simplefilter("ignore")
    Image.preinit()
    Image.init()  # else the order in which formats are tried would depend on the files before
    pillow_heif.register_heif_opener()
    for path in Path(sys.argv[2]).read_text().splitlines():
        signal.alarm(FILE_SECONDS)
        print(json.dumps([path, *judge(path)]), flush=True)  # noqa: T201
        signal.alarm(0)


if __name__ == "__main__":
    main()
