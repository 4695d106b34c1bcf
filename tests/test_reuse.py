"""Earlier outputs give back what they hold, whatever has become of their files since, and only to the same encoder."""

from __future__ import annotations

import json
import logging
import random
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from test_cache import HALVES, POOLED, TOKENS, embedded, hash_of, same

from vlmembed import reuse
from vlmembed.errors import InputError, StorageError
from vlmembed.output import SUCCESS
from vlmembed.provenance import encoder_fingerprint
from vlmembed.reuse import EarlierOutputs
from vlmembed.schema import ERRORS_SCHEMA, output_schema, with_provenance

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from vlmembed.schema import VectorColumn


def fingerprint_of(columns: tuple[VectorColumn, ...] = POOLED, **changes: object) -> dict[str, Any]:
    return {
        "weights_sha256": "ab",
        "pixel_policy": "1",
        "normalize": True,
        "vectors": [asdict(column) for column in columns],
        "dedup": "bytes",
        "source_sha256": "cd",
        "num_rows": 10,
        **changes,
    }


def write_output(
    path: Path,
    numbers: Sequence[int],
    columns: tuple[VectorColumn, ...] = POOLED,
    *,
    fingerprint: dict[str, Any] | None = None,
    duplicates: Sequence[int] = (),
    prefix: str = "",
    **options: Any,  # noqa: ANN401  pyarrow's
) -> Path:
    """An output with rows of these contents; the rows at `duplicates` are marked so."""
    images = [embedded(number, columns) for number in numbers]
    schema = output_schema(columns, pa.schema([pa.field("caption", pa.string())]))
    columns_of_it = {
        "id": [f"{prefix}{number}.jpg" for number in numbers],
        **{column.name: column.to_arrow([image.vectors[column.name] for image in images]) for column in columns},
        "content_hash": [hash_of(number) for number in numbers],
        "duplicate_of": ["first" if position in duplicates else None for position in range(len(numbers))],
        "width": [image.size_hw[1] for image in images],
        "height": [image.size_hw[0] for image in images],
        "grid_h": [image.grid_hw[0] for image in images],
        "grid_w": [image.grid_hw[1] for image in images],
        "caption": ["kept"] * len(numbers),
    }
    facts = {"fingerprint": fingerprint if fingerprint is not None else fingerprint_of(columns)}
    path.parent.mkdir(exist_ok=True)
    table = pa.table(columns_of_it, schema=with_provenance(schema, facts))
    pq.write_table(table, path, **({"compression": "zstd", "row_group_size": 10} | options))
    return path


def open_earlier(
    paths: Sequence[Path], columns: tuple[VectorColumn, ...] = POOLED, **changes: object
) -> EarlierOutputs:
    index = paths[0].with_name("index.sqlite")
    fingerprint = encoder_fingerprint(fingerprint_of(columns, **changes))
    return EarlierOutputs(paths, fingerprint=fingerprint, vectors=columns, index=index)


def found_in(earlier: EarlierOutputs, numbers: Sequence[int], columns: tuple[VectorColumn, ...] = POOLED) -> set[int]:
    """Which of the numbers are there; each that is must be right, bit for bit."""
    found = set()
    for number in numbers:
        if (image := earlier.find(hash_of(number), 10_000 + number)) is None:
            continue
        assert same(image, number, columns), number
        assert image.row == 10_000 + number
        found.add(number)
    return found


@pytest.mark.parametrize("columns", [POOLED, HALVES, TOKENS], ids=["float32", "float16", "two token columns"])
def test_embeddings_come_back_bit_for_bit(tmp_path: Path, columns: tuple[VectorColumn, ...]) -> None:
    path = write_output(tmp_path / "out.parquet", range(35), columns)
    with open_earlier([path], columns) as earlier:
        assert (tmp_path / "index.sqlite").exists()
        assert found_in(earlier, range(40), columns) == set(range(35))
        assert earlier.num_found == 35
        image = earlier.find(hash_of(20), 0)
        assert image is not None
        for values in image.vectors.values():  # none keeps its row group alive
            assert isinstance(values, np.ndarray)
            assert values.flags.owndata
            assert values.flags.writeable
    assert not (tmp_path / "index.sqlite").exists()


def test_duplicates_are_not_taken(tmp_path: Path) -> None:
    path = write_output(tmp_path / "out.parquet", [0, 1, 2, 1, 3, 9], duplicates=[3, 5])
    with open_earlier([path]) as earlier:
        assert found_in(earlier, range(10)) == {0, 1, 2, 3}
        assert earlier.find_key(hash_of(3)) == "3.jpg"
        assert earlier.find_key(hash_of(9)) is None


def test_of_several_outputs_the_first_one_counts(tmp_path: Path) -> None:
    paths = [
        write_output(tmp_path / "a.parquet", range(5), prefix="a/"),
        write_output(tmp_path / "b.parquet", range(3, 30), prefix="b/"),
        write_output(tmp_path / "c.parquet", range(25, 40), prefix="c/"),
    ]
    with open_earlier(paths) as earlier:
        assert found_in(earlier, range(45)) == set(range(40))
        keys = [earlier.find_key(hash_of(number)) for number in (2, 3, 5, 29, 30, 50)]
        assert keys == ["a/2.jpg", "a/3.jpg", "b/5.jpg", "b/29.jpg", "c/30.jpg", None]


def write_folder(folder: Path, fingerprint: dict[str, Any]) -> None:
    write_output(folder / "part-000000.parquet", range(15))
    write_output(folder / "part-000001.parquet", range(10, 25))
    (folder / "_errors.parquet").write_bytes(b"not looked at")
    (folder / SUCCESS).write_text(json.dumps({"fingerprint": fingerprint}))


def test_a_folder_of_parts_is_one_output(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    write_folder(folder, fingerprint_of())
    with open_earlier([folder]) as earlier:
        assert found_in(earlier, range(30)) == set(range(25))
    (folder / "part-000001.parquet").write_bytes(b"PAR1 and nothing else")
    with pytest.raises(InputError, match=r"part-000001.parquet cannot be read as Parquet \(.*\): leave it out"):
        open_earlier([folder])
    assert not (tmp_path / "index.sqlite").exists()
    (folder / SUCCESS).unlink()
    with pytest.raises(InputError, match="not finished"):
        open_earlier([folder])


def test_another_encoder_is_refused_and_what_differs_is_shown(tmp_path: Path) -> None:
    same = write_output(tmp_path / "same.parquet", range(3))
    path = write_output(
        tmp_path / "out.parquet", range(3), fingerprint=fingerprint_of(normalize=False, weights_sha256="ef")
    )
    with pytest.raises(InputError) as caught:
        open_earlier([same, path])
    assert str(caught.value) == (
        f"{path} holds embeddings of another encoder:\n"
        "  normalize: false there, true now\n"
        '  weights_sha256: "ef" there, "ab" now\n'
        "leave it out of --reuse"
    )
    write_folder(tmp_path / "out", fingerprint_of(pixel_policy="2"))
    with pytest.raises(InputError, match='pixel_policy: "2" there, "1" now'):
        open_earlier([tmp_path / "out"])


def test_a_run_over_other_rows_is_the_same_encoder(tmp_path: Path) -> None:
    other = fingerprint_of(dedup="none", source_sha256="other", num_rows=3, keep_columns=["caption"], id_column="id")
    path = write_output(tmp_path / "out.parquet", range(3), fingerprint=other)
    with open_earlier([path]) as earlier:
        assert found_in(earlier, range(4)) == {0, 1, 2}


def test_what_is_no_output_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none.parquet cannot be read as Parquet: "):
        open_earlier([tmp_path / "none.parquet"])
    (tmp_path / "text.parquet").write_text("not Parquet")
    with pytest.raises(InputError, match=r"text.parquet cannot be read as Parquet: "):
        open_earlier([tmp_path / "text.parquet"])
    pq.write_table(pa.table({"embedding": [1.0]}), tmp_path / "foreign.parquet")
    with pytest.raises(InputError, match=r"foreign\.parquet holds no vlmembed provenance"):
        open_earlier([tmp_path / "foreign.parquet"])
    errors = with_provenance(ERRORS_SCHEMA, {"fingerprint": fingerprint_of()})
    pq.write_table(errors.empty_table(), tmp_path / "out.errors.parquet")
    with pytest.raises(InputError, match="holds rows that failed, not embeddings"):
        open_earlier([tmp_path / "out.errors.parquet"])
    whole = write_output(tmp_path / "whole.parquet", range(100)).read_bytes()
    (tmp_path / "cut.parquet").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InputError, match=r"cut.parquet cannot be read as Parquet: "):
        open_earlier([tmp_path / "cut.parquet"])


def test_a_file_whose_columns_were_changed_is_refused(tmp_path: Path) -> None:
    path = write_output(tmp_path / "out.parquet", range(3))
    table = pq.read_table(path)
    place = table.schema.get_field_index("embedding")
    lists = table["embedding"].cast(pa.list_(pa.float32()))
    pq.write_table(table.set_column(place, "embedding", lists), path)
    with pytest.raises(InputError, match=r"its column embedding is list<.*>, not fixed_size_list<"):
        open_earlier([path])
    pq.write_table(table.drop_columns(["grid_w"]), path)
    with pytest.raises(InputError, match="its column grid_w is none, not int32; leave it out of --reuse"):
        open_earlier([path])


def test_an_index_that_cannot_be_written_is_the_runs_trouble(tmp_path: Path) -> None:
    path = write_output(tmp_path / "out.parquet", range(3))
    index = tmp_path / "none" / "index.sqlite"
    with pytest.raises(StorageError, match=r"index\.sqlite"):
        EarlierOutputs([path], fingerprint=encoder_fingerprint(fingerprint_of()), vectors=POOLED, index=index)


def count_reads(earlier: EarlierOutputs, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    reads: list[tuple[int, int]] = []
    read_group = earlier._read_group

    def counted(number: int, group: int) -> pa.Table:
        reads.append((number, group))
        return read_group(number, group)

    monkeypatch.setattr(earlier, "_read_group", counted)
    return reads


def test_each_row_group_is_read_once_in_a_run_of_the_same_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [write_output(tmp_path / f"{name}.parquet", range(name * 50, name * 50 + 50)) for name in range(2)]
    with open_earlier(paths) as earlier:
        group_bytes = earlier._read_group(0, 0).nbytes
        monkeypatch.setattr(reuse, "FOUND_BYTES", 2 * group_bytes + 100)
        reads = count_reads(earlier, monkeypatch)
        assert len(found_in(earlier, range(100))) == 100
        assert reads == [(number, group) for number in range(2) for group in range(5)]
        assert len(earlier._groups) == 2  # the rest has made room
        found_in(earlier, [85, 95, 85, 95, 0, 95, 85])
        assert reads[10:] == [(0, 0), (1, 3)]  # the group not used for longest goes


def test_a_row_group_larger_than_the_bound_is_read_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reuse, "FOUND_BYTES", 1)
    with open_earlier([write_output(tmp_path / "out.parquet", range(30))]) as earlier:
        reads = count_reads(earlier, monkeypatch)
        assert len(found_in(earlier, range(30))) == 30
        assert reads == [(0, 0), (0, 1), (0, 2)]


def data_pages(path: Path, columns: Sequence[str]) -> list[range]:
    """The bytes of the pages of these columns, their headers included."""
    metadata = pq.read_metadata(path)
    found = []
    for group in range(metadata.num_row_groups):
        for place in range(metadata.num_columns):
            column = metadata.row_group(group).column(place)
            if column.path_in_schema.split(".")[0] in columns:
                first = column.dictionary_page_offset or column.data_page_offset
                found.append(range(first, first + column.total_compressed_size))
    return found


def test_a_damaged_row_group_is_computed_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_output(tmp_path / "out.parquet", range(40), write_page_checksum=True)
    pages = data_pages(path, ["embedding"])
    content = bytearray(path.read_bytes())
    for group in (1, 3):
        content[pages[group][-20]] ^= 1
    path.write_bytes(content)
    with open_earlier([path]) as earlier, caplog.at_level(logging.WARNING):
        assert found_in(earlier, range(40)) == {*range(10), *range(20, 30)}
        assert found_in(earlier, range(40)) == {*range(10), *range(20, 30)}
        assert earlier.find_key(hash_of(15)) is None
    (message,) = caplog.messages  # once for the file
    assert f"{path} is damaged (" in message
    assert "CRC checksum verification failed" in message


def test_damaged_hashes_cost_their_row_group(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_output(tmp_path / "out.parquet", range(30), write_page_checksum=True)
    content = bytearray(path.read_bytes())
    content[data_pages(path, ["content_hash"])[1][-20]] ^= 1
    path.write_bytes(content)
    with caplog.at_level(logging.WARNING), open_earlier([path]) as earlier:
        assert found_in(earlier, range(30)) == {*range(10), *range(20, 30)}
    assert len(caplog.messages) == 1


@pytest.mark.parametrize("compression", ["zstd", "none"])
def test_flipped_bits_never_give_a_wrong_vector_or_an_exception(tmp_path: Path, compression: str) -> None:
    path = write_output(tmp_path / "out.parquet", range(40), compression=compression, write_page_checksum=True)
    whole = path.read_bytes()
    generator = random.Random(0)  # noqa: S311  not for secrets
    pages = data_pages(path, ["id", "content_hash", "embedding", "width", "height", "grid_h", "grid_w"])
    num_found = 0
    for _ in range(50):
        content = bytearray(whole)
        content[generator.choice(generator.choice(pages))] ^= 1 << generator.randrange(8)
        path.write_bytes(content)
        with open_earlier([path]) as earlier:
            num_found += len(found_in(earlier, range(40)))
    assert num_found > 50 * 20


def test_an_output_that_vanished_or_was_replaced_is_computed_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = write_output(tmp_path / "a.parquet", range(20))
    second = write_output(tmp_path / "b.parquet", range(20, 40))
    with open_earlier([first, second]) as earlier, caplog.at_level(logging.WARNING):
        assert found_in(earlier, range(5)) == set(range(5))
        first.unlink()
        write_output(second, range(50, 90))
        assert found_in(earlier, range(40)) == set(range(10))  # a row group that was read before
    assert len(caplog.messages) == 2


def test_values_that_no_output_has_are_computed_again(tmp_path: Path) -> None:
    path = write_output(tmp_path / "out.parquet", range(4))
    table = pq.read_table(path)
    vectors = [embedded(number).vectors["embedding"] for number in range(4)]
    vectors[2] = np.full_like(vectors[2], np.nan)
    place = table.schema.get_field_index("embedding")
    pq.write_table(table.set_column(place, table.schema.field(place), POOLED[0].to_arrow(vectors)), path)
    with open_earlier([path]) as earlier:
        assert found_in(earlier, range(4)) == {0, 1, 3}
