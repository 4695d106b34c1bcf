"""Shards of a source: contiguous, equal, every row in one of them."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image
from test_end_to_end import run

from vlmembed.checking.verification import verify
from vlmembed.config import EncodeConfig
from vlmembed.errors import ConfigError, InputError, OutputError
from vlmembed.finished import FinishedOutput
from vlmembed.provenance import difference, encoder_fingerprint
from vlmembed.shards import parse_shard, shard_text
from vlmembed.sources import open_source
from vlmembed.sources.shard import ShardSource, shard_entries, split_files

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from vlmembed.sources.base import Source
    from vlmembed.types import EncodedImage


def small_pictures(folder: Path, count: int) -> Path:
    """Pictures that differ."""
    folder.mkdir()
    for row in range(count):
        Image.fromarray(np.full((6, 6 + row, 3), row, np.uint8)).save(folder / f"{row:03}.png")
    return folder


def keys(images: Iterable[EncodedImage]) -> list[tuple[int, str]]:
    return [(image.row, image.key) for image in images]


def opened(folder: Path, **settings: Any) -> Source:  # noqa: ANN401  of `EncodeConfig`
    return open_source(EncodeConfig(inputs=(folder,), output="out.parquet", **settings))


@pytest.mark.parametrize(("text", "expected"), [("0/1", (0, 1)), ("3/4", (3, 4)), ("007/012", (7, 12))])
def test_a_shard_is_written_as_i_of_n(text: str, expected: tuple[int, int]) -> None:
    assert parse_shard(text) == expected
    assert parse_shard(shard_text(*expected)) == expected


@pytest.mark.parametrize("text", ["", "1", "1/", "/2", "-1/2", "1/2/3", "a/b", "1.0/2", " 0/2", "0/0", "0/9999999999"])
def test_what_is_no_shard_is_told(text: str) -> None:
    with pytest.raises(
        ConfigError, match="it is i/n with i from 0 to n-1: 0/4, 1/4, 2/4 and 3/4 are the whole"
    ) as told:
        parse_shard(text)
    assert f"shard is {text!r}" in str(told.value)


def test_a_shard_beyond_the_last_is_told_with_the_limit() -> None:
    with pytest.raises(ConfigError, match=r"shard is '4/4'; i can be 0 to 3; it is i/n"):
        EncodeConfig(inputs=("in",), output="out.parquet", shard="4/4")


@pytest.mark.parametrize("count", [1, 2, 3, 5, 7])
def test_shards_in_order_are_the_whole(count: int, tmp_path: Path) -> None:
    folder = small_pictures(tmp_path / "in", 7)
    whole = opened(folder)
    expected = keys(whole.read(0))
    found: list[tuple[int, str]] = []
    sizes = []
    for index in range(count):
        shard = ShardSource(opened(folder), index, count)
        assert shard.first_row == len(found)
        rows = keys(shard.read(0))
        assert [row for row, _ in rows] == list(range(shard.num_rows or 0))
        assert keys(shard.read(1)) == rows[1:]
        assert keys(shard.read(len(rows))) == []
        assert keys(shard.read_rows(range(0, len(rows), 2))) == rows[::2]
        found += [(row + shard.first_row, key) for row, key in rows]
        sizes.append(len(rows))
        assert (shard.whole_digest, shard.whole_keys_digest, shard.whole_num_rows) == (
            whole.digest,
            whole.keys_digest,
            7,
        )
        shard.close()
    whole.close()
    assert found == expected
    assert max(sizes) - min(sizes) <= 1


def test_a_limit_is_of_the_whole(tmp_path: Path) -> None:
    folder = small_pictures(tmp_path / "in", 9)
    shards = [opened(folder, shard=f"{index}/2", limit=5) for index in range(2)]
    assert [keys(shard.read(0)) for shard in shards] == [
        [(0, "000.png"), (1, "001.png")],
        [(0, "002.png"), (1, "003.png"), (2, "004.png")],
    ]
    assert shard_entries(shards[1])["whole"]["num_rows"] == 5
    for shard in shards:
        shard.close()


def test_digests_tell_shards_apart(tmp_path: Path) -> None:
    folder = small_pictures(tmp_path / "in", 6)
    (folder / "notes.txt").write_text("no picture")
    sources = [opened(folder), *(opened(folder, shard=text) for text in ("0/2", "1/2", "0/3"))]
    assert len({source.digest for source in sources}) == 4
    assert len({source.keys_digest for source in sources}) == 4
    assert opened_twice(folder, "1/2") == (sources[2].digest, sources[2].keys_digest)
    assert all(source.skipped == {".txt": 1} for source in sources)
    assert shard_entries(sources[0]) == {}
    assert shard_entries(sources[2]) == {
        "shard": "1/2",
        "whole": {"source_sha256": sources[0].digest, "keys_sha256": sources[0].keys_digest, "num_rows": 6},
    }
    for source in sources:
        source.close()


def opened_twice(folder: Path, shard: str) -> tuple[str, str]:
    source = opened(folder, shard=shard)
    source.close()
    return source.digest, source.keys_digest


def test_more_shards_than_rows_are_refused_in_every_one(tmp_path: Path) -> None:
    folder = small_pictures(tmp_path / "in", 3)
    for index in range(4):
        with pytest.raises(InputError, match=r"shard ./4: the inputs are 3 rows, and some of 4 shards .* 3 or fewer"):
            opened(folder, shard=f"{index}/4")


def test_files_are_split_by_bytes_and_none_is_lost() -> None:
    generator = np.random.default_rng(0)
    for _ in range(300):
        sizes = (generator.integers(0, 2, 30) * generator.integers(0, 1000, 30))[: generator.integers(1, 30)].tolist()
        count = int(generator.integers(1, len(sizes) + 1))
        pieces = [split_files(sizes, index, count) for index in range(count)]
        assert [piece.start for piece in pieces[1:]] == [piece.stop for piece in pieces[:-1]]
        assert (pieces[0].start, pieces[-1].stop) == (0, len(sizes))
        assert all(piece.start < piece.stop for piece in pieces)
        sums = [sum(sizes[piece]) for piece in pieces]
        assert max(sums) <= sum(sizes) / count + 2 * max(sizes)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([10, 10, 10, 10], [(0, 2), (2, 4)]),
        ([100, 1, 1, 1], [(0, 1), (1, 4)]),
        ([1, 1, 1, 100], [(0, 3), (3, 4)]),
        ([0, 0, 0], [(0, 1), (1, 3)]),
    ],
)
def test_the_split_of_files(sizes: list[int], expected: list[tuple[int, int]]) -> None:
    assert [(piece.start, piece.stop) for piece in (split_files(sizes, index, 2) for index in range(2))] == expected


def test_files_are_not_cut() -> None:
    with pytest.raises(InputError, match=r"the inputs are 2 files, which are not cut, and some of 3 .* 2 or fewer"):
        split_files([10**9, 10**9], 0, 3)


class Stream:
    """A source that counts its rows by reading them, as archives are."""

    def __init__(self, names: Sequence[str], skipped: Counter[str]) -> None:
        self.kept_schema = pa.schema([])
        self.digest = f"digest of {names}"
        self.keys_digest = f"keys of {names}"
        self.num_rows: int | None = None
        self.skipped = skipped
        self.is_closed = False

    def read(self, start: int) -> Iterator[EncodedImage]:
        """Nothing is asked of it."""
        self.num_rows = 5 - start
        yield from ()

    def read_rows(self, rows: Sequence[int]) -> Iterator[EncodedImage]:
        """Nor here."""
        assert rows
        yield from ()

    def close(self) -> None:
        """Note it."""
        self.is_closed = True


def test_a_shard_of_files_knows_its_rows_once_they_are_read() -> None:
    names = ["a", "b", "c"]
    whole = Stream(names, Counter({".txt": 2}))
    for index in range(2):
        piece = Stream(names[split_files([1, 1, 1], index, 2)], Counter({".json": 1}))
        shard = ShardSource.of_files(piece, whole, index, 2)
        assert (shard.num_rows, shard.first_row, shard.whole_num_rows) == (None, None, None)
        assert shard.digest not in (piece.digest, whole.digest)
        assert shard_entries(shard) == {
            "shard": f"{index}/2",
            "whole": {"source_sha256": whole.digest, "keys_sha256": whole.keys_digest, "num_rows": None},
        }
        assert list(shard.read(0)) == list(shard.read_rows([0])) == []
        assert shard.num_rows == 5
        assert shard.skipped == ({".json": 1, ".txt": 2} if index == 0 else {".json": 1})  # in one shard alone
        shard.close()
        assert piece.is_closed
        assert whole.is_closed


def test_the_run_of_a_shard(tmp_path: Path, tiny_model: Path) -> None:
    folder, output = small_pictures(tmp_path / "in", 7), tmp_path / "out.parquet"
    settings = {"model": str(tiny_model), "rows_per_part": 2}
    report = run(folder, output, **settings, shard="1/3")
    assert (report.num_rows, report.num_embedded) == (2, 2)
    facts = FinishedOutput.open(output).provenance
    assert facts["fingerprint"]["shard"] == "1/3"
    assert EncodeConfig.from_toml(facts["recipe"]).shard == "1/3"
    assert run(folder, output, **settings, shard="1/3").already_complete
    found = verify(output, num_rows=None)
    assert (found.is_good, found.num_checked) == (True, 2)
    for other, shown in ((None, "null"), ("0/3", '"0/3"'), ("1/2", '"1/2"')):
        with pytest.raises(OutputError, match="belongs to another run") as told:
            run(folder, output, **settings, shard=other)
        assert str(told.value).splitlines()[1:-1] == [f'  shard: "1/3" there, {shown} now']
    with pytest.raises(OutputError, match="the whole that it is a shard of: 7 rows there, 6 rows now"):
        run(folder, output, **settings, shard="1/3", limit=6)
    (folder / "003.png").write_bytes(b"")
    with pytest.raises(OutputError, match="the list of inputs: names, sizes or change times"):
        run(folder, output, **settings, shard="1/3")


def test_fingerprints_of_shards() -> None:
    whole = {"source_sha256": "a", "keys_sha256": "b", "num_rows": 10}
    one: dict[str, Any] = {"weights_sha256": "w", "shard": "0/2", "whole": whole, "num_rows": 5, "source_sha256": "c"}
    other = one | {"shard": "1/2", "num_rows": 4, "source_sha256": "d"}
    assert encoder_fingerprint(one) == encoder_fingerprint(other) == {"weights_sha256": "w"}
    assert difference(one, other) == ['shard: "0/2" there, "1/2" now']
    assert difference(one, one) == []
    for first, second in itertools.permutations([one, one | {"whole": whole | {"num_rows": 9}}]):
        assert len(difference(first, second)) == 1
