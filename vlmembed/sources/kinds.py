"""Files that hold many pictures: told by their names, or by their first bytes."""

from __future__ import annotations

import os
import stat
from typing import Literal, TypeAlias

from vlmembed.sources.tarnames import is_tar

LANCE = ".lance"

Container: TypeAlias = Literal["parquet", "tar", "zip"]

HEAD_BYTES = 512


def is_lance_dataset(name: str) -> bool:
    """Whether the name of a folder is that of a Lance dataset."""
    return name.rstrip("/").endswith(LANCE)


def kind_of_name(name: str) -> Container | None:
    """By the name alone."""
    extension = os.path.splitext(name)[1].lower()  # noqa: PTH122  may be a URL, or not text
    if extension == ".parquet":
        return "parquet"
    if extension == ".zip":
        return "zip"
    return "tar" if is_tar(name, b"") else None


def kind_of_file(name: str, head: bytes | None = None) -> Container | None:
    """By its first `HEAD_BYTES`, else by the name; of a local file they are read here."""
    try:
        if head is None and not stat.S_ISREG(os.stat(name).st_mode):  # noqa: PTH116  may not be text
            return None  # reading from a pipe would wait for its writer
        if head is None:
            with open(name, "rb") as file:  # noqa: PTH123  as above
                head = file.read(HEAD_BYTES)
    except OSError:
        return None
    if head.startswith(b"PAR1"):
        return "parquet"
    if head.startswith((b"PK\x03\x04", b"PK\x05\x06")):
        return "zip"
    return "tar" if is_tar(name, head) else kind_of_name(name)
