"""Columns within structs, by dotted names: images, ids and what is kept."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import SAMPLES

from vlmembed.errors import FailureCode, ImageError, InputError
from vlmembed.sources.columns import column_at, find_field, find_image_column
from vlmembed.sources.parquet import ParquetSource
from vlmembed.sources.readahead import ReadAhead

if TYPE_CHECKING:
    from pathlib import Path

    from vlmembed.types import EncodedImage

PNG = (SAMPLES / "drawings/one-pixel.png").read_bytes()
IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
META = pa.struct([("caption", pa.string()), ("deep", pa.struct([("uid", pa.int64()), ("picture", IMAGE)]))])


def source_of(*paths: Path, **settings: Any) -> ParquetSource:  # noqa: ANN401  of the source
    columns = {"image_column": None, "id_column": None, "keep_columns": (), **settings}
    reader = ReadAhead(timeout_seconds=10, max_source_pixels=10**6)
    return ParquetSource([(str(path), path.name) for path in paths], reader=reader, **columns)


def rows_of(source: ParquetSource, start: int = 0) -> list[EncodedImage]:
    rows = list(source.read(start))
    assert [image.row for image in rows] == list(range(start, source.num_rows))
    return rows


def kept(rows: list[EncodedImage]) -> list[dict[str, Any]]:
    """What the kept columns hold."""
    return [row for image in rows if image.columns is not None for row in image.columns.to_pylist()]


def picture(row: int) -> bytes:
    return PNG + row.to_bytes(2, "big")


def nested(row: int) -> dict[str, Any]:
    return {"caption": f"c{row}", "deep": {"uid": row * 10, "picture": {"bytes": picture(row), "path": None}}}


def write(path: Path, values: list[dict[str, Any] | None], **options: Any) -> Path:  # noqa: ANN401  of pyarrow
    columns = {"n": range(len(values)), "meta": pa.array(values, META)}
    pq.write_table(pa.table(columns), path, **options)
    return path


def test_fields_of_structs_at_any_depth_are_columns(tmp_path: Path) -> None:
    path = write(tmp_path / "t.parquet", [nested(row) for row in range(50)], row_group_size=7)
    settings = {"image_column": "meta.deep.picture", "id_column": "meta.deep.uid", "keep_columns": ("meta.caption",)}
    source = source_of(path, **settings)
    rows = rows_of(source)
    assert [image.key for image in rows] == [str(row * 10) for row in range(50)]
    assert [image.content for image in rows] == [picture(row) for row in range(50)]
    assert source.kept_schema == pa.schema([("meta.caption", pa.string())])
    assert kept(rows) == [{"meta.caption": f"c{row}"} for row in range(50)]
    assert rows_of(source, 33)[0].content == picture(33)
    assert [image.key for image in source.read_rows([0, 6, 49])] == ["0", "60", "490"]


def test_the_bytes_of_a_struct_and_whole_structs_can_be_named(tmp_path: Path) -> None:
    path = write(tmp_path / "t.parquet", [nested(row) for row in range(3)])
    keep = ("meta.deep", "meta.deep.uid", "n")
    rows = rows_of(source_of(path, image_column="meta.deep.picture.bytes", keep_columns=keep))
    assert [image.content for image in rows] == [picture(row) for row in range(3)]
    assert kept(rows) == [{"meta.deep": nested(row)["deep"], "meta.deep.uid": row * 10, "n": row} for row in range(3)]


def test_what_lies_beside_a_field_is_not_read(tmp_path: Path) -> None:
    kind = pa.struct([("image", IMAGE), ("other", pa.binary())])
    values = [{"image": {"bytes": picture(row), "path": None}, "other": b"beside it %d" % row} for row in range(9)]
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"data": pa.array(values, kind)}), path, compression="none", use_dictionary=False)
    content = path.read_bytes()
    place = pq.read_metadata(path).row_group(0).column(2)
    assert place.path_in_schema == "data.other"
    begin, end = place.data_page_offset, place.data_page_offset + place.total_compressed_size
    path.write_bytes(content[:begin] + bytes(end - begin) + content[end:])
    rows = rows_of(source_of(path, image_column="data.image"))
    assert [image.content for image in rows] == [picture(row) for row in range(9)]
    rows = rows_of(source_of(path, image_column="data.image", keep_columns=("data.other",)))
    assert {image.content.code for image in rows if isinstance(image.content, ImageError)} == {"unreadable"}


def test_a_null_around_a_field_makes_it_null(tmp_path: Path) -> None:
    holes: list[Any] = [nested(row) for row in range(3000)]  # more than one batch
    for row in range(0, 3000, 3):
        holes[row] = None
    for row in range(1, 3000, 3):
        holes[row]["deep"] = None
    path = write(tmp_path / "t.parquet", holes, row_group_size=2000)
    source = source_of(path, image_column="meta.deep.picture", keep_columns=("meta.caption", "meta.deep.uid"))
    rows = rows_of(source, 1)
    for image in rows:
        if image.row % 3 == 2:
            assert image.content == picture(image.row)
        else:
            assert isinstance(image.content, ImageError)
            assert image.content.code is FailureCode.NULL
    assert kept(rows) == [
        {
            "meta.caption": None if row % 3 == 0 else f"c{row}",
            "meta.deep.uid": row * 10 if row % 3 == 2 else None,
        }
        for row in range(1, 3000)
    ]


def test_slices_of_structs_give_the_fields_of_their_own_rows() -> None:
    inner = pa.StructArray.from_arrays([pa.array(range(10))], ["x"], mask=pa.array([row == 4 for row in range(10)]))
    outer = pa.StructArray.from_arrays([inner], ["s"], mask=pa.array([row == 6 for row in range(10)]))
    batch = pa.record_batch({"a": outer})
    expected = [None if row in (4, 6) else row for row in range(10)]
    for begin in range(10):
        for length in range(1, 10 - begin):
            found = column_at(batch.slice(begin, length), ("a", "s", "x"))
            assert found.to_pylist() == expected[begin : begin + length]
    inside = pa.record_batch({"a": outer.slice(3, 5)})
    assert column_at(inside.slice(1), ("a", "s", "x")).to_pylist() == expected[4:8]


def test_a_column_whose_own_name_has_a_dot_comes_first(tmp_path: Path) -> None:
    data = pa.array([{"image": b"field", "n.m": 1}], pa.struct([("image", pa.binary()), ("n.m", pa.int64())]))
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"data": data, "data.image": [b"column"]}), path)
    rows = rows_of(source_of(path, image_column="data.image", keep_columns=("data.n.m",)))
    assert rows[0].content == b"column"
    assert kept(rows) == [{"data.n.m": 1}]
    schema = pa.schema([("a", pa.struct([("b.c", pa.int8()), ("b", pa.struct([("c", pa.int8())]))]))])
    with pytest.raises(InputError, match=r"t has more than one column 'a.b.c'; it has a"):
        find_field(schema, "a.b.c", "t")


def test_errors_name_what_there_is(tmp_path: Path) -> None:
    path = write(tmp_path / "t.parquet", [nested(0)])
    cases = {
        "meta.capton": r"t.parquet has no column 'meta.capton'; it has n, meta; 'meta' has meta.caption, meta.deep$",
        "n.x": r"t.parquet has no column 'n.x'; it has n, meta; 'n' has no fields$",
        "mata.caption": r"t.parquet has no column 'mata.caption'; it has n, meta$",
        "meta.deep.uid.x": r"no column 'meta.deep.uid.x'",
    }
    for name, message in cases.items():
        with pytest.raises(InputError, match=message):
            source_of(path, image_column="meta.deep.picture", keep_columns=(name,))
    with pytest.raises(InputError, match=r"among n, meta: name one with --image-column \(meta.deep.picture\)"):
        source_of(path)
    with pytest.raises(InputError, match=r"'meta' of t.parquet has type .*\(or name a field of it: meta.deep.picture"):
        source_of(path, image_column="meta")
    other = tmp_path / "u.parquet"
    inner = pa.array([{"deep": nested(0)["deep"]}], pa.struct([META.field("deep")]))
    pq.write_table(pa.table({"meta": inner}), other)
    with pytest.raises(InputError, match=r"column 'meta.caption' is no such column, and string in t.parquet"):
        source_of(path, other, image_column="meta.deep.picture", keep_columns=("meta.caption",))


def test_lists_of_images_are_refused_with_their_type(tmp_path: Path) -> None:
    values = [{"images": [{"bytes": PNG, "path": None}]}]
    kind = pa.struct([("images", pa.list_(IMAGE))])
    pq.write_table(pa.table({"data": pa.array(values, kind)}), tmp_path / "t.parquet")
    remedy = "write lists and other structs as one image a row"
    with pytest.raises(InputError, match=rf"column 'data.images' of t.parquet has type list<.*{remedy}"):
        source_of(tmp_path / "t.parquet", image_column="data.images")
    with pytest.raises(InputError, match=rf"no image column among data: .*'data' has type struct<images: .*{remedy}"):
        source_of(tmp_path / "t.parquet")


def test_fields_are_named_and_not_guessed() -> None:
    schema = pa.schema([("data", pa.struct([("image", IMAGE), ("thumb", pa.binary())])), ("n", pa.int8())])
    with pytest.raises(InputError, match=r"name one with --image-column \(data.image, data.thumb\)"):
        find_image_column(schema, "t")


def test_images_that_hold_no_bytes_are_read_by_their_path(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.png").write_bytes(PNG)
    absolute = str(tmp_path / "sub" / "a.png")
    paths = ["a.png", absolute, "http://nowhere.invalid/a.png", "gone.png", "ftp://x/y.png", None]
    values: list[dict[str, Any]] = [{"image": {"bytes": None, "path": path}} for path in paths]
    values += [{"image": {"bytes": b"here", "path": "a.png"}}]
    path = tmp_path / "sub" / "t.parquet"
    pq.write_table(pa.table({"data": pa.array(values, pa.struct([("image", IMAGE)]))}), path)
    contents = [image.content for image in rows_of(source_of(path, image_column="data.image"))]
    found = [content.code if isinstance(content, ImageError) else content for content in contents]
    assert found == [PNG, PNG, "unreadable", "missing", "unreadable", "null", b"here"]


def test_ids_within_structs_are_looked_through_first(tmp_path: Path) -> None:
    path = write(tmp_path / "t.parquet", [nested(1), nested(2), nested(1)])
    with pytest.raises(InputError, match=r"--id-column 'meta.deep.uid' repeats an id, in t.parquet; the first is '10'"):
        source_of(path, image_column="meta.deep.picture", id_column="meta.deep.uid")
    with pytest.raises(InputError, match=r"--id-column 'meta.deep' of t.parquet has type struct<uid"):
        source_of(path, image_column="meta.deep.picture", id_column="meta.deep")
    path = write(tmp_path / "u.parquet", [nested(1), None])
    with pytest.raises(InputError, match=r"--id-column 'meta.deep.uid' of u.parquet holds nulls"):
        source_of(path, image_column="meta.deep.picture", id_column="meta.deep.uid")


def test_kept_rows_do_not_hold_their_batch(tmp_path: Path) -> None:
    path = write(tmp_path / "t.parquet", [nested(row) for row in range(100)])
    rows = rows_of(source_of(path, image_column="meta.deep.picture", keep_columns=("meta.caption",)))
    assert all(image.columns.get_total_buffer_size() < 200 for image in rows if image.columns is not None)
