"""Outputs on an object store: runs, stops, other machines, and what a store can do to them."""

from __future__ import annotations

import json
import shutil
import time
from contextlib import closing
from functools import partial
from io import BytesIO
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from memory_store import DeadError, MemoryStore
from pyarrow import fs
from servers import breaking_proxy, http_server, s3_filesystem, s3_server, use_s3
from test_end_to_end import many_pictures, run, stop_after

import vlmembed.mirror.objects
import vlmembed.mirror.owner
from vlmembed.errors import InputError, NothingEmbeddedError, OutputError, StorageError
from vlmembed.finished import FinishedOutput
from vlmembed.mirror.localcopy import local_copy
from vlmembed.mirror.objects import Objects
from vlmembed.mirror.owner import Owner
from vlmembed.mirror.workfolder import WorkFolder
from vlmembed.remote.remotes import Remotes
from vlmembed.schema import read_provenance

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from vlmembed.report import RunReport

FILE, FOLDER = "s3://bucket/run/out.parquet", "s3://bucket/run/out/"
SLOW_FOLDER = pytest.param(FOLDER, marks=pytest.mark.slow)
ROWS = 30
"""Pictures in three parts; rows 0 and 25 are broken."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return many_pictures(tmp_path_factory.mktemp("mirror") / "in", ROWS)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> MemoryStore:
    """What every s3:// URL leads to; tries follow each other at once."""
    memory = MemoryStore()
    monkeypatch.setattr(Remotes, "filesystem", lambda *_: (memory, ""))
    monkeypatch.setattr(Remotes, "open", lambda _, url: memory.open(url))
    monkeypatch.setattr(vlmembed.mirror.objects, "PAUSES_SECONDS", (0.0, 0.0))
    monkeypatch.setattr(vlmembed.mirror.owner, "RENEW_SECONDS", 3600.0)
    return memory


class Machine:
    """Runs of one working folder."""

    def __init__(self, folder: Path, work: Path, model: Path) -> None:
        self._inputs = folder
        self.work = work
        self._settings = {"model": str(model), "rows_per_part": 10, "work_dir": str(work)}

    def encode(self, output: str, **settings: Any) -> RunReport:  # noqa: ANN401  of `EncodeConfig`
        """One run."""
        return run(settings.pop("inputs", self._inputs), output, **self._settings | settings)

    def left(self) -> list[str]:
        """Files of runs in the working folder."""
        return sorted(path.name for path in self.work.rglob("*") if path.is_file() and path.suffix != ".lock")


@pytest.fixture
def machine(folder: Path, tmp_path: Path, tiny_model: Path) -> Callable[[str], Machine]:
    return lambda name: Machine(folder, tmp_path / name, tiny_model)


@pytest.fixture(scope="module")
def expected(folder: Path, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[pa.Table, pa.Table]:
    """Rows and errors of a local run."""
    output = tmp_path_factory.mktemp("local") / "out.parquet"
    run(folder, output, model=str(tiny_model), rows_per_part=10)
    rows, errors = (pq.read_table(path) for path in (output, output.with_suffix(".errors.parquet")))
    assert (len(rows), len(errors)) == (ROWS - 2, 2)
    return rows.replace_schema_metadata(), errors.replace_schema_metadata()


def content_of(objects: dict[str, bytes], output: str) -> tuple[pa.Table, pa.Table]:
    """Rows and errors of a finished output, beside which nothing is."""
    if output == FILE:
        assert sorted(objects) == ["bucket/run/out.errors.parquet", "bucket/run/out.parquet"]
        names = [["bucket/run/out.parquet"], ["bucket/run/out.errors.parquet"]]
    else:
        start = "bucket/run/out/"
        parts = [f"{start}part-{number:06}.parquet" for number in range(3)]
        assert sorted(objects) == [f"{start}_SUCCESS", f"{start}_errors.parquet", *parts]
        names = [parts, [f"{start}_errors.parquet"]]
    tables = [
        pa.concat_tables([pq.read_table(BytesIO(objects[name])).replace_schema_metadata() for name in each])
        for each in names
    ]
    return tables[0], tables[1]


def check(objects: dict[str, bytes], output: str, expected: tuple[pa.Table, pa.Table]) -> None:
    rows, errors = content_of(objects, output)
    assert rows.equals(expected[0])
    assert errors.equals(expected[1])


def interrupt(machine: Machine, output: str, parts: int, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> None:  # noqa: ANN401
    """End a run, as by Ctrl-C, once so many parts are committed, here and there."""
    from vlmembed.mirror.mirror import Mirror  # noqa: PLC0415  patched here alone

    with monkeypatch.context() as patch:
        stop_after(parts, patch)
        add = Mirror.add
        patch.setattr(Mirror, "add", lambda self, record: (add(self, record), self.flush())[1])
        with pytest.raises(KeyboardInterrupt):
            machine.encode(output, **settings)


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    with s3_server() as endpoint:
        s3_filesystem(endpoint).create_dir("bucket")
        yield endpoint


def objects_of(endpoint: str, under: str) -> dict[str, bytes]:
    filesystem = s3_filesystem(endpoint)
    found = filesystem.get_file_info(fs.FileSelector(under, recursive=True))
    return {
        info.path: filesystem.open_input_stream(info.path).read() for info in found if info.type == fs.FileType.File
    }


@pytest.mark.parametrize("output", [FILE, SLOW_FOLDER])
def test_a_run_on_s3_leaves_what_a_local_one_does(
    output: str,
    s3: str,
    machine: Callable[[str], Machine],
    expected: tuple[pa.Table, pa.Table],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use_s3(s3, monkeypatch)
    one = machine("one")
    report = one.encode(output)
    assert (str(report.output), report.num_rows, report.num_failed) == (output.rstrip("/"), ROWS, 2)
    assert str(report.errors).startswith("s3://bucket/run/out")
    check(objects_of(s3, "bucket/run"), output, expected)
    assert one.left() == []
    assert machine("two").encode(output).already_complete
    with local_copy(output) as path:
        assert path.parent.rglob("*errors.parquet")
        files = sorted(path.glob("part-*")) if path.is_dir() else [path]
        rows = pa.concat_tables([pq.read_table(file).replace_schema_metadata() for file in files])
        assert rows.equals(expected[0])
    assert not path.exists()
    s3_filesystem(s3).delete_dir("bucket/run")


@pytest.mark.slow
def test_on_s3_another_machine_goes_on_through_connections_that_break(
    s3: str,
    machine: Callable[[str], Machine],
    expected: tuple[pa.Table, pa.Table],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use_s3(s3, monkeypatch)
    monkeypatch.setattr(vlmembed.mirror.objects, "PAUSES_SECONDS", (0.0, 0.0, 0.0))
    interrupt(machine("one"), FILE, 2, monkeypatch)
    there = objects_of(s3, "bucket/run/out.parquet.partial")
    assert len(there) == 7  # two parts of three, and the manifest
    broken: list[str] = []

    def breaks(line: str) -> bool:
        """Once what is sent, and once what is received of every kind of object."""
        kind = line.split(" ", maxsplit=1)[0] + line.split("?", maxsplit=1)[0].rpartition(".")[2]
        broken.append(kind)
        return broken.count(kind) == 1

    with breaking_proxy(s3, breaks, after_bytes=0) as proxy:
        use_s3(proxy.url, monkeypatch)
        report = machine("two").encode(FILE)
        assert proxy.num_broken > 3
    assert report.num_resumed == 20
    check(objects_of(s3, "bucket/run"), FILE, expected)
    s3_filesystem(s3).delete_dir("bucket/run")


@pytest.mark.parametrize("output", [FILE, SLOW_FOLDER])
def test_another_machine_encodes_what_is_left_and_no_more(
    output: str,
    store: MemoryStore,
    machine: Callable[[str], Machine],
    expected: tuple[pa.Table, pa.Table],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    interrupt(machine("one"), output, 2, monkeypatch)
    assert not any(name.endswith("owner.json") for name in store.names())  # it has let go
    report = machine("two").encode(output)
    assert (report.num_resumed, report.num_rows) == (20, ROWS)
    assert report.num_encoded <= 10
    check(store.objects, output, expected)
    # the first one finds it finished, and forgets its parts
    one = machine("one")
    assert one.encode(output).already_complete
    assert one.left() == []


def test_what_is_finished_is_known_by_its_footer_and_goes_by_overwrite_only(
    store: MemoryStore, machine: Callable[[str], Machine], expected: tuple[pa.Table, pa.Table]
) -> None:
    one = machine("one")
    one.encode(FILE)
    first = dict(store.objects)
    store.writes.clear()
    store.reads.clear()
    again = one.encode(FILE)
    assert (again.already_complete, again.num_embedded + again.num_duplicates) == (True, ROWS - 2)
    assert store.writes == []
    with pytest.raises(
        OutputError, match=r'^s3://bucket/run/out.parquet belongs to another run:\n.*"cls" there, "mean"'
    ):
        one.encode(FILE, pool="mean")
    assert store.objects == first
    assert one.left() == []
    one.encode(FILE, pool="mean", overwrite=True)
    rows, _ = content_of(store.objects, FILE)
    assert not rows.equals(expected[0])
    assert rows["id"].equals(expected[0]["id"])


@pytest.mark.slow
def test_parts_of_another_run_are_refused_and_go_by_overwrite(
    store: MemoryStore,
    machine: Callable[[str], Machine],
    expected: tuple[pa.Table, pa.Table],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    interrupt(machine("one"), FILE, 2, monkeypatch, pool="mean")
    with pytest.raises(OutputError, match=r"^s3://bucket/run/out.parquet.partial belongs to another run"):
        machine("two").encode(FILE)
    interrupt(machine("two"), FILE, 1, monkeypatch, overwrite=True)
    assert machine("three").encode(FILE).num_resumed == 10  # of the second part there is one of the first run
    check(store.objects, FILE, expected)
    # the first machine's parts are of a run that is gone
    with pytest.raises(OutputError, match='"cls" there, "mean" now'):
        machine("one").encode(FILE, pool="mean")


def fail_at(store: MemoryStore, word: str, *, times: int, message: str = "connection reset") -> None:
    """The first writes of paths with a word in them fail."""
    left = [times]

    def on_write(verb: str, path: str) -> None:
        if verb == "put" and word in path and left[0]:
            left[0] -= 1
            raise OSError(message)

    store.on_write = on_write


def test_an_upload_that_breaks_is_tried_again(
    store: MemoryStore, machine: Callable[[str], Machine], expected: tuple[pa.Table, pa.Table]
) -> None:
    fail_at(store, "part-000001", times=2)
    machine("one").encode(FILE)
    check(store.objects, FILE, expected)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("part-000001.errors", "connection reset"),
        pytest.param("part-000002.json", "AWS Error ACCESS_DENIED", marks=pytest.mark.slow),
    ],
)
def test_an_upload_that_always_fails_stops_the_run_and_the_same_command_goes_on(
    word: str, message: str, store: MemoryStore, machine: Callable[[str], Machine], expected: tuple[pa.Table, pa.Table]
) -> None:
    one = machine("one")
    fail_at(store, word, times=1000, message=message)
    with pytest.raises(StorageError, match=r"cannot write s3://bucket/run/out.parquet .*the same command goes on"):
        one.encode(FILE)
    there = sum(name.endswith(".json") and "part-" in name for name in store.names())
    assert there == int(word[10])
    store.on_write = lambda *_: None
    report = one.encode(FILE)
    assert report.num_resumed >= 10 * there  # what was committed here counts, uploaded or not
    check(store.objects, FILE, expected)
    assert one.left() == []


@pytest.mark.slow
def test_what_is_ahead_here_is_uploaded(
    store: MemoryStore,
    machine: Callable[[str], Machine],
    expected: tuple[pa.Table, pa.Table],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = machine("one")
    interrupt(one, FILE, 2, monkeypatch)
    for name in [name for name in store.names() if "part-000001" in name]:
        del store.objects[name]
    interrupt(one, FILE, 2, monkeypatch)
    assert sum("part-000001" in name for name in store.names()) == 3
    assert machine("two").encode(FILE).num_resumed == 20
    check(store.objects, FILE, expected)


@pytest.mark.parametrize(
    "harm", ["damaged", *(pytest.param(each, marks=pytest.mark.slow) for each in ("missing", "line"))]
)
def test_parts_from_the_first_damaged_one_on_are_done_again(
    harm: str,
    store: MemoryStore,
    machine: Callable[[str], Machine],
    expected: tuple[pa.Table, pa.Table],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    interrupt(machine("one"), FILE, 2, monkeypatch)
    partial = "bucket/run/out.parquet.partial"
    if harm == "damaged":
        store.objects[f"{partial}/part-000000.parquet"] = bytes(1000)
    elif harm == "missing":
        del store.objects[f"{partial}/part-000000.errors.parquet"]
    else:
        store.objects[f"{partial}/part-000000.json"] = b'{"run": "of another"}'
    assert machine("two").encode(FILE).num_resumed == 0
    check(store.objects, FILE, expected)


def die_at(store: MemoryStore, operation: int) -> None:
    """From its so-many-th write on, the process is gone."""
    count = [0]

    def on_write(*_: str) -> None:
        count[0] += 1
        store.is_dead = count[0] == operation

    store.on_write = on_write


def die_everywhere(
    store: MemoryStore,
    machine: Callable[[str], Machine],
    output: str,
    expected: tuple[pa.Table, pa.Table],
    **settings: Any,  # noqa: ANN401  of `EncodeConfig`
) -> int:
    """Let runs die at every write; in turn the same machine and another one go on. How many died."""
    before, times = dict(store.objects), dict(store.times)
    operation = 1
    while True:
        store.objects, store.times = dict(before), dict(times)
        first = machine(f"{operation}-a")
        die_at(store, operation)
        try:
            first.encode(output, **settings)
        except DeadError:
            pass
        else:
            return operation - 1
        store.is_dead, store.on_write = False, lambda *_: None
        second = first if operation % 2 else machine(f"{operation}-b")
        for name in store.names():
            if second is not first and name.endswith("owner.json"):
                with pytest.raises(OutputError, match="another process is writing to s3://bucket/run/out"):
                    second.encode(output, **settings)
                store.times[name] -= 700  # it is known to be dead by now
        second.encode(output, **settings)
        check(store.objects, output, expected)
        assert second.left() == []
        operation += 1


@pytest.mark.slow
@pytest.mark.parametrize("output", [FILE, FOLDER])
def test_death_at_every_write(
    output: str, store: MemoryStore, machine: Callable[[str], Machine], expected: tuple[pa.Table, pa.Table]
) -> None:
    assert die_everywhere(store, machine, output, expected) >= 16


@pytest.mark.slow
@pytest.mark.parametrize("output", [FILE, FOLDER])
def test_death_at_every_write_of_a_run_that_replaces_another(
    output: str, store: MemoryStore, machine: Callable[[str], Machine], expected: tuple[pa.Table, pa.Table]
) -> None:
    machine("old").encode(output, pool="mean", rows_per_part=7)
    assert die_everywhere(store, machine, output, expected, overwrite=True) >= 16


@pytest.mark.parametrize("output", [FOLDER, pytest.param(FILE, marks=pytest.mark.slow)])
def test_death_between_the_last_uploads_is_finished_without_encoding(
    output: str, store: MemoryStore, machine: Callable[[str], Machine], expected: tuple[pa.Table, pa.Table]
) -> None:
    one = machine("one")
    whole = "out.parquet" if output == FILE else "_SUCCESS"

    def on_write(verb: str, path: str) -> None:
        store.is_dead = verb == "put" and path.endswith(f"/{whole}")

    store.on_write = on_write
    with pytest.raises(DeadError):
        one.encode(output)
    store.is_dead, store.on_write = False, lambda *_: None
    assert any("errors" in name and "part" not in name.rpartition("/")[2] for name in store.names())
    assert one.encode(output).already_complete
    check(store.objects, output, expected)
    assert one.left() == []


@pytest.mark.slow
def test_what_was_finished_here_gives_way_to_what_was_written_there_since(
    store: MemoryStore, machine: Callable[[str], Machine]
) -> None:
    one = machine("one")
    store.on_write = lambda verb, path: setattr(
        store, "is_dead", verb == "put" and path.endswith("/out.errors.parquet")
    )
    with pytest.raises(DeadError):
        one.encode(FILE)
    store.is_dead, store.on_write = False, lambda *_: None
    for name in store.names():
        store.times[name] -= 700
    machine("two").encode(FILE, pool="mean", overwrite=True)
    before = dict(store.objects)
    with pytest.raises(OutputError, match='"mean" there, "cls" now'):
        one.encode(FILE)
    assert store.objects == before


def test_a_process_whose_token_is_gone_stops_and_leaves_the_output_to_the_other(
    store: MemoryStore, machine: Callable[[str], Machine], expected: tuple[pa.Table, pa.Table]
) -> None:
    partial = "bucket/run/out.parquet.partial"

    def on_write(verb: str, path: str) -> None:
        if verb == "put" and path.endswith("part-000001.parquet"):
            store.objects[f"{partial}/owner.json"] = json.dumps({"token": "x", "host": "there", "pid": 7}).encode()
            store.times[f"{partial}/owner.json"] = time.time()

    store.on_write = on_write
    one = machine("one")
    with pytest.raises(
        OutputError,
        match=r"another process is writing to s3://bucket/run/out.parquet.partial \(process 7 on there has taken over",
    ):
        one.encode(FILE)
    store.on_write = lambda *_: None
    assert [name[-17:] for name in store.names() if "part-" in name and name.endswith("json")] == ["/part-000000.json"]
    with pytest.raises(OutputError, match=r"process 7 on there wrote last \d+ s ago"):
        one.encode(FILE)
    store.times[f"{partial}/owner.json"] -= 700
    assert one.encode(FILE).num_resumed >= 20
    check(store.objects, FILE, expected)


@pytest.mark.parametrize("output", [FILE, SLOW_FOLDER])
def test_failed_rows_of_a_remote_output_are_tried_again(
    output: str, store: MemoryStore, machine: Callable[[str], Machine], folder: Path, tmp_path: Path
) -> None:
    inputs = tmp_path / "inputs"
    shutil.copytree(folder, inputs)
    machine("one").encode(output, inputs=inputs)
    shutil.copy(inputs / "0003.png", inputs / "0025.png")
    two = machine("two")
    report = two.encode(output, inputs=inputs, retry_failed=True)
    assert (report.num_retried, report.num_recovered, report.num_failed) == (2, 1, 1)
    rows, errors = content_of(store.objects, output)
    assert rows["id"].to_pylist() == [f"{row:04}.png" for row in range(1, ROWS)]
    assert errors["id"].to_pylist() == ["0000.png"]
    assert two.left() == []
    shutil.copy(inputs / "0007.png", inputs / "0000.png")
    # this time it is killed just before the end
    whole = "out.parquet" if output == FILE else "_SUCCESS"
    store.on_write = lambda verb, path: setattr(store, "is_dead", verb == "put" and path.endswith(f"/{whole}"))
    with pytest.raises(DeadError):
        two.encode(output, inputs=inputs, retry_failed=True)
    store.is_dead, store.on_write = False, lambda *_: None
    assert two.encode(output, inputs=inputs, retry_failed=True).already_complete
    rows, errors = content_of(store.objects, output)
    assert (len(rows), len(errors)) == (ROWS, 0)


def test_a_retry_needs_a_finished_output(store: MemoryStore, machine: Callable[[str], Machine]) -> None:
    with pytest.raises(OutputError, match=r"needs a finished output, and s3://bucket/run/out.parquet is none"):
        machine("one").encode(FILE, retry_failed=True)
    assert store.names() == []


def test_nothing_embedded_leaves_the_errors(
    store: MemoryStore, machine: Callable[[str], Machine], tmp_path: Path
) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.png").write_bytes(b"")
    one = machine("one")
    for _ in range(2):  # it is no finished output
        with pytest.raises(NothingEmbeddedError, match=r"the reasons are in s3://bucket/run/out.errors.parquet"):
            one.encode(FILE, inputs=tmp_path / "in")
        assert store.names() == ["bucket/run/out.errors.parquet"]
        assert one.left() == []
    facts = read_provenance(pq.read_schema(BytesIO(store.objects["bucket/run/out.errors.parquet"])), "x")
    assert facts["counts"]["codes"] == {"empty": 1}


def test_what_is_no_run_is_left_alone(store: MemoryStore, machine: Callable[[str], Machine]) -> None:
    for path, output, message in (
        ("run/out.parquet", FILE, "s3://bucket/run/out.parquet exists and is no output of vlmembed"),
        ("run/out/notes.txt", FOLDER, "holds 'notes.txt', which is not a run's"),
        ("run/out.parquet.partial/notes.txt", FILE, "holds no manifest.json, so it is not a run of vlmembed"),
    ):
        store.objects[f"bucket/{path}"] = b"notes"
        store.times[f"bucket/{path}"] = 0.0
        with pytest.raises(OutputError, match=message):
            machine("one").encode(output)
        assert store.objects == {f"bucket/{path}": b"notes"}
        store.objects.clear()


def test_outputs_that_cannot_be(store: MemoryStore, machine: Callable[[str], Machine]) -> None:
    for output, message in (
        (
            "https://host/out.parquet",
            "https://host/out.parquet cannot be written to: name a local path, or a URL of s3://",
        ),
        ("hf://datasets/a/b/out.parquet", "cannot be written to"),
        ("ftp://host/out.parquet", "cannot be written to"),
        ("s3://bucket", "names no more than a bucket"),
        ("s3://elsewhere/out.parquet", "there is no bucket for output s3://elsewhere/out.parquet"),
        ("s3://bucket/out.csv", "output 's3://bucket/out.csv' does not end in .parquet"),
        ("s3://bucket/out.lance", "Lance datasets are written to local disks only"),
    ):
        with pytest.raises(OutputError, match=message):
            machine("one").encode(output)
    assert store.writes == []


def test_a_copy_of_what_is_not_there(store: MemoryStore, tmp_path: Path) -> None:
    assert store.names() == []
    for name, message in ((FILE, "does not exist: name the output"), ("s3://bucket", "names no more than a bucket")):
        with pytest.raises(InputError, match=message), local_copy(name):
            pass
    with local_copy(tmp_path / "a.parquet") as path:
        assert path == tmp_path / "a.parquet"


def test_a_copy_from_a_web_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vlmembed.mirror.localcopy.Remotes", partial(Remotes, allow_local=True))
    files = {"/a b.parquet": b"rows", "/a b.errors.parquet": b"errors", "/c.parquet": b"more"}
    with http_server(files) as server:
        with local_copy(f"{server.url}/a%20b.parquet?token=x") as path:
            assert (path.name, path.read_bytes()) == ("a b.parquet", b"rows")
            assert path.with_suffix(".errors.parquet").read_bytes() == b"errors"
        with local_copy(f"{server.url}/c.parquet") as path:
            assert [each.name for each in path.parent.iterdir()] == ["c.parquet"]
    assert not path.parent.exists()


def test_a_claim_is_renewed_until_it_is_released(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vlmembed.mirror.owner, "RENEW_SECONDS", 0.01)
    with Remotes(timeout_seconds=1) as remotes:
        objects = Objects(remotes, "s3://bucket/run")
        owner, other = Owner(objects, "owner.json", "one"), Owner(objects, "owner.json", "two")
        assert not owner.claim()
        deadline = time.monotonic() + 20
        while len(store.writes) < 4:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        with pytest.raises(OutputError, match="another process is writing to s3://bucket/run"):
            other.claim()
        again = Owner(objects, "owner.json", "one")  # of the same working folder, after a crash
        assert again.claim()
        again.release()
        owner.release()
        assert not other.claim()
        other.release()
    assert store.names() == []


def noted(path: Path) -> WorkFolder:
    """A working folder, as the next start finds it."""
    return WorkFolder(path, "s3://bucket/run")


@pytest.mark.parametrize("cut", [1, 2, 30, 70])
def test_a_note_that_was_cut_costs_its_own_file_only(cut: int, tmp_path: Path) -> None:
    folder = tmp_path / "work"
    names = ["a", "b", "c"]
    with closing(noted(folder)) as work:
        for name in names:
            work.path(name).write_text(name)
        for name in names[:2]:
            work.note(name, "uploaded")
    notes = folder / "mirror-files.jsonl"
    notes.write_bytes(notes.read_bytes()[:-cut])
    with closing(noted(folder)) as work:
        assert [work.is_there(name) for name in names] == [True, cut == 1, False]  # but for its end the line is whole
        work.note("c", "fetched")
    with closing(noted(folder)) as work:
        assert [work.is_there(name) for name in names] == [True, cut == 1, True]
        work.note("b", "uploaded")
    with closing(noted(folder)) as work:
        assert [work.is_there(name) for name in names] == [True, True, True]
        assert [work.is_fetched(name) for name in names] == [False, False, True]


def test_notes_that_are_none_are_passed_over(tmp_path: Path) -> None:
    folder = tmp_path / "work"
    with closing(noted(folder)) as work:
        work.path("a").write_text("a")
        work.note("a", "uploaded")
    with (folder / "mirror-files.jsonl").open("ab") as file:
        file.write(b'{"name": "a"{"name": "b"}\n\xff\0\n3\n{"name": "b"}\n{"name": "b", "how": "x", "identity": 1}\n')
    with closing(noted(folder)) as work:
        assert work.is_there("a")
        assert not work.is_there("b")


def test_a_url_whose_name_no_file_can_have_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vlmembed.mirror.localcopy.Remotes", partial(Remotes, allow_local=True))
    with (
        http_server({"/a\0.parquet": b"rows"}) as server,
        pytest.raises(InputError, match=r"a%00.parquet cannot be read \(.*\): name the output of an earlier run"),
        local_copy(f"{server.url}/a%00.parquet"),
    ):
        pass


def test_a_folder_without_parts_is_said_to_hold_no_rows(tmp_path: Path) -> None:
    (tmp_path / "_SUCCESS").write_text(json.dumps({"fingerprint": {}}))
    with pytest.raises(InputError, match=r"holds no rows: it has _SUCCESS, and no part-\*.parquet; name an output"):
        FinishedOutput.open(tmp_path)
