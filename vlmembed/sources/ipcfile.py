"""An open file that holds an Arrow stream: its batches one by one, memory-mapped, each checked before it is used."""

from __future__ import annotations

import mmap
import os
import tempfile
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pyarrow as pa

from vlmembed.sources.files import open_file
from vlmembed.sources.messages import Kind, read_messages

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from vlmembed.remote.remotes import Remotes
    from vlmembed.sources.files import FileStatus
    from vlmembed.sources.messages import Message

MAX_HELD_BYTES = 64 * 2**20
"""A batch from a server is held in memory up to this size; a larger one is written into a scratch file, and mapped."""

COPY_BYTES = 4 * 2**20

MAX_ROWS_PER_BYTE = 100
MAX_ROWS_OF_NOTHING = 2**20
"""Heads that promise more rows than the two allow for are not believed: each row would have to fail by itself."""


class OpenStream:
    """An Arrow stream in a file, while it is read.

    Attributes:
        schema: of its columns.
        status: size and version of the very file that is open.

    Raises:
        One of `DAMAGE`: it has no schema.
    """

    def __init__(self, file: pa.NativeFile, status: FileStatus, *, is_local: bool) -> None:
        self.status = status
        self._file = file
        self._descriptor: int | None = file.fileno() if is_local else None
        self._dictionaries: list[bytes] = []
        first = next(read_messages(file, status.num_bytes), None)
        if first is None or first.kind is not Kind.SCHEMA or first.end > status.num_bytes:
            msg = "it does not begin with a schema"
            raise ValueError(msg)
        self._schema_bytes = file.read_at(first.num_bytes, first.start)
        try:
            self.schema: pa.Schema = pa.ipc.read_schema(pa.py_buffer(self._schema_bytes))
        except OSError as error:  # which is not of the file: these bytes are here
            raise ValueError(str(error)) from error
        _check_names(self.schema)

    def batches(self) -> Iterator[Message]:
        """Yield the batches' heads, in order; `load` gives what the last one holds.

        Raises:
            One of `DAMAGE`: what follows cannot be read.
        """
        num_rows = 0
        self._dictionaries.clear()
        for message in read_messages(self._file, self.status.num_bytes):
            if message.kind is Kind.BATCH:
                num_rows += message.num_rows
                if num_rows > MAX_ROWS_OF_NOTHING + MAX_ROWS_PER_BYTE * self.status.num_bytes:
                    msg = f"it promises {num_rows} rows, too many for a file of {self.status.num_bytes} bytes"
                    raise ValueError(msg)
                yield message
            elif message.kind is Kind.DICTIONARY:
                if message.num_bytes + sum(map(len, self._dictionaries)) > MAX_HELD_BYTES:
                    msg = f"its dictionaries have more than {MAX_HELD_BYTES} bytes: save it without"
                    raise ValueError(msg)
                self._dictionaries.append(self._file.read_at(message.num_bytes, message.start))

    def load(self, message: Message) -> pa.RecordBatch:
        """A batch, whose columns are yet to be validated: they lie where the file is mapped.

        Raises:
            One of `DAMAGE`: it cannot be read, or is not what its head says.
        """
        if message.end > self.status.num_bytes:
            msg = f"the file ends at byte {self.status.num_bytes}, inside a batch that ends at {message.end}"
            raise ValueError(msg)
        if message.is_compressed:
            msg = "the batch is compressed, which `datasets` does not do"
            raise ValueError(msg)
        content = self._content(message)
        if self._dictionaries:
            with pa.ipc.open_stream(b"".join([self._schema_bytes, *self._dictionaries, memoryview(content)])) as stream:
                batch = stream.read_next_batch()
        else:
            batch = pa.ipc.read_record_batch(pa.ipc.read_message(content), self.schema)
        if batch.num_rows != message.num_rows:
            msg = f"the batch has {batch.num_rows} rows, and promises {message.num_rows}"
            raise ValueError(msg)
        return batch

    def _content(self, message: Message) -> pa.Buffer:
        if self._descriptor is not None:
            self._check_size()
            return _mapped(self._descriptor, message.start, message.num_bytes)
        if message.num_bytes <= MAX_HELD_BYTES:
            return pa.py_buffer(self._file.read_at(message.num_bytes, message.start))
        with tempfile.TemporaryFile() as scratch:
            for start in range(message.start, message.end, COPY_BYTES):
                scratch.write(self._file.read_at(min(COPY_BYTES, message.end - start), start))
            scratch.flush()
            return _mapped(scratch.fileno(), 0, message.num_bytes)

    def while_whole(self, rows: Sequence[int]) -> Iterator[int]:
        """Yield the rows as long as the file has the size that it had: a map of what is cut off ends the process.

        Raises:
            OSError: it has been cut.
        """
        for row in rows:
            self._check_size()
            yield row

    def _check_size(self) -> None:
        if self._descriptor is not None and os.fstat(self._descriptor).st_size < self.status.num_bytes:
            msg = "it has been cut while it was read"
            raise OSError(msg)


def _check_names(fields: Iterable[pa.Field]) -> None:
    """Raises:
    ValueError: a column's name, at any depth, is no text; pyarrow says so only when it is asked for.
    """
    for field in fields:
        _ = field.name
        _check_names(field.type.field(number) for number in range(field.type.num_fields))


def _mapped(descriptor: int, start: int, num_bytes: int) -> pa.Buffer:
    """A part of a file, which stays mapped as long as something in it is referred to."""
    offset = start % mmap.ALLOCATIONGRANULARITY
    mapped = mmap.mmap(descriptor, offset + num_bytes, access=mmap.ACCESS_READ, offset=start - offset)
    return pa.py_buffer(memoryview(mapped)[offset:])


@contextmanager
def open_stream(path: str, remotes: Remotes | None) -> Iterator[OpenStream]:
    """Open a file, or what a URL names.

    Raises:
        FileNotFoundError: it is not there.
        OSError: it cannot be read.
        Another of `DAMAGE`: it has no schema.
    """
    with open_file(path, remotes) as (file, status):
        yield OpenStream(file, status, is_local=isinstance(file, pa.OSFile))
