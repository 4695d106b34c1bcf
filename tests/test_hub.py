"""A model on a hub: only what is needed is downloaded. A stand-in on loopback logs what was asked for."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

import pytest
import torch
from checkpoints import (
    is_of_tower,
    tiny_checkpoint,
)
from conftest import SAMPLES
from safetensors.torch import load_file
from test_weights import INDEX, PICKLE, WHOLE, load, weight_map

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class Hub(ThreadingHTTPServer):
    """As much of a hub as `snapshot_download` asks for, over loopback.

    Attributes:
        repos: folder of each repository's revision, by both names.
        requests: every path that was asked for.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), HubHandler)
        self.repos: dict[tuple[str, str], Path] = {}
        self.requests: list[str] = []

    def commit(self, repo: str, revision: str) -> str:
        """A commit's id, the same for each branch and for itself."""
        return hashlib.sha1(f"{repo}@{revision}".encode(), usedforsecurity=False).hexdigest()

    def find(self, repo: str, revision: str) -> tuple[str, Path] | None:
        """The commit and the folder of a branch or commit."""
        for (name, branch), folder in self.repos.items():
            commit = self.commit(name, branch)
            if name == repo and revision in (branch, commit):
                return commit, folder
        return None

    def files(self, repo: str) -> set[str]:
        """The files of a repository that were asked for."""
        return {path.rpartition("/")[2] for path in self.requests if path.startswith(f"/{repo}/resolve/")}


class HubHandler(BaseHTTPRequestHandler):
    """Answers as huggingface.co does."""

    server: Hub

    def do_GET(self) -> None:
        """With a body."""
        path = self.path.partition("?")[0]
        self.server.requests.append(path)
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/(revision|tree)/([^/]+)", path):
            repo, kind, revision = match.groups()
        elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            repo, revision, kind = match.groups()
        else:
            self.answer(404, b"")
            return
        found = self.server.find(repo, revision)
        if found is None:
            known = any(name == repo for name, _ in self.server.repos)
            self.answer(404, b"{}", {"X-Error-Code": "RevisionNotFound" if known else "RepoNotFound"})
            return
        commit, folder = found
        names = sorted(file.name for file in folder.iterdir())
        if kind == "revision":
            info = {"id": repo, "sha": commit, "siblings": [{"rfilename": name} for name in names]}
            self.answer(200, json.dumps(info).encode())
        elif kind == "tree":
            tree = [
                {"type": "file", "path": name, "oid": name, "size": (folder / name).stat().st_size} for name in names
            ]
            self.answer(200, json.dumps(tree).encode())
        elif (folder / kind).is_file():
            content = (folder / kind).read_bytes()
            etag = hashlib.sha1(content, usedforsecurity=False).hexdigest()
            self.answer(200, content, {"ETag": f'"{etag}"', "X-Repo-Commit": commit})
        else:
            self.answer(404, b"", {"X-Error-Code": "EntryNotFound"})

    def do_HEAD(self) -> None:
        """Without one."""
        self.do_GET()

    def answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        """Send it, as far as it was asked for."""
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing on stderr."""


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    """A hub, empty at first."""
    with Hub() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def run_with_hub(
    arguments: list[str], hub: Hub, cache: Path, *, offline: bool = False
) -> subprocess.CompletedProcess[str]:
    """Python in a process of its own, for the hub's client reads its settings when it is imported."""
    environment = {
        "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}",
        "HF_HOME": str(cache),
        "HF_HUB_CACHE": str(cache),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_OFFLINE": str(int(offline)),
        "PATH": "",
    }
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=environment, cwd=cache, capture_output=True, text=True, check=False)


LOAD = """
import sys, torch
from vlmembed.towers import load_tower
for argument in sys.argv[1:]:
    name, _, revision = argument.partition("@")
    tower = load_tower(name, revision=revision or None, dtype=torch.float32, device=torch.device("cpu"))
    print(tower.weights_sha256)
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Downloads:
    """Two towers, loaded from a hub and then from its cache.

    Attributes:
        sharded, pickled: the models as the hub has them: `some/sharded`, and revision `v2` of `some/pickled`.
        cache: where they were downloaded to.
        hashes: of the towers, as the product printed them.
        offline_hashes: the same without a hub.
        offline_requests: what was asked of the hub then.
    """

    sharded: Path
    pickled: Path
    cache: Path
    hashes: list[str]
    offline_hashes: list[str]
    offline_requests: list[str]


@pytest.fixture(scope="module")
def downloads(hub: Hub, tmp_path_factory: pytest.TempPathFactory) -> Downloads:
    """One process for all that is loaded online, and one for all offline: each takes seconds to import torch."""
    root = tmp_path_factory.mktemp("hub")
    sharded, main, pickled, cache = (root / name for name in ("sharded", "main", "pickled", "cache"))
    cache.mkdir()
    tiny_checkpoint("qwen2_5_vl", sharded, max_shard_size="20KB")
    for name in ("README.md", "modeling_x.py", "tokenizer.json", "model.gguf"):
        (sharded / name).write_text("raise RuntimeError", encoding="utf-8")
    tiny_checkpoint("qwen2_vl", main)
    tiny_checkpoint("siglip", pickled)
    torch.save(load_file(pickled / WHOLE), pickled / PICKLE)
    (pickled / WHOLE).unlink()
    hub.repos |= {("some/sharded", "main"): sharded, ("some/pickled", "main"): main, ("some/pickled", "v2"): pickled}
    command = ["-c", LOAD, "some/sharded", "some/pickled@v2"]
    online = run_with_hub(command, hub, cache)
    assert online.returncode == 0, online.stderr
    num_requests = len(hub.requests)
    offline = run_with_hub(command, hub, cache, offline=True)
    assert offline.returncode == 0, offline.stderr
    return Downloads(
        sharded=sharded,
        pickled=pickled,
        cache=cache,
        hashes=online.stdout.split(),
        offline_hashes=offline.stdout.split(),
        offline_requests=hub.requests[num_requests:],
    )


def test_only_the_shards_with_tensors_of_the_tower_are_downloaded(hub: Hub, downloads: Downloads) -> None:
    where = weight_map(downloads.sharded)
    shards = {shard for name, shard in where.items() if is_of_tower(name)}
    assert shards < set(where.values())
    expected = {"config.json", "preprocessor_config.json", INDEX} | shards
    assert hub.files("some/sharded") == expected
    snapshots = downloads.cache / "models--some--sharded" / "snapshots"
    assert {path.name for path in snapshots.glob("*/*")} == expected
    assert downloads.hashes[0] == load(downloads.sharded).weights_sha256


def test_the_revision_that_was_asked_for_is_downloaded(hub: Hub, downloads: Downloads) -> None:
    assert hub.files("some/pickled") == {"config.json", "preprocessor_config.json", PICKLE}
    assert "/api/models/some/pickled/revision/v2" in hub.requests
    assert "/api/models/some/pickled/revision/main" not in hub.requests
    assert downloads.hashes[1] == load(downloads.pickled).weights_sha256


def test_what_was_downloaded_loads_without_a_hub(downloads: Downloads) -> None:
    assert downloads.offline_hashes == downloads.hashes
    assert downloads.offline_requests == []


def test_the_command_line_asks_the_hub_for_the_revision(hub: Hub, tmp_path: Path) -> None:
    """And says so when the hub does not have the model."""
    command = ["-m", "vlmembed", "encode", str(SAMPLES / "drawings"), "out.parquet", "--model", "some/tower"]
    run = run_with_hub([*command, "--revision", "v2"], hub, tmp_path)
    assert run.returncode == 1
    assert "'some/tower' is neither a built-in model (dinov2-small) nor a folder here, and the hub" in run.stderr
    assert "404" in run.stderr
    assert "Traceback" not in run.stderr
    asked = [path for path in hub.requests if "some/tower" in path]
    assert asked == ["/api/models/some/tower/revision/v2"]
