"""What the kinds of tables have in common: which of their columns are read, and the rows made of a batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa

from vlmembed.errors import ImageError, InputError
from vlmembed.sources.base import rows_between
from vlmembed.sources.columns import (
    ImageColumn,
    check_image_column,
    column_at,
    find_field,
    find_image_column,
    is_string,
)
from vlmembed.sources.files import DAMAGE
from vlmembed.sources.ids import IdIndex
from vlmembed.sources.locations import resolve
from vlmembed.sources.readahead import UnreadRow
from vlmembed.types import EncodedImage

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from vlmembed.sources.readahead import Row


@dataclass(frozen=True, kw_only=True, slots=True)
class RowNames:
    """Where a batch's rows belong.

    Attributes:
        key: id of what they are numbered in.
        first_row: number in the run of the row that is 0 there.
        location: path or URL of the file, to which the paths in it are relative.
    """

    key: str
    first_row: int
    location: str

    def name(self, row: int, value: pa.Scalar | None = None) -> str:
        """A row's id: what the id column holds, or else the table and the row in it."""
        try:
            name = None if value is None else value.as_py()
        except UnicodeDecodeError:  # the file was changed after its ids were looked through
            name = None
        return f"{self.key}#{row - self.first_row}" if name is None else str(name)


@dataclass(frozen=True, kw_only=True, slots=True)
class TableColumns:
    """The columns that are read of all tables of a source, as the first table has them.

    Attributes:
        image, identity: names of the column of images and of that of ids, which may be none.
        keep: names of the columns that are handed on.
        ways: to each column, through structs.
        schema: of these columns, each under its whole name.
        owner: the table that they were chosen from.
    """

    image: str
    identity: str | None
    keep: tuple[str, ...]
    ways: dict[str, tuple[str, ...]]
    schema: pa.Schema
    owner: str

    @classmethod
    def choose(
        cls,
        schema: pa.Schema,
        owner: str,
        *,
        image_column: str | None,
        id_column: str | None,
        keep_columns: tuple[str, ...],
    ) -> TableColumns:
        """Choose the columns of the first table, which messages are to call `owner`.

        Raises:
            InputError: one is not there, or of a type that cannot be what it should be.
        """
        image = image_column or find_image_column(schema, owner)
        ids = [id_column] if id_column else []
        found = {name: find_field(schema, name, owner) for name in dict.fromkeys([image, *ids, *keep_columns])}
        for name in ids:
            kind = found[name][1].type
            if not (is_string(kind) or pa.types.is_integer(kind)):
                msg = f"--id-column {name!r} of {owner} has type {kind}; ids are strings or integers"
                raise InputError(msg)
        check_image_column(found[image][1].type, image, owner)
        return cls(
            image=image,
            identity=id_column,
            keep=keep_columns,
            ways={name: way for name, (way, _) in found.items()},
            schema=pa.schema([field.with_name(name) for name, (_, field) in found.items()]),
            owner=owner,
        )

    @property
    def kept_schema(self) -> pa.Schema:
        """Of the columns that are handed on."""
        return pa.schema([self.schema.field(name).with_nullable(nullable=True) for name in self.keep])

    def difference(self, schema: pa.Schema, name: str) -> str | None:
        """In which column a table called `name` differs from the first one; None where it does not."""
        for field in self.schema:
            try:
                way, found = find_field(schema, field.name, name)
            except InputError:
                return f"column {field.name!r} is no such column, and {field.type}"
            if found.type != field.type:
                return f"column {field.name!r} is {found.type}, and {field.type}"
            if way != self.ways[field.name]:
                return f"column {field.name!r} is {' in '.join(reversed(way))}, and another one"
        return None

    def require_same(self, schema: pa.Schema, name: str) -> None:
        """Raises:
        InputError: a table called `name` does not have these columns with the same types.
        """
        if found := self.difference(schema, name):
            msg = f"{name}: {found} in {self.owner}"
            raise InputError(msg)

    def column(self, batch: pa.RecordBatch, name: str) -> pa.Array:
        """One of the columns, of a batch that has it where it belongs, or under its whole name."""
        return batch.column(name) if name in batch.schema.names else column_at(batch, self.ways[name])

    def check(self, batch: pa.RecordBatch) -> None:
        """For batches that come from memory that anyone can have written.

        Raises:
            pa.ArrowInvalid: offsets or lengths lie outside of the buffers.
        """
        for name in self.ways:
            self.column(batch, name).validate(full=True)

    def rows(self, batch: pa.RecordBatch, first: int, wanted: Iterable[int], names: RowNames) -> Iterator[Row]:
        """Yield the `wanted` rows, in order, of a batch whose first row has number `first`."""
        images = ImageColumn(self.column(batch, self.image))
        ids = self.column(batch, self.identity) if self.identity else None
        kept = self._kept(batch) if self.keep else None
        for row in wanted:
            index = row - first
            key = names.name(row, None if ids is None else ids[index])
            columns = None if kept is None else kept.slice(index, 1).take([0])  # a slice would hold the whole batch
            content = images[index]
            if isinstance(content, str):
                content = resolve(names.location, content)
            if isinstance(content, str):
                yield UnreadRow(row=row, key=key, path=content, columns=columns)
            else:
                yield EncodedImage(row=row, key=key, content=content, columns=columns)

    def _kept(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        return pa.RecordBatch.from_arrays([self.column(batch, name) for name in self.keep], schema=self.kept_schema)

    def lost(
        self,
        rows: Sequence[int],
        names: RowNames,
        broken: ImageError,
        ids: Iterable[tuple[int, pa.RecordBatch]] = (),
    ) -> Iterator[Row]:
        """Yield rows that cannot be read. Their ids may be whole: they are taken from `ids`, batches of the id column
        with the number of their first row, as far as these go."""
        num_named = 0
        if self.identity:
            try:
                for first, batch in ids:
                    column = self.column(batch, self.identity)
                    for row in rows_between(rows, first, batch.num_rows):
                        yield EncodedImage(row=row, key=names.name(row, column[row - first]), content=broken)
                        num_named += 1
            except (ImageError, *DAMAGE):
                pass
        for row in rows[num_named:]:
            yield EncodedImage(row=row, key=names.name(row), content=broken)


def check_ids(column: str, tables: Iterable[tuple[str, Iterator[Sequence[object]]]]) -> str:
    """Look through the ids of all tables, given by name, in lists; returns their digest.

    Raises:
        InputError: one is null, comes twice, or cannot be read.
    """
    with IdIndex(column) as index:
        for name, lists in tables:
            try:
                for values in lists:
                    index.add(values, name)
            except (ImageError, *DAMAGE) as error:
                msg = f"--id-column {column!r} of {name} cannot be read ({error}): leave it out, or the file"
                raise InputError(msg) from error
        return index.digest
