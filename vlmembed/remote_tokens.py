"""An output behind a URL, of which single rows are read."""

from __future__ import annotations

import io
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq

from vlmembed.errors import InputError
from vlmembed.output import LANCE, SUCCESS, errors_of
from vlmembed.remote.urls import shown_url, without_options
from vlmembed.schema import VECTORS, read_provenance

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from typing import Self

    from vlmembed.remote.remotes import Remotes

REQUEST_BYTES = 64 * 2**10
"""What is asked of a server at least."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RemoteTokens:
    """A Parquet output on a server: a file, or a folder of parts. Only what is asked for is read of it.

    Attributes:
        path: its URL. files: URLs of the files with its rows, in order.
        errors: URL of the file of the rows that failed. schema: of the files.
    """

    path: str
    files: tuple[str, ...]
    errors: str
    schema: pa.Schema
    remotes: Remotes

    @classmethod
    def look(cls, url: str, remotes: Remotes) -> Self:
        """Look at an output.

        Raises:
            InputError: it is not there, not whole, or was not written by vlmembed.
        """
        place = without_options(url).rstrip("/")
        options = url.removeprefix(without_options(url))
        if place.endswith(LANCE):
            msg = f"{shown_url(url)} is a Lance dataset: read it with lance.dataset(), which goes to servers itself"
            raise InputError(msg)
        try:
            if is_folder := remotes.info(url).is_folder:
                names = {without_options(info.url): info.url for info in remotes.walk(url, recursive=False)}
                if f"{place}/{SUCCESS}" not in names:
                    msg = f"{shown_url(url)} is a folder without {SUCCESS}: not finished, or no output of vlmembed"
                    raise InputError(msg)
                files = tuple(
                    names[name]
                    for name in sorted(names, key=lambda name: (len(name), name))
                    if name.startswith(f"{place}/part-")
                )
            else:
                files = (url,)
            with _opened(files[0], remotes) as rows:
                schema = rows.schema_arrow
        except FileNotFoundError as error:
            msg = f"{shown_url(url)} does not exist: name the output of an earlier run"
            raise InputError(msg) from error
        except (OSError, IndexError, ValueError, pa.ArrowException) as error:
            msg = f"{shown_url(url)} cannot be read as Parquet: {error}"
            raise InputError(msg) from error
        read_provenance(schema, shown_url(url))
        errors = errors_of(place, is_folder=is_folder) + options
        return cls(path=shown_url(url), files=files, errors=errors, schema=schema, remotes=remotes)

    @property
    def vectors(self) -> tuple[str, ...]:
        """Names of the columns of vectors."""
        return tuple(name for name in self.schema.names if VECTORS.fullmatch(name))

    @property
    def has_errors(self) -> bool:
        """Whether the file of the rows that failed is there."""
        try:
            self.remotes.info(self.errors)
        except OSError:
            return False
        return True

    @contextmanager
    def opened(self, file: Path | str) -> Iterator[pq.ParquetFile]:
        """One of its files."""
        with _opened(str(file), self.remotes) as rows:
            yield rows


@contextmanager
def _opened(url: str, remotes: Remotes) -> Iterator[pq.ParquetFile]:
    with (
        remotes.open(url) as remote,
        io.BufferedReader(remote, REQUEST_BYTES) as buffered,
        pa.PythonFile(buffered, mode="r") as file,
        pq.ParquetFile(file, pre_buffer=True, page_checksum_verification=True) as rows,
    ):
        yield rows
