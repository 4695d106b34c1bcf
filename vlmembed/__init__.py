"""vlmembed: offline batch image embedding.

    import vlmembed

    report = vlmembed.encode("images", "out.parquet")  # files in, Parquet out
    vlmembed.inspect("out.parquet").num_rows

    with vlmembed.stream("images") as stream:  # the same rows as Arrow record batches, without a file
        for batch in stream:
            print(batch["id"].to_pylist())

    tower = vlmembed.load_tower("dinov2-small")  # the packed tower alone
    vectors = vlmembed.embed_pack(vlmembed.pack_images(pictures, tower), tower)

Importing this package loads neither torch nor transformers; the first call does.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from vlmembed.config import EncodeConfig
from vlmembed.errors import VlmembedError

if TYPE_CHECKING:
    from vlmembed.api import encode, plan, stream
    from vlmembed.checking.comparison import Comparison, compare
    from vlmembed.checking.verification import Verification, verify
    from vlmembed.exporter import export
    from vlmembed.forecast.prediction import Forecast
    from vlmembed.inspection.reading import Inspection, inspect
    from vlmembed.keywords import Settings
    from vlmembed.merger import merge
    from vlmembed.packed import embed_pack, embed_tokens, load_tower, pack_images
    from vlmembed.recipes import load_recipe
    from vlmembed.report import RunReport
    from vlmembed.streaming.stream import Stream
    from vlmembed.tokens import TokenFeatures, read_tokens

__all__ = [
    "Comparison",
    "EncodeConfig",
    "Forecast",
    "Inspection",
    "RunReport",
    "Settings",
    "Stream",
    "TokenFeatures",
    "Verification",
    "VlmembedError",
    "compare",
    "embed_pack",
    "embed_tokens",
    "encode",
    "export",
    "inspect",
    "load_recipe",
    "load_tower",
    "merge",
    "pack_images",
    "plan",
    "read_tokens",
    "stream",
    "verify",
]

_HOMES = {
    "Comparison": "checking.comparison",
    "Forecast": "forecast.prediction",
    "Inspection": "inspection.reading",
    "RunReport": "report",
    "Settings": "keywords",
    "Stream": "streaming.stream",
    "TokenFeatures": "tokens",
    "Verification": "checking.verification",
    "compare": "checking.comparison",
    "embed_pack": "packed",
    "embed_tokens": "packed",
    "encode": "api",
    "export": "exporter",
    "inspect": "inspection.reading",
    "load_recipe": "recipes",
    "load_tower": "packed",
    "merge": "merger",
    "pack_images": "packed",
    "plan": "api",
    "read_tokens": "tokens",
    "stream": "api",
    "verify": "checking.verification",
}


def __getattr__(name: str) -> object:
    """Import what needs torch on first use (PEP 562)."""
    if name in _HOMES:
        return getattr(import_module(f"vlmembed.{_HOMES[name]}"), name)
    msg = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(msg)


def __dir__() -> list[str]:
    """What there is, loaded yet or not."""
    return sorted({*globals(), *_HOMES})
