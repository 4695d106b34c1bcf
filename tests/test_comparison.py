"""Two outputs held against each other: what differs is found, in any order and any kind of output, and nothing else."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from outputs import KINDS, key_of
from outputs import Rows as MadeRows
from test_cache import POOLED

from vlmembed.checking import alignment
from vlmembed.checking.alignment import Alignment
from vlmembed.checking.comparison import Comparison, Rows, compare
from vlmembed.cli import cli
from vlmembed.errors import ConfigError, InputError, UsageError
from vlmembed.output import errors_beside, is_folder_output
from vlmembed.schema import PROVENANCE_KEY, VectorColumn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from click.testing import Result

    Change = Callable[[pa.Table], pa.Table]

KEPT = pa.schema(
    [
        pa.field("label", pa.int64()),
        pa.field("word", pa.dictionary(pa.int32(), pa.string())),
        pa.field("nested", pa.struct([("label", pa.int64()), ("names", pa.list_(pa.string()))])),
    ]
)
TOKENS = (
    VectorColumn(name="tokens", width=6, dtype="float16", per_token=True),
    VectorColumn(name="deepstack_0", width=6, dtype="float16", per_token=True),
)


def altered(output: Path, target: Path, change: Change, *, facts: dict[str, Any] | None = None) -> Path:
    """A Parquet output with another table in it, but its own provenance (with `facts` changed) and the errors beside
    it."""
    table = pq.read_table(output)
    provenance = json.loads(table.schema.metadata[PROVENANCE_KEY]) | (facts or {})
    changed = change(table)
    provenance["counts"]["embedded"] += changed.num_rows - table.num_rows
    pq.write_table(changed.replace_schema_metadata({PROVENANCE_KEY: json.dumps(provenance)}), target)
    shutil.copy(output.with_suffix(".errors.parquet"), target.with_suffix(".errors.parquet"))
    return target


def with_column(table: pa.Table, name: str, values: Any) -> pa.Table:  # noqa: ANN401
    place = table.schema.get_field_index(name)
    return table.set_column(place, table.schema.field(place), pa.array(values, table.schema.field(place).type))


def with_value(name: str, row: int, value: Any) -> Change:  # noqa: ANN401
    def change(table: pa.Table) -> pa.Table:
        values = table[name].to_pylist()
        values[row] = value
        return with_column(table, name, values)

    return change


def drifted(row: int, by: float = 0.01) -> Change:
    """One row's vector moves in every value."""

    def change(table: pa.Table) -> pa.Table:
        vectors = [np.array(vector, np.float32) for vector in table["embedding"].to_pylist()]
        vectors[row] = vectors[row] + np.float32(by)
        return with_column(table, "embedding", vectors)

    return change


def in_order(order: Sequence[int]) -> Change:
    return lambda table: table.take(list(order))


def made(
    name: Path | str,
    columns: tuple[VectorColumn, ...] = POOLED,
    *,
    num_rows: int = 60,
    failed: Sequence[int] = (7, 30),
    rows_per_part: int = 20,
) -> Path:
    """An output with kept columns, and a row that repeats another."""
    rows = MadeRows(
        str(name),
        num_rows,
        columns,
        failed=failed,
        duplicates={20: 6},
        kept=KEPT,
        rows_per_part=rows_per_part,
    )
    rows.facts["fingerprint"] |= {"dtype": "fp32", "dedup": "bytes"}
    return rows.assemble()


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """58 rows with vectors, two that failed."""
    return made(tmp_path_factory.mktemp("comparison") / "stored.parquet")


def summary(found: Comparison) -> dict[str, int]:
    """What is not the same, by attribute."""
    names = ("only_here", "only_there", "failed_here", "failed_there", "codes", "contents", "sizes", "duplicates")
    counts = {name: getattr(found, name).count for name in (*names, "beyond")}
    return {name: count for name, count in (counts | {n: r.count for n, r in found.kept.items()}).items() if count}


def test_an_output_is_the_same_as_itself_whatever_kind_it_is(stored: Path, tmp_path: Path) -> None:
    for kind in KINDS:
        other = made(f"{tmp_path}/{kind}", rows_per_part=13)
        for found in (compare(other, stored), compare(stored, other)):
            assert found.is_good, (kind, found)
            assert (found.num_compared, found.num_failed, found.worst) == (58, 2, 0.0)
            assert found.differences == []
        shutil.rmtree(other) if other.is_dir() else other.unlink()
        errors_beside(other, is_folder=is_folder_output(other)).unlink(missing_ok=True)


def test_tokens_are_compared_in_all_columns(tmp_path: Path) -> None:
    first, second = (made(tmp_path / f"{name}.parquet", TOKENS) for name in ("first", "second"))
    assert compare(first, second).is_good

    def drift(table: pa.Table) -> pa.Table:
        values = table["deepstack_0"].to_pylist()
        values[11] = [[each * 1.5 for each in vector] for vector in values[11]]
        values[12] = values[12][:-1]
        return with_column(table, "deepstack_0", [[np.array(v, np.float16) for v in row] for row in values])

    found = compare(altered(first, tmp_path / "drifted.parquet", drift), second)
    assert found.beyond == Rows(count=2, ids=[key_of(12), key_of(13)])
    assert (found.worst, found.worst_id) == (float("inf"), key_of(13))


def test_a_vector_that_has_drifted_is_named_with_its_deviation(stored: Path, tmp_path: Path) -> None:
    output = altered(stored, tmp_path / "out.parquet", drifted(9))
    found = compare(output, stored)
    assert summary(found) == {"beyond": 1}
    table = pq.read_table(stored)
    vector = np.array(table["embedding"][9].as_py())
    assert found.worst == pytest.approx(0.01 * len(vector) ** 0.5 / np.linalg.norm(vector), rel=1e-3)
    assert found.worst_id == found.beyond.ids[0] == table["id"][9].as_py()
    assert compare(output, stored, tolerance=1.0).is_good
    assert compare(output, stored, tolerance=1.0).worst == found.worst
    assert not compare(output, stored, tolerance=found.worst * 0.99).is_good


def test_values_that_are_not_finite_are_beyond_any_tolerance(stored: Path, tmp_path: Path) -> None:
    for value in (float("nan"), float("inf")):
        output = altered(stored, tmp_path / "out.parquet", drifted(3, value))
        for found in (compare(output, stored), compare(stored, output, tolerance=1e9)):
            assert (found.beyond.count, found.worst) == (1, float("inf"))
            assert found.worst_id == pq.read_table(stored)["id"][3].as_py()


def test_every_kind_of_difference_is_counted_with_its_ids(stored: Path, tmp_path: Path) -> None:
    def found(name: str, row: int, value: Any) -> Comparison:  # noqa: ANN401
        return compare(altered(stored, tmp_path / "out.parquet", with_value(name, row, value)), stored)

    here = found("content_hash", 4, bytes(32))
    assert summary(here) == {"contents": 1}
    assert here.contents.ids == [key_of(4)]
    assert summary(found("width", 4, 9999)) == summary(found("grid_h", 4, 9999)) == {"sizes": 1}
    assert summary(found("duplicate_of", 4, key_of(1))) == {"duplicates": 1}
    assert summary(found("duplicate_of", 19, None)) == {"duplicates": 1}
    assert summary(found("label", 4, -1)) == {"label": 1}
    assert summary(found("word", 4, "another")) == {"word": 1}
    assert summary(found("nested", 4, {"label": 4, "names": ["x", None]})) == {"nested": 1}


def test_a_changed_picture_is_not_counted_as_drift(stored: Path, tmp_path: Path) -> None:
    def change(table: pa.Table) -> pa.Table:
        return drifted(4)(with_value("width", 4, 1)(with_value("content_hash", 4, bytes(32))(table)))

    found = compare(altered(stored, tmp_path / "out.parquet", change), stored)
    assert summary(found) == {"contents": 1}
    assert found.worst == 0


def test_hashes_of_bytes_and_of_pixels_are_not_compared(stored: Path, tmp_path: Path) -> None:
    fingerprint = json.loads(pq.read_schema(stored).metadata[PROVENANCE_KEY])["fingerprint"]
    facts = {"fingerprint": fingerprint | {"dedup": "pixels"}}
    output = altered(stored, tmp_path / "out.parquet", with_value("content_hash", 4, bytes(32)), facts=facts)
    found = compare(output, stored)
    assert found.is_good
    assert found.differences == ['dedup: "bytes" there, "pixels" now']


def test_rows_that_one_lacks_are_told_from_rows_that_failed_in_it(tmp_path: Path) -> None:
    first = made(tmp_path / "first.parquet", num_rows=40, failed=(3, 5, 39))
    second = made(tmp_path / "second.parquet", num_rows=39, failed=(5, 8))
    found = compare(first, second)
    assert found.only_here == Rows(count=1, ids=[key_of(39)])  # at which the first has failed
    assert found.only_there == Rows()
    assert found.failed_here == Rows(count=1, ids=[key_of(3)])
    assert found.failed_there == Rows(count=1, ids=[key_of(8)])
    assert (found.num_compared, found.num_failed) == (36, 1)
    found = compare(second, first)
    assert (found.only_here, found.only_there) == (Rows(), Rows(count=1, ids=[key_of(39)]))
    assert (found.failed_here.ids, found.failed_there.ids) == ([key_of(8)], [key_of(3)])
    assert not found.is_good


def test_another_code_and_a_missing_errors_file_are_said(stored: Path, tmp_path: Path) -> None:
    output = altered(stored, tmp_path / "out.parquet", lambda table: table)
    errors = output.with_suffix(".errors.parquet")
    table = pq.read_table(errors)
    pq.write_table(with_value("code", 1, "truncated")(table), errors)
    found = compare(output, stored)
    assert found.codes == Rows(count=1, ids=[key_of(30)])
    assert summary(found) == {"codes": 1}
    pq.write_table(table.slice(1), errors)
    found = compare(output, stored)
    assert found.only_there == Rows(count=1, ids=[key_of(7)])
    assert found.problems == [f"{errors} holds 1 rows, and its run wrote 2"]
    errors.unlink()
    found = compare(output, stored)
    assert found.only_there.count == 2
    expected = (
        f"{errors} is not there, so the 2 rows that failed in {output} cannot be compared: put it beside it again"
    )
    assert found.problems == [expected]


def test_other_vectors_and_columns_are_findings(stored: Path, tmp_path: Path) -> None:
    tokens = made(tmp_path / "tokens.parquet", TOKENS)
    found = compare(tokens, stored)
    assert found.problems == [
        f"column 'tokens' is only in {tokens}",
        f"column 'deepstack_0' is only in {tokens}",
        f"column 'embedding' is only in {stored}",
    ]
    wide = made(tmp_path / "wide.parquet", (VectorColumn(name="embedding", width=POOLED[0].width + 1),))
    found = compare(wide, stored)
    width = POOLED[0].width
    assert found.problems == [
        f"vectors of column 'embedding' have {width + 1} values in {wide} and {width} in {stored}"
    ]
    assert found.num_compared == 58
    bare = altered(stored, tmp_path / "bare.parquet", lambda table: table.drop_columns(["label", "content_hash"]))
    found = compare(bare, stored)
    assert found.problems == [
        f"column 'content_hash' is only in {stored}",
        f"column 'label' is only in {stored}",
    ]
    assert summary(found) == {}


def test_half_floats_are_compared_with_floats(stored: Path, tmp_path: Path) -> None:
    half = made(tmp_path / "half.parquet", (VectorColumn(name="embedding", width=POOLED[0].width, dtype="float16"),))
    found = compare(half, stored)
    assert 0 < found.worst < 1e-3
    assert found.is_good


def test_kept_columns_of_other_types_are_compared_by_their_values(stored: Path, tmp_path: Path) -> None:
    def plain(table: pa.Table) -> pa.Table:
        place = table.schema.get_field_index("word")
        return table.set_column(place, "word", table["word"].cast(pa.large_string()))

    assert compare(altered(stored, tmp_path / "out.parquet", plain), stored).is_good


def test_kept_columns_may_have_dots_in_their_names(stored: Path, tmp_path: Path) -> None:
    def renamed(table: pa.Table) -> pa.Table:
        return table.rename_columns({"label": "nested.label", "word": "json.word"})

    first = altered(stored, tmp_path / "first.parquet", renamed)
    assert compare(first, first).is_good
    second = altered(first, tmp_path / "second.parquet", with_value("nested.label", 4, -1))
    assert summary(compare(second, first)) == {"nested.label": 1}


def test_the_looser_tolerance_counts(stored: Path, tmp_path: Path) -> None:
    fingerprint = json.loads(pq.read_schema(stored).metadata[PROVENANCE_KEY])["fingerprint"]
    facts = {"fingerprint": fingerprint | {"dtype": "bf16"}, "versions": {"torch": "1"}}
    output = altered(stored, tmp_path / "out.parquet", lambda table: table, facts=facts)
    for found in (compare(output, stored), compare(stored, output)):
        assert found.tolerance == 0.05
        assert any(line.startswith("dtype: ") for line in found.differences)
    assert compare(stored, stored).tolerance == 0.002
    assert "torch: None there, 1 now" in compare(output, stored).differences


# Any order.


@pytest.mark.parametrize("window", [2, 512])
@pytest.mark.parametrize("name", ["reversed", "shuffled", "moved", "rotated"])
def test_rows_in_another_order_are_found(
    name: str, window: int, stored: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alignment, "WINDOW_ROWS", window)
    monkeypatch.setattr("vlmembed.checking.comparison.BATCH_ROWS", window)
    orders = {
        "reversed": list(range(58))[::-1],
        "shuffled": np.random.default_rng(0).permutation(58).tolist(),
        "moved": [*range(1, 58), 0],
        "rotated": [*range(30, 58), *range(30)],
    }
    output = altered(stored, tmp_path / "out.parquet", in_order(orders[name]))
    assert compare(output, stored).is_good
    found = compare(altered(output, tmp_path / "drifted.parquet", drifted(7)), stored)
    assert summary(found) == {"beyond": 1}
    assert found.worst_id == pq.read_table(output)["id"][7].as_py()
    assert found.num_compared == 58


@pytest.mark.parametrize("window", [2, 512])
def test_rows_that_are_missing_in_places_do_not_hide_others(
    window: int, stored: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alignment, "WINDOW_ROWS", window)
    monkeypatch.setattr("vlmembed.checking.comparison.BATCH_ROWS", window)
    there = [row for row in range(58) if row not in (0, 5, 6, *range(20, 32), 57)]
    output = altered(stored, tmp_path / "out.parquet", in_order(there))
    ids = pq.read_table(stored)["id"].to_pylist()
    missing = [ids[row] for row in (0, 5, 6, *range(20, 32), 57)]
    found = compare(output, stored)
    assert (found.only_there.count, found.num_compared) == (16, 42)
    assert found.only_there.ids == missing[:10]
    assert summary(found) == {"only_there": 16}
    assert summary(compare(stored, output)) == {"only_here": 16}
    assert not found.problems


def test_an_id_that_comes_twice_needs_two(stored: Path, tmp_path: Path) -> None:
    twice = altered(stored, tmp_path / "twice.parquet", in_order([0, *range(58)]))
    assert summary(compare(twice, stored)) == {"only_here": 1}
    assert compare(twice, stored).only_here.ids == [key_of(0)]
    assert compare(twice, twice).is_good


def batches(ids: Sequence[int], num_bytes: int = 0, batch_rows: int = 100) -> Iterator[pa.RecordBatch]:
    for start in range(0, len(ids), batch_rows):
        some = ids[start : start + batch_rows]
        content = [number.to_bytes(8, "big").ljust(max(8, num_bytes), b"x") for number in some]
        yield pa.record_batch({"id": [str(each) for each in some], "content": content})


def test_a_block_of_new_rows_does_not_put_all_that_follow_out_of_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alignment, "WINDOW_ROWS", 100)
    first = list(range(8_000))
    second = [*range(500), *range(50_000, 51_000), *range(500, 8_000)]
    with Alignment(tmp_path / "rows.sqlite") as rows:
        num_found = 0
        for one, other in rows.pairs("row", batches(first), batches(second)):
            assert one.equals(other)
            num_found += one.num_rows
        assert num_found == 8_000
        assert rows.alone("row", 0, other_kind="x", has_other=False, limit=3) == (0, [])
        assert rows.alone("row", 1, other_kind="x", has_other=False, limit=3) == (1000, ["50000", "50001", "50002"])
        assert rows._database.total_changes < 4000  # rows that had to wait: the new ones, and as many that went by


def test_whatever_the_two_orders_are_every_partner_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against counting, with ids that come twice, and windows smaller and larger than what is out of step."""
    random = np.random.default_rng(0)
    for _ in range(60):
        monkeypatch.setattr(alignment, "WINDOW_ROWS", int(random.integers(1, 12)))
        size = int(random.integers(1, 60))
        sides = [random.integers(0, 40, random.integers(0, 60)).tolist() for _ in range(2)]
        if random.integers(2):
            sides = [sorted(some) for some in sides]
        with Alignment(tmp_path / "rows.sqlite") as rows:
            found = Counter[str]()
            for one, other in rows.pairs("row", *(batches(some, batch_rows=size) for some in sides)):
                assert one.equals(other)
                found.update(one["id"].to_pylist())
            counts = [Counter(map(str, some)) for some in sides]
            assert found == counts[0] & counts[1]
            for side in (0, 1):
                number, ids = rows.alone("row", side, other_kind="x", has_other=False, limit=100)
                assert Counter(ids) == counts[side] - counts[1 - side]
                assert number == len(ids)


def test_what_is_out_of_step_is_not_held_in_memory(tmp_path: Path) -> None:
    num_rows, num_bytes = 800, 200_000
    order = list(range(num_rows))
    with Alignment(tmp_path / "rows.sqlite") as rows:
        before = pa.total_allocated_bytes()
        peak = num_found = 0
        for one, other in rows.pairs("row", batches(order, num_bytes), batches(order[::-1], num_bytes)):
            assert one["content"].equals(other["content"])
            num_found += one.num_rows
            peak = max(peak, pa.total_allocated_bytes() - before)
    assert num_found == num_rows
    assert peak < 110e6  # of twice 160 MB: two windows of 16 MiB and a batch of 20 MB each, and the pairs of one


# The command line.


def verify(*words: object) -> Result:
    return CliRunner().invoke(cli, ["verify", *map(str, words)])


def test_the_command_line_tells_what_differs(stored: Path, tmp_path: Path) -> None:
    good = verify(stored, "--against", stored)
    assert good.exit_code == 0
    assert good.output == (
        f"{stored} against {stored}: the same\n"
        "  58 rows have vectors in both, 2 failed in both\n"
        "  largest deviation 0, within the tolerance of 0.002\n"
    )

    def change(table: pa.Table) -> pa.Table:
        return drifted(9)(with_value("label", 4, -1)(table)).slice(0, 40)

    output = altered(stored, tmp_path / "out.parquet", change)
    bad = verify(output, "--against", stored)
    assert bad.exit_code == 3
    lines = bad.output.splitlines()
    assert lines[0] == f"{output} against {stored}: NOT the same"
    assert f"  18 rows are only in {stored}" in lines
    assert "    and 8 more" in lines
    assert "  1 rows have another 'label'" in lines
    assert "  1 rows deviate more than the tolerance" in lines
    assert ", BEYOND the tolerance of 0.002" in bad.output
    assert verify(output, "--against", output, "--tolerance", "0").exit_code == 0


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["images"], "INPUT"),
        (["--rows", "100"], "--rows"),
        (["--all"], "--all"),
        (["--seed", "0"], "--seed"),
        (["--device", "cpu", "--all"], "--all, --device"),
    ],
)
def test_what_is_of_no_use_with_against_is_refused(words: list[str], named: str, stored: Path) -> None:
    error = verify(stored, *words, "--against", stored).exception
    assert isinstance(error, UsageError)
    assert str(error) == f"--against compares all rows of two outputs and reads no pictures: leave {named} out"


def test_what_cannot_be_compared(stored: Path, tmp_path: Path) -> None:
    for tolerance in (-1.0, float("nan")):
        with pytest.raises(ConfigError, match="it must be 0 or more"):
            compare(stored, stored, tolerance=tolerance)
    with pytest.raises(InputError, match=r"gone.parquet cannot be read as Parquet: it does not exist"):
        compare(stored, tmp_path / "gone.parquet")
    table = pq.read_table(stored)
    facts = json.loads(table.schema.metadata[PROVENANCE_KEY])
    del facts["counts"]
    pq.write_table(table.replace_schema_metadata({PROVENANCE_KEY: json.dumps(facts)}), tmp_path / "part-000000.parquet")
    with pytest.raises(InputError, match="is a part of an output, not a whole one: name the folder that it lies in"):
        compare(tmp_path / "part-000000.parquet", stored)
    nameless = altered(stored, tmp_path / "nameless.parquet", lambda table: table.drop_columns(["id"]))
    with pytest.raises(InputError, match="has no column of ids any more"):
        compare(nameless, stored)
    content = bytearray(stored.read_bytes())
    start = pq.read_metadata(stored).row_group(0).column(1).data_page_offset
    content[start + 60 : start + 90] = bytes(30)
    (tmp_path / "damaged.parquet").write_bytes(content)
    with pytest.raises(InputError, match=r"damaged.parquet is damaged, or gone"):
        compare(tmp_path / "damaged.parquet", stored)
