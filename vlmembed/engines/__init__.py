"""Engines: one machine, or a cluster. The stages are the same, and so is what comes of them."""

from __future__ import annotations

from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING

from vlmembed.errors import MissingExtraError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vlmembed.config import EncodeConfig
    from vlmembed.engines.base import Engine

__all__ = ["open_engine"]


@contextmanager
def open_engine(config: EncodeConfig) -> Iterator[Engine]:
    """The engine of a run, connected to its cluster while the block runs.

    Raises:
        MissingExtraError: Ray is not installed.
        ClusterError: there is no cluster at the address, or too little in it.
    """
    from vlmembed.engines.local import LocalEngine  # noqa: PLC0415  torch, which tasks of a cluster do without

    if not config.on_ray:
        yield LocalEngine()
        return
    if find_spec("ray") is None:
        msg = "--engine ray needs the package ray, on all machines: pip install 'vlmembed[ray]'"
        raise MissingExtraError(msg)
    from vlmembed.engines.ray import RayEngine  # noqa: PLC0415  an extra, slow to import

    with RayEngine.connected(config) as engine:
        yield engine
