"""vlmembed: offline batch image embedding.

    import vlmembed
    report = vlmembed.encode(vlmembed.EncodeConfig(inputs=("./images",), output="out.parquet"))

Importing this package loads neither torch nor transformers; the first call does.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from vlmembed.config import EncodeConfig
from vlmembed.errors import VlmembedError

if TYPE_CHECKING:
    from vlmembed.exporter import export
    from vlmembed.merger import merge
    from vlmembed.report import RunReport
    from vlmembed.run import encode
    from vlmembed.tokens import TokenFeatures, read_tokens
    from vlmembed.towers import load_tower

__all__ = [
    "EncodeConfig",
    "RunReport",
    "TokenFeatures",
    "VlmembedError",
    "encode",
    "export",
    "load_tower",
    "merge",
    "read_tokens",
]

_HOMES = {
    "RunReport": "report",
    "TokenFeatures": "tokens",
    "encode": "run",
    "export": "exporter",
    "load_tower": "towers",
    "merge": "merger",
    "read_tokens": "tokens",
}


def __getattr__(name: str) -> object:
    """Import what needs torch on first use (PEP 562)."""
    if name in _HOMES:
        return getattr(import_module(f"vlmembed.{_HOMES[name]}"), name)
    msg = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(msg)
