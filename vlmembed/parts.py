"""The committed parts of a run.

The partial folder holds ``manifest.json`` (whose run this is), a pair of Parquet files per part, and ``parts.jsonl``, a
line per committed part with its counts and the SHA-256 of its files. A part exists once its line does: its files are
written beside, synchronised and renamed first.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq

from vlmembed.atomic import atomic
from vlmembed.errors import OutputError
from vlmembed.partfiles import PartFiles, PartRecord, storing

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    import pyarrow as pa

    from vlmembed.schema import VectorColumn

LINES = "parts.jsonl"

FIRSTS = "firsts.json"
"""What a run over a cluster has found out of duplicates; see `vlmembed.engines.firsts`."""


class PartStore(PartFiles):
    """Owns the parts of one run: their files, and the list of those that are committed.

    Attributes:
        records: the committed parts, in order, from part 0 on.
    """

    def __init__(
        self,
        folder: Path,
        schema: pa.Schema,
        *,
        vectors: tuple[VectorColumn, ...],
        rows_per_part: int,
        max_row_bytes: int = 0,
    ) -> None:
        super().__init__(folder, schema, vectors=vectors, rows_per_part=rows_per_part, max_row_bytes=max_row_bytes)
        _drop_cut_line(folder / LINES)
        self.records = read_records(folder)

    @property
    def next_row(self) -> int:
        """The first row that is not committed."""
        return sum(record.num_rows for record in self.records)

    def commit(self, record: PartRecord, columns: Mapping[str, Any], errors: Mapping[str, Any]) -> None:
        """Write a part whole or not at all, then its line. `columns` and `errors` are by name.

        Raises:
            StorageError: it could not be written.
        """
        self.add(self.write(record, columns, errors))

    def add(self, record: PartRecord) -> None:
        """The next part's files are written: with this line it is committed. Raises `StorageError`."""
        assert record.number == len(self.records)
        with storing(self.folder / LINES), (self.folder / LINES).open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(record)) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self.records.append(record)

    def noted(self) -> dict[int, PartRecord]:
        """The parts behind the committed ones that are written whole, by number."""
        found: dict[int, PartRecord] = {}
        notes = list(self.folder.glob("part-*.json"))
        mine = self.run_id() if notes else ""
        for path in notes:
            try:
                note = json.loads(path.read_bytes())
                run_id, record = note["run"], PartRecord(**note["part"])
            except (OSError, ValueError, TypeError, KeyError):  # it is made again
                continue
            if run_id == mine and record.number >= len(self.records) and self.is_as_written(record):
                found[record.number] = record
        return found

    def check(self) -> int:
        """Compare every part with what was written. Those from the first damaged one on are no parts any more, and
        their rows are to be done again; returns how many parts that is."""
        for position, record in enumerate(self.records):
            if self.is_as_written(record):
                continue
            num_lost = len(self.records) - position
            del self.records[position:]
            with storing(self.folder / LINES), atomic(self.folder / LINES) as path:
                path.write_text("".join(json.dumps(asdict(each)) + "\n" for each in self.records), encoding="utf-8")
            return num_lost
        return 0

    def hashes(self) -> Iterator[tuple[int, bytes]]:
        """(row, content hash) of every committed row that has one, part by part."""
        for record in self.records:
            failed = self._errors(record.number, "row", "content_hash").to_pydict()
            found = [pair for pair in zip(failed["row"], failed["content_hash"], strict=True) if pair[1] is not None]
            hashes = pq.read_table(self.folder / record.file_name, columns=["content_hash"])["content_hash"].to_pylist()
            found += zip(self._rows(record.number).tolist(), hashes, strict=True)
            yield from sorted(found)

    def codes(self) -> Counter[str]:
        """Committed failed rows by code."""
        codes: Counter[str] = Counter()
        for record in self.records:
            codes.update(self._errors(record.number, "code")["code"].to_pylist())
        return codes

    def last_key(self) -> str | None:
        """The id of the last committed row; None where there is none."""
        if not self.records:
            return None
        record = self.records[-1]
        rows, failed = self.rows_of(record.number)
        if len(failed) and (not len(rows) or failed[-1] > rows[-1]):
            table = self._errors(record.number, "id", "row").sort_by("row")
        else:
            table = pq.read_table(self.folder / record.file_name, columns=["id"], page_checksum_verification=True)
        return str(table["id"][-1].as_py())


def read_records(folder: Path) -> list[PartRecord]:
    """The committed parts of a partial folder; none where there is no such folder.

    Raises:
        OutputError: their list is not one that this version writes.
    """
    path = folder / LINES
    lines = _whole_lines(path.read_bytes()) if path.exists() else []
    try:
        return [PartRecord(**json.loads(line)) for line in lines]
    except TypeError as error:
        msg = f"{path} is of another version ({error}): start anew with --overwrite"
        raise OutputError(msg) from error


def has_work(folder: Path) -> bool:
    """Whether a partial folder holds what took its time to make. Raises as `read_records`."""
    return bool(read_records(folder)) or (folder / FIRSTS).exists()


def _whole_lines(content: bytes) -> list[bytes]:
    """A crash can cut the last line, a power cut fill it with zeros: from there on no part counts."""
    lines = []
    for line in content.split(b"\n")[:-1]:
        try:
            json.loads(line)
        except ValueError:
            break
        lines.append(line)
    return lines


def _drop_cut_line(path: Path) -> None:
    """The next line must not join one that was cut."""
    content = path.read_bytes() if path.exists() else b""
    whole = sum(len(line) + 1 for line in _whole_lines(content))
    if whole < len(content):
        with path.open("r+b") as file:
            file.truncate(whole)
            os.fsync(file.fileno())
