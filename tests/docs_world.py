"""What the documentation's commands find: pictures of every kind of input, an S3 server, a web server and a model hub.

Everything is small, and served from this machine. Each page gets a folder of its own with the same files in it.
"""

from __future__ import annotations

import functools
import io
import json
import shutil
import tarfile
import threading
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import huggingface_hub
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from checkpoints import tiny_checkpoint
from conftest import ROOT, SAMPLES
from servers import http_server, put_s3, s3_filesystem, s3_server, use_s3
from test_hub import Hub

from vlmembed.towers import builtin

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import pytest

HUB_MODELS = {
    "Qwen/Qwen3-VL-8B-Instruct": "qwen3_vl",
    "google/siglip2-base-patch16-224": "siglip",
    "facebook/dinov2-small": "dinov2",
}
"""What the stand-in hub serves: tiny random models of these model types."""

DEFAULT_MODEL = "dinov2-small"
BUCKET = "bucket"


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """What all pages share.

    Attributes:
        files: folder that each page gets a copy of.
        models: folder of converted built-in models, as in a user's cache, with a tiny one in it.
        hub: URL of the model hub. s3: URL of the S3 server.
        objects: what the S3 server holds when a page begins, by ``bucket/key``.
    """

    files: Path
    models: Path
    hub: str
    s3: str
    objects: dict[str, bytes]

    def enter(self, page: Path, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Make `page` the current folder, with the files in it, and lead everything to the servers; the built-in models
        are those of `models`."""
        shutil.copytree(self.files, page / "work")
        cache, hub_cache = page / "cache", page / "hub"
        (cache / "vlmembed").mkdir(parents=True)
        (cache / "vlmembed" / "models").symlink_to(models)
        monkeypatch.chdir(page / "work")
        for name, value in {
            "HOME": str(page),
            "XDG_CACHE_HOME": str(cache),
            "HF_ENDPOINT": self.hub,
            "HF_HUB_CACHE": str(hub_cache),
            "HF_HUB_DISABLE_XET": "1",
        }.items():
            monkeypatch.setenv(name, value)
        use_s3(self.s3, monkeypatch)
        # The hub's client has read its environment already, when it was imported.
        download = functools.partial(huggingface_hub.snapshot_download, endpoint=self.hub, cache_dir=hub_cache)
        monkeypatch.setattr("vlmembed.towers.weights.snapshot_download", download)
        self.reset_bucket()

    def reset_bucket(self) -> None:
        """Remove what an earlier page has put there."""
        from pyarrow import fs  # noqa: PLC0415  as in servers.py

        filesystem = s3_filesystem(self.s3)
        for found in filesystem.get_file_info(fs.FileSelector(BUCKET, recursive=True)):
            if found.type == fs.FileType.File and found.path not in self.objects:
                filesystem.delete_file(found.path)


@contextmanager
def make_world(root: Path) -> Iterator[World]:
    """Make the files below a folder, and start the servers."""
    files = root / "files"
    make_files(files)
    with ExitStack() as stack:
        photos = stack.enter_context(http_server(files / "photos"))
        names = sorted(path.name for path in (files / "photos").iterdir())
        rows = [f"{photos.url}/{name.replace(' ', '%20')},sku-{number}" for number, name in enumerate(names)]
        (files / "urls.csv").write_text("\n".join(["url,sku", *rows]) + "\n", encoding="utf-8")
        endpoint = stack.enter_context(s3_server())
        objects = {
            f"{BUCKET}/{path.relative_to(files).as_posix()}": path.read_bytes()
            for folder in ("images", "shards")
            for path in sorted((files / folder).iterdir())
        }
        put_s3(endpoint, objects)
        yield World(
            files=files,
            models=make_builtin(root / "models"),
            hub=stack.enter_context(model_hub(root / "hub")),
            s3=endpoint,
            objects=objects,
        )


def make_files(files: Path) -> None:
    """The inputs that pages name; their names are part of the documentation."""
    files.mkdir()
    shutil.copytree(SAMPLES / "drawings", files / "images")
    shutil.copytree(SAMPLES / "broken", files / "broken")
    shutil.copytree(ROOT / "pipelines", files / "pipelines", ignore=shutil.ignore_patterns("__pycache__", "results"))
    for folder in ("photos", "data", "shards"):
        (files / folder).mkdir()
    for photo in sorted((SAMPLES / "photos").glob("*.jpg")):
        shutil.copy(photo, files / "photos")
    photos = {path.name: path.read_bytes() for path in sorted((files / "photos").iterdir())}
    images = [{"bytes": content, "path": name} for name, content in photos.items()]
    captions = [f"a photo: {name}" for name in photos]
    uids = [f"uid-{number}" for number in range(len(photos))]
    pq.write_table(pa.table({"image": images, "caption": captions, "uid": uids}), files / "data" / "train.parquet")
    for shard in range(2):
        members = dict(list(photos.items())[shard::2])
        write_shard(files / "shards" / f"{shard:06d}.tar", members)


def write_shard(target: Path, photos: dict[str, bytes]) -> None:
    """A WebDataset shard: each picture with a caption behind it."""
    with tarfile.open(target, "w") as tar:
        for number, (name, content) in enumerate(photos.items()):
            caption = json.dumps({"caption": f"a photo: {name}"}).encode()
            for member, data in ((f"{number:04d}.jpg", content), (f"{number:04d}.json", caption)):
                info = tarfile.TarInfo(member)
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))


def make_builtin(models: Path) -> Path:
    """A model as the built-in one, but random, narrow and of two layers, in a folder of its own: it sees pictures in
    the same sizes, so that what is printed has the same figures."""
    from transformers import Dinov2Config, Dinov2Model  # noqa: PLC0415  only where the world is made

    folder = models / f"{DEFAULT_MODEL}-{builtin.MODELS[DEFAULT_MODEL].num_layers}-layers"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        settings = {**builtin._config(2), "hidden_size": 24, "num_attention_heads": 2}
        Dinov2Model(Dinov2Config(**settings)).save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(builtin._PROCESSOR), encoding="utf-8")
    return models


@contextmanager
def model_hub(root: Path) -> Iterator[str]:
    """A hub with the models of `HUB_MODELS`; its URL."""
    with Hub() as server:
        for number, (repo, model_type) in enumerate(HUB_MODELS.items()):
            tiny_checkpoint(model_type, root / str(number))
            server.repos[repo, "main"] = root / str(number)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
