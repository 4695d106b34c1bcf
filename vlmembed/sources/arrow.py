"""Images in the rows of Hugging Face datasets on disk: what `Dataset.save_to_disk` writes."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from vlmembed.errors import FailureCode, ImageError, InputError
from vlmembed.remote.retries import TransientError
from vlmembed.remote.urls import is_url
from vlmembed.sources.base import rows_between
from vlmembed.sources.files import DAMAGE
from vlmembed.sources.hfstate import data_files, inside
from vlmembed.sources.ipcfile import open_stream
from vlmembed.sources.locations import shown
from vlmembed.sources.pieces import SourcePiece, cut, holding
from vlmembed.sources.tables import RowNames, TableColumns, check_ids
from vlmembed.types import EncodedImage

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import pyarrow as pa

    from vlmembed.sources.files import FileStatus
    from vlmembed.sources.ipcfile import OpenStream
    from vlmembed.sources.messages import Message
    from vlmembed.sources.pieces import Piece
    from vlmembed.sources.readahead import ReadAhead, Row


@dataclass(frozen=True, kw_only=True, slots=True)
class ArrowFile:
    """A file of a dataset.

    Attributes:
        key: its own id, and that of the row that stands for what is lost.
        names: of its rows, which are numbered through the split.
        first_row: number in the run of its first row.
        num_rows: that its batches promise.
        status: size and version; None where it could not be opened.
        damage: why there may be more rows than these: code and message of an `ImageError`, which cannot be pickled.
    """

    key: str
    names: RowNames
    first_row: int
    num_rows: int
    status: FileStatus | None
    damage: tuple[FailureCode, str] | None

    @property
    def num_entries(self) -> int:
        """Rows, and one for all that is lost."""
        return self.num_rows + (self.damage is not None)


class HFDatasetRows:
    """Rows of files that were listed."""

    def __init__(self, reader: ReadAhead, *, files: Sequence[ArrowFile], columns: TableColumns) -> None:
        self._reader = reader
        self._files = files
        self._columns = columns

    def read_rows(self, rows: Sequence[int]) -> Iterator[EncodedImage]:
        """See `HFDatasetSource`."""
        return self._reader.read(self._rows(rows))

    def _rows(self, rows: Sequence[int]) -> Iterator[Row]:
        for file in self._files:
            wanted = rows_between(rows, file.first_row, file.num_rows)
            if wanted:
                yield from self._read_file(file, wanted)
            last = file.first_row + file.num_rows
            if file.damage and rows_between(rows, last, 1):
                yield EncodedImage(row=last, key=f"{file.key}!", content=ImageError(*file.damage))

    def _read_file(self, file: ArrowFile, rows: Sequence[int]) -> Iterator[Row]:
        num_read = 0
        with ExitStack() as stack:
            try:
                opened = stack.enter_context(open_stream(file.names.location, self._reader.remotes))
                self._check_unchanged(file, opened)
                first = file.first_row
                for message in opened.batches():
                    wanted = rows_between(rows, first, message.num_rows)
                    if wanted:
                        yield from self._read_batch(file, opened, message, first, wanted)
                    first += message.num_rows
                    num_read += len(wanted)
                    if num_read == len(rows):
                        return
                broken = ImageError(FailureCode.UNREADABLE, f"{file.key} holds fewer rows than when it was listed")
            except FileNotFoundError:
                broken = ImageError(FailureCode.MISSING, f"{file.key} was there when the run began, and is gone")
            except DAMAGE as error:
                broken = ImageError(FailureCode.UNREADABLE, f"{file.key}: {_lasting(error)}")
            yield from self._columns.lost(rows[num_read:], file.names, broken)

    def _check_unchanged(self, file: ArrowFile, opened: OpenStream) -> None:
        """Raises:
        ValueError: it is no longer the file that was listed.
        """
        assert file.status
        if found := opened.status.difference(file.status) or self._columns.difference(opened.schema, file.key):
            msg = f"it has changed since it was listed: {found} then"
            raise ValueError(msg)

    def _read_batch(
        self, file: ArrowFile, opened: OpenStream, message: Message, first: int, rows: Sequence[int]
    ) -> Iterator[Row]:
        """Yield `rows` of a batch that begins with row `first`."""
        num_read = 0
        batch: pa.RecordBatch | None = None
        try:
            batch = opened.load(message)
            self._columns.check(batch)
            for row in self._columns.rows(batch, first, opened.while_whole(rows), file.names):
                yield row
                num_read += 1
        except DAMAGE as error:
            broken = ImageError(FailureCode.UNREADABLE, f"{file.key}, batch at byte {message.start}: {_lasting(error)}")
            yield from self._columns.lost(rows[num_read:], file.names, broken)


class HFDatasetSource:
    """Rows of the splits of datasets that `save_to_disk` has written, streamed batch by batch.

    `splits` are their folders, paths or URLs, each with its id: a row is ``ID#NUMBER``, numbered through the files of
    the split. The first file says which columns are read; the others must have them with the same types. What a damaged
    file no longer gives fails: the rows of the batches that are known, and one row ``ID/FILE!`` for all that followed.
    """

    def __init__(
        self,
        splits: Sequence[tuple[str, str]],
        *,
        reader: ReadAhead,
        image_column: str | None,
        id_column: str | None,
        keep_columns: tuple[str, ...],
    ) -> None:
        self.skipped: Counter[str] = Counter()
        self.num_rows = 0
        self._reader = reader
        self._columns: TableColumns | None = None
        self._choose = partial(
            TableColumns.choose, image_column=image_column, id_column=id_column, keep_columns=keep_columns
        )
        self._files: list[ArrowFile] = []
        digest, keys_digest = hashlib.sha256(), hashlib.sha256()
        for folder, key in splits:
            first_row, lost = self.num_rows, []
            for name in data_files(folder, reader.remotes):
                names = RowNames(key=key, first_row=first_row, location=inside(folder, name))
                file = self._add(names, f"{key}/{name}")
                version = [file.status.num_bytes, file.status.version] if file.status else None
                damage = file.damage[0] if file.damage else None  # its message may be another at the next start
                digest.update(json.dumps([file.key, version, file.num_rows, damage]).encode() + b"\n")
                lost += [[file.key, self.num_rows - first_row]] if file.damage else []
            keys_digest.update(json.dumps([key, self.num_rows - first_row, lost]).encode() + b"\n")
        if self._columns is None:
            reason = "".join(f" ({file.key}: {file.damage[1]})" for file in self._files[:1] if file.damage)
            msg = f"no file of {', '.join(key for _, key in splits)} can be read{reason}: save the dataset again"
            raise InputError(msg)
        self.kept_schema: pa.Schema = self._columns.kept_schema
        self.digest: str = digest.hexdigest()
        self.keys_digest: str = keys_digest.hexdigest()
        if id_column:
            self.keys_digest = check_ids(id_column, ((file.key, self._ids(file)) for file in self._files))

    def _add(self, names: RowNames, key: str) -> ArrowFile:
        """Count the rows of a file by the heads of its batches.

        Raises:
            InputError: its columns are others, or its server does not give it.
        """
        num_rows, status = 0, None
        damage: tuple[FailureCode, str] | None = None
        try:
            with open_stream(names.location, self._reader.remotes) as opened:
                status = opened.status
                if self._columns is None:
                    self._columns = self._choose(opened.schema, key)
                self._columns.require_same(opened.schema, key)
                for message in opened.batches():
                    num_rows += message.num_rows
        except FileNotFoundError:
            damage = FailureCode.MISSING, f"{key} is not there"
        except DAMAGE as error:
            if isinstance(error, OSError) and is_url(names.location):  # may pass: the rows would be others then
                msg = f"{shown(names.location)} cannot be read ({error}): try again later, or leave the dataset out"
                raise InputError(msg) from error
            damage = FailureCode.UNREADABLE, f"{key}: {error}"
        file = ArrowFile(
            key=key,
            names=names,
            first_row=self.num_rows,
            num_rows=num_rows,
            status=status,
            damage=damage,
        )
        self._files.append(file)
        self.num_rows += file.num_entries
        return file

    def _ids(self, file: ArrowFile) -> Iterator[list[object]]:
        columns = self._columns
        assert columns
        assert columns.identity
        if file.damage:
            raise ImageError(*file.damage)
        with open_stream(file.names.location, self._reader.remotes) as opened:
            for message in opened.batches():
                batch = opened.load(message)
                column = columns.column(batch, columns.identity)
                column.validate(full=True)
                yield column.to_pylist()

    def read(self, start: int) -> Iterator[EncodedImage]:
        """Yield rows; those that a damaged file no longer gives fail as ``unreadable``."""
        return self.read_rows(range(start, self.num_rows))

    def read_rows(self, rows: Sequence[int]) -> Iterator[EncodedImage]:
        """Yield these rows; batches that hold none of them are not touched."""
        assert self._columns
        return HFDatasetRows(self._reader, files=self._files, columns=self._columns).read_rows(rows)

    def pieces(self, rows: range, size: int, first_row: int = 0) -> Iterator[Piece]:
        """See `Divisible`."""
        assert self._columns
        for run in cut(rows, size, first_row):
            files = holding(self._files, run, lambda file: file.first_row)
            make = partial(HFDatasetRows, files=files, columns=self._columns)
            yield SourcePiece(run=run, first_row=first_row, make=make)

    def close(self) -> None:
        """Nothing is kept open between reads."""


def _lasting(error: BaseException) -> BaseException:
    """What a row's message says: of tries that all failed the last one, since how long they took is never the same."""
    return error.__cause__ if isinstance(error.__cause__, TransientError) else error
