"""Every kind of input, with the same 50 pictures in it: the same embeddings, by id."""

from __future__ import annotations

import io
import json
import tarfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import noise
from servers import breaking_proxy, http_server, put_s3, s3_server, times, use_s3

import vlmembed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from vlmembed.types import Float32Array

NUM_PICTURES = 50
NAMES = [f"{number:03d}.{'png' if number % 2 else 'jpg'}" for number in range(NUM_PICTURES)]


@pytest.fixture(scope="module")
def contents() -> dict[str, bytes]:
    """The pictures' files by name."""
    files = {}
    for number, name in enumerate(NAMES):
        buffer = io.BytesIO()
        noise(30 + number % 7 * 5, 30 + number % 5 * 8, number).save(buffer, "PNG" if number % 2 else "JPEG")
        files[name] = buffer.getvalue()
    return files


@pytest.fixture(scope="module")
def folder(contents: dict[str, bytes], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pictures in a folder."""
    path = tmp_path_factory.mktemp("round") / "pictures"
    path.mkdir()
    for name, content in contents.items():
        (path / name).write_bytes(content)
    return path


def embed(model: Path, output: Path, *inputs: str, **settings: Any) -> dict[str, Float32Array]:  # noqa: ANN401
    """Embeddings by id; every row must have one."""
    config = vlmembed.EncodeConfig(inputs=inputs, output=output, model=model, **settings)
    report = vlmembed.encode(config)
    assert (report.num_rows, report.num_failed) == (NUM_PICTURES, 0)
    table = pq.read_table(output)
    vectors = table["embedding"].combine_chunks().flatten().to_numpy().reshape(NUM_PICTURES, -1)
    return dict(zip(table["id"].to_pylist(), vectors, strict=True))


@pytest.fixture(scope="module")
def expected(folder: Path, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Float32Array]:
    """The embeddings of the folder's pictures, by name."""
    return embed(tiny_model, tmp_path_factory.mktemp("expected") / "out.parquet", str(folder))


def write_tar(target: Path, contents: dict[str, bytes], mode: str = "w") -> Path:
    """A WebDataset shard: each picture with a caption behind it."""
    with tarfile.open(target, mode) as tar:  # type: ignore[call-overload]
        for name, content in contents.items():
            for member, data in ((name, content), (f"{name[:3]}.json", json.dumps({"caption": name}).encode())):
                info = tarfile.TarInfo(member)
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    return target


def write_zip(target: Path, contents: dict[str, bytes]) -> Path:
    """An archive of the pictures."""
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in contents.items():
            archive.writestr(name, content)
    return target


def write_parquet(target: Path, contents: dict[str, bytes]) -> Path:
    """The pictures' bytes in a struct, as Hugging Face has them."""
    images = [{"bytes": content, "path": name} for name, content in contents.items()]
    pq.write_table(pa.table({"image": images, "name": list(contents)}), target, row_group_size=20)
    return target


def hugging_face(target: Path, folder: Path, *, embedded: bool) -> Path:
    """A dataset on disk with the pictures, or with their paths alone."""
    import datasets  # noqa: PLC0415  takes seconds

    paths = [str(folder / name) for name in NAMES]
    dataset = datasets.Dataset.from_dict(
        {"image": [{"bytes": Path(path).read_bytes() if embedded else None, "path": path} for path in paths]},
        features=datasets.Features({"image": datasets.Image(decode=False)}),
    )
    dataset.save_to_disk(target)
    return target


def lance_dataset(target: Path, contents: dict[str, bytes]) -> Path:
    """A Lance dataset with the pictures' bytes."""
    import lance  # noqa: PLC0415  takes a moment

    lance.write_dataset(pa.table({"image": pa.array(contents.values(), pa.large_binary())}), target)
    return target


def written(target: Path, text: str) -> Path:
    """A text file."""
    target.write_text(text)
    return target


def listed(folder: Path) -> list[str]:
    return [str(folder / name) for name in NAMES]


def numbered(prefix: str) -> list[str]:
    return [f"{prefix}#{number}" for number in range(NUM_PICTURES)]


MAKERS: dict[str, Callable[[Path, Path, dict[str, bytes]], tuple[Path, list[str]]]] = {
    "parquet": lambda at, _, contents: (write_parquet(at / "p.parquet", contents), numbered("p.parquet")),
    "tar": lambda at, _, contents: (write_tar(at / "s.tar", contents), [f"s.tar!/{name}" for name in NAMES]),
    "tar.gz": lambda at, _, contents: (
        write_tar(at / "s.tar.gz", contents, "w:gz"),
        [f"s.tar.gz!/{name}" for name in NAMES],
    ),
    "zip": lambda at, _, contents: (write_zip(at / "z.zip", contents), [f"z.zip!/{name}" for name in NAMES]),
    "text list": lambda at, folder, _: (written(at / "l.txt", "\n".join(listed(folder))), listed(folder)),
    "csv": lambda at, folder, _: (
        written(at / "l.csv", "\n".join(["name,path", *(f'"a, {path[-7:]}",{path}' for path in listed(folder))])),
        listed(folder),
    ),
    "jsonl": lambda at, folder, _: (
        written(at / "l.jsonl", "\n".join(json.dumps({"file_name": path}) for path in listed(folder))),
        listed(folder),
    ),
    "parquet of paths": lambda at, folder, _: (_write_paths(at / "p.parquet", folder), numbered("p.parquet")),
    "hugging face": lambda at, folder, _: (hugging_face(at / "hf", folder, embedded=True), numbered("hf")),
    "hugging face paths": lambda at, folder, _: (hugging_face(at / "hf", folder, embedded=False), numbered("hf")),
    "lance": lambda at, _, contents: (lance_dataset(at / "d.lance", contents), numbered("d.lance")),
}


def _write_paths(target: Path, folder: Path) -> Path:
    pq.write_table(pa.table({"path": listed(folder)}), target)
    return target


def check_same(found: dict[str, Float32Array], expected: dict[str, Float32Array], ids: list[str]) -> None:
    """The pictures' embeddings, bit for bit, under these ids, in order."""
    assert list(found) == ids
    for key, name in zip(ids, NAMES, strict=True):
        np.testing.assert_array_equal(found[key], expected[name])


@pytest.mark.parametrize("kind", MAKERS)
def test_each_kind_gives_the_embeddings_of_the_folder(  # noqa: PLR0917  fixtures
    kind: str,
    contents: dict[str, bytes],
    folder: Path,
    expected: dict[str, Float32Array],
    tiny_model: Path,
    tmp_path: Path,
) -> None:
    name, ids = MAKERS[kind](tmp_path, folder, contents)
    check_same(embed(tiny_model, tmp_path / "out.parquet", str(name)), expected, ids)


def test_a_folder_of_shards_is_read_in_order_of_their_names(
    contents: dict[str, bytes], expected: dict[str, Float32Array], tiny_model: Path, tmp_path: Path
) -> None:
    shards = tmp_path / "shards"
    shards.mkdir()
    ids = []
    for shard in range(5):
        some = {name: contents[name] for name in NAMES[shard * 10 : shard * 10 + 10]}
        write_tar(shards / f"{shard:06d}.tar", some)
        ids += [f"{shard:06d}.tar!/{name}" for name in some]
    found = embed(tiny_model, tmp_path / "out.parquet", str(shards), keep_columns=("json.caption",))
    check_same(found, expected, ids)
    assert pq.read_table(tmp_path / "out.parquet")["json.caption"].to_pylist() == NAMES
    braced = str(shards / "{000000..000004}.tar")
    found = embed(tiny_model, tmp_path / "braced.parquet", braced)
    check_same(found, expected, [f"{shards}/{key}" for key in ids])


@pytest.fixture(scope="module")
def s3(contents: dict[str, bytes], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An S3 server with the pictures in a folder, a Parquet file, a tar and a list; its URL."""
    at = tmp_path_factory.mktemp("s3")
    objects = {f"bucket/pictures/{name}": content for name, content in contents.items()}
    objects["bucket/p.parquet"] = write_parquet(at / "p.parquet", contents).read_bytes()
    objects["bucket/s.tar"] = write_tar(at / "s.tar", contents).read_bytes()
    objects["bucket/z.zip"] = write_zip(at / "z.zip", contents).read_bytes()
    objects["bucket/l.txt"] = "\n".join(f"pictures/{name}" for name in NAMES).encode()
    with s3_server() as endpoint:
        put_s3(endpoint, objects)
        yield endpoint


S3_INPUTS = {
    "s3://bucket/pictures": NAMES,
    "s3://bucket/p.parquet": numbered("p.parquet"),
    "s3://bucket/s.tar": [f"s.tar!/{name}" for name in NAMES],
    "s3://bucket/z.zip": [f"z.zip!/{name}" for name in NAMES],
    "s3://bucket/l.txt": [f"pictures/{name}" for name in NAMES],
    "s3://bucket/pictures/*": [f"s3://bucket/pictures/{name}" for name in NAMES],
}


@pytest.mark.parametrize("url", S3_INPUTS)
def test_s3_gives_the_embeddings_of_the_folder(  # noqa: PLR0917  fixtures
    url: str,
    s3: str,
    expected: dict[str, Float32Array],
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use_s3(s3, monkeypatch)
    check_same(embed(tiny_model, tmp_path / "out.parquet", url), expected, S3_INPUTS[url])


@pytest.mark.parametrize("url", ["s3://bucket/s.tar", "s3://bucket/p.parquet", "s3://bucket/pictures"])
def test_connections_that_break_in_the_middle_cost_nothing(  # noqa: PLR0917  fixtures
    url: str,
    s3: str,
    expected: dict[str, Float32Array],
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with breaking_proxy(s3, times(3), after_bytes=700) as proxy:
        use_s3(proxy.url, monkeypatch)
        check_same(embed(tiny_model, tmp_path / "out.parquet", url), expected, S3_INPUTS[url])
        assert proxy.num_broken


def test_urls_of_a_web_server_give_the_embeddings_of_the_folder(
    contents: dict[str, bytes], expected: dict[str, Float32Array], tiny_model: Path, tmp_path: Path
) -> None:
    with http_server({f"/{name}": content for name, content in contents.items()}) as server:
        urls = [f"{server.url}/{name}" for name in NAMES]
        path = written(tmp_path / "l.txt", "\n".join(urls))
        found = embed(tiny_model, tmp_path / "out.parquet", str(path), allow_local_urls=True)
        check_same(found, expected, urls)
        refused = vlmembed.EncodeConfig(inputs=(str(path),), output=tmp_path / "no.parquet", model=tiny_model)
        with pytest.raises(vlmembed.VlmembedError, match="50 fetch_failed"):
            vlmembed.encode(refused)
        message = pq.read_table(tmp_path / "no.errors.parquet")["message"][0].as_py()
        assert "--allow-local-urls" in message


def test_an_output_on_s3_is_the_local_one(
    s3: str, expected: dict[str, Float32Array], tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_s3(s3, monkeypatch)
    config = vlmembed.EncodeConfig(
        inputs=("s3://bucket/s.tar",), output="s3://bucket/out.parquet", model=tiny_model, work_dir=tmp_path / "work"
    )
    report = vlmembed.encode(config)
    assert (report.num_rows, report.num_failed, str(report.output)) == (NUM_PICTURES, 0, "s3://bucket/out.parquet")
    from pyarrow import fs  # noqa: PLC0415  as in servers.py

    client = fs.S3FileSystem(endpoint_override=s3, region="us-east-1")
    table = pq.read_table("bucket/out.parquet", filesystem=client)
    vectors = table["embedding"].combine_chunks().flatten().to_numpy().reshape(NUM_PICTURES, -1)
    check_same(dict(zip(table["id"].to_pylist(), vectors, strict=True)), expected, [f"s.tar!/{name}" for name in NAMES])
    assert vlmembed.encode(config).already_complete
