"""`vlmembed.stream`: the rows of a run without its files, and what becomes of the run when nobody reads on."""

from __future__ import annotations

import gc
import io
import random
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import noise

import vlmembed
from vlmembed.config import EncodeConfig
from vlmembed.encoder import Encoder
from vlmembed.errors import (
    ConfigError,
    FailureCode,
    InputError,
    ModelError,
    NothingEmbeddedError,
    RowFailedError,
    StalledError,
    UsageError,
)
from vlmembed.pipeline import Pipeline
from vlmembed.schema import ERRORS_SCHEMA, VectorColumn, output_schema, read_provenance
from vlmembed.streaming.background import BackgroundRun
from vlmembed.streaming.recent import MAX_RECENT_BYTES, ROW_BYTES, MemoryStore, RecentHashes, StreamedPart, num_recent
from vlmembed.types import Embedded, Failure, ImageRef

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from vlmembed.partfiles import PartRecord

NUM_ROWS = 40
RUN_THREADS = ("stream", "reader", "writer", "watchdog", "decode", "read-", "download")


def picture(seed: int, size: tuple[int, int] = (20, 30)) -> bytes:
    buffer = io.BytesIO()
    noise(*size, seed).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 rows of mixed sizes; of each ten the fifth repeats the first row of all, the sixth a broken one, and one is
    empty."""
    folder = tmp_path_factory.mktemp("pictures")
    for row in range(NUM_ROWS):
        content = picture(row, (20 + row, 60 - row))
        if row % 10 == 4:
            content = picture(0, (20, 60))
        if row % 10 == 5:
            content = b"\x89PNG\r\n\x1a\nbroken"
        if row == 17:
            content = b""
        (folder / f"{row:03}.png").write_bytes(content)
    return folder


@pytest.fixture
def settings(tiny_model: Path) -> dict[str, Any]:
    return {"model": str(tiny_model), "rows_per_part": 7, "workers": 1}


def written(inputs: Path, folder: Path, **settings: Any) -> tuple[pa.Table, pa.Table]:  # noqa: ANN401
    vlmembed.encode(inputs, folder / "out.parquet", **settings)
    return pq.read_table(folder / "out.parquet"), pq.read_table(folder / "out.errors.parquet")


def read_all(stream: vlmembed.Stream) -> pa.Table:
    return pa.Table.from_batches(list(stream), schema=stream.schema)


def run_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(RUN_THREADS)]


def has_length(items: list[int], number: int) -> bool:
    return len(items) == number


def until(condition: Callable[[], bool]) -> None:
    """Wait for what other threads do."""
    deadline = time.monotonic() + 60
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert condition()


@pytest.fixture(autouse=True)
def _threads_end() -> Iterator[None]:
    """Whatever a test does with a stream: its threads end."""
    yield
    until(lambda: not run_threads())


@pytest.mark.parametrize("more", [{}, {"dedup": "none"}, {"dedup": "pixels"}, {"emit": "tokens"}, {"limit": 23}])
def test_a_stream_yields_what_encode_writes_byte_for_byte(
    more: dict[str, Any], pictures: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    table, errors = written(pictures, tmp_path, **settings, **more)
    with vlmembed.stream(pictures, **settings, **more) as stream:
        assert stream.schema.equals(table.schema)
        assert stream.num_rows == more.get("limit", NUM_ROWS)
        batches = list(stream)
    assert all(batch.schema.equals(stream.schema, check_metadata=True) for batch in batches)
    found = pa.Table.from_batches(batches)
    assert found.equals(table)
    assert stream.errors.equals(errors)
    assert stream.report.num_rows == found.num_rows + errors.num_rows


def test_a_batch_is_a_part_and_duplicates_cross_parts(pictures: Path, settings: dict[str, Any]) -> None:
    with vlmembed.stream(pictures, **settings) as stream:
        batches = list(stream)
    assert [batch.num_rows for batch in batches] == [6, 7, 5, 6, 7, 4]
    rows = [row for batch in batches for row in batch.to_pylist()]
    assert {row["duplicate_of"] for row in rows} == {None, "000.png"}
    repeats = [row for row in rows if row["duplicate_of"]]
    assert [row["id"] for row in repeats] == ["004.png", "014.png", "024.png", "034.png"]
    assert all(row["embedding"] == rows[0]["embedding"] for row in repeats)
    failed = stream.errors.to_pylist()
    assert [row["row"] for row in failed] == [5, 15, 17, 25, 35]
    assert failed[1]["message"].startswith("same content as '005.png': ")
    assert read_provenance(stream.schema, "stream")["fingerprint"]["num_rows"] == NUM_ROWS


def test_the_report_accounts_for_every_row_once_the_stream_is_read(pictures: Path, settings: dict[str, Any]) -> None:
    stream = vlmembed.stream(EncodeConfig(inputs=(pictures,), **settings))
    next(stream)
    with pytest.raises(UsageError, match="read to its end: take the batches that are left"):
        _ = stream.report
    for _ in stream:
        pass
    report = stream.report
    assert (report.num_rows, report.num_embedded, report.num_duplicates, report.num_failed) == (40, 31, 4, 5)
    assert (report.output, report.errors, report.codes) == ("", "", {"corrupt": 4, "empty": 1})
    assert (report.num_encoded, report.width, report.already_complete) == (31, 32, False)
    assert next(stream, None) is None


def test_errors_can_be_taken_and_forgotten(pictures: Path, settings: dict[str, Any]) -> None:
    taken = []
    with vlmembed.stream(pictures, **settings) as stream:
        assert stream.errors.schema == ERRORS_SCHEMA
        for _ in stream:
            taken += stream.take_errors()["row"].to_pylist()
            assert stream.errors.num_rows == 0
    assert taken == [5, 15, 17, 25, 35]


def test_a_part_without_vectors_gives_its_errors_and_no_batch(tmp_path: Path, settings: dict[str, Any]) -> None:
    for row in range(20):
        (tmp_path / f"{row:02}.png").write_bytes(picture(row) if row in (0, 19) else b"")
    with vlmembed.stream(tmp_path, **settings) as stream:
        assert [batch.num_rows for batch in stream] == [1, 1]
    assert stream.errors["row"].to_pylist() == list(range(1, 19))


def test_parts_are_a_quarter_of_encodes_unless_told(pictures: Path, tiny_model: Path) -> None:
    with vlmembed.stream(pictures, model=tiny_model) as stream:
        assert read_provenance(stream.schema, "stream")["shape"]["rows_per_part"] == 256


def test_tars_shards_and_kept_columns_stream_too(tmp_path: Path, settings: dict[str, Any]) -> None:
    for shard in range(2):
        with tarfile.open(tmp_path / f"{shard}.tar", "w") as archive:
            for row in range(5):
                for extension, content in (("png", picture(10 * shard + row)), ("txt", b"caption")):
                    member = tarfile.TarInfo(f"{row}.{extension}")
                    member.size = len(content)
                    archive.addfile(member, io.BytesIO(content))
    with vlmembed.stream(tmp_path, **settings, keep_columns=["txt"]) as stream:
        assert stream.num_rows is None
        table = read_all(stream)
    assert (stream.report.num_rows, table.num_rows) == (10, 10)
    assert set(table["txt"].to_pylist()) == {"caption"}
    with vlmembed.stream([tmp_path / "0.tar", tmp_path / "1.tar"], **settings, shard="1/2") as stream:
        ids = read_all(stream)["id"].to_pylist()
    assert [key.partition("!")[0] for key in ids] == [str(tmp_path / "1.tar")] * 5


def test_a_cache_serves_streams(pictures: Path, tmp_path: Path, settings: dict[str, Any]) -> None:
    tables = []
    for _ in range(2):
        with vlmembed.stream(pictures, **settings, cache=tmp_path) as stream:
            tables.append(read_all(stream))
    assert tables[0].equals(tables[1])
    assert (stream.report.num_found, stream.report.num_encoded) == (31, 0)


@pytest.mark.slow  # three processes load torch
def test_two_workers_stream_what_one_does(pictures: Path, settings: dict[str, Any]) -> None:
    tables = []
    for device in ("cpu", "cpu,cpu"):
        with vlmembed.stream(pictures, **settings, device=device) as stream:
            tables.append(read_all(stream))
    vectors = [np.array(table["embedding"].to_pylist(), np.float32) for table in tables]
    np.testing.assert_allclose(vectors[0], vectors[1], atol=1e-5)
    assert tables[0].drop_columns("embedding").equals(tables[1].drop_columns("embedding"))


WRITES = ("a", "w", "x", "+")
_opened: list[str] | None = None


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    """What has been opened for writing, made, moved or connected to while somebody listens."""
    if _opened is None:
        return
    if event == "open":
        path, mode, _ = arguments
        if isinstance(path, (str, bytes)) and isinstance(mode, str) and any(letter in mode for letter in WRITES):
            _opened.append(str(path))
    elif event in ("os.mkdir", "os.rename", "os.link", "sqlite3.connect", "tempfile.mkstemp", "tempfile.mkdtemp"):
        _opened.append(f"{event} {arguments[0]}")


def test_nothing_is_written(
    pictures: Path, tmp_path: Path, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    global _opened  # noqa: PLW0603  an audit hook stays for ever, so it must be turned off
    monkeypatch.chdir(tmp_path)
    before = sorted(pictures.iterdir())
    sys.addaudithook(_audit)
    _opened = []
    try:
        with vlmembed.stream(pictures, **settings) as stream:
            table = read_all(stream)
    finally:
        opened, _opened = _opened, None
    assert table.num_rows == 35
    # the list of a folder's rows is an unnamed file in the temporary folder
    assert {path for path in opened if not path.endswith(".pyc")} <= {tempfile.gettempdir()}
    assert sorted(pictures.iterdir()) == before
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"overwrite": True}, "overwrite is True, but a stream writes nothing that could be replaced: leave it out"),
        ({"retry_failed": True}, "retry_failed is True, but a stream knows no earlier output"),
        ({"format": "parquet"}, "format is 'parquet', but a stream yields Arrow and writes no file"),
        ({"work_dir": "x"}, "work_dir is 'x', but a stream has no parts on disk"),
        ({"reuse": ["a.parquet"]}, "but earlier outputs are looked up in an index on disk: use cache"),
        ({"rows_per_prat": 3}, "unknown setting 'rows_per_prat': is 'rows_per_part' meant"),
        ({"limit": 0}, "limit is 0; it must be 1 or more"),
        ({"output": "o.parquet"}, "a stream writes nothing: leave it out, or let vlmembed.encode write a file"),
    ],
)
def test_settings_that_make_no_sense_are_refused_with_the_remedy(more: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        vlmembed.stream("pictures", **more)


def test_a_config_and_settings_beside_it_are_refused() -> None:
    config = EncodeConfig(inputs=("pictures",))
    with pytest.raises(ConfigError, match="limit beside an EncodeConfig: put them into it, "):
        vlmembed.stream(config, limit=3)  # type: ignore[call-overload]


def test_what_keeps_a_run_from_being_set_up_is_raised_by_the_call(pictures: Path, settings: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="no_such_folder"):
        vlmembed.stream("no_such_folder", **settings)
    with pytest.raises(ModelError):
        vlmembed.stream(pictures, model="no_such_folder/model")
    with pytest.raises(ConfigError, match="--pool head is not possible"):
        vlmembed.stream(pictures, **settings, pool="head")


def test_what_ends_a_run_is_raised_by_next(
    pictures: Path, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = vlmembed.stream(pictures, **settings, on_error="fail")
    with pytest.raises(RowFailedError, match=r"005\.png: corrupt"):
        list(stream)
    assert list(stream) == []
    monkeypatch.setattr("vlmembed.packer.make_batch", lambda *_: 1 / 0)
    with vlmembed.stream(pictures, **settings) as stream, pytest.raises(ZeroDivisionError):
        list(stream)


def test_inputs_without_a_single_picture_end_with_the_error_of_encode(tmp_path: Path, settings: dict[str, Any]) -> None:
    for row in range(3):
        (tmp_path / f"{row}.png").write_bytes(b"")
    stream = vlmembed.stream(tmp_path, **settings)
    with pytest.raises(NothingEmbeddedError, match=r"not one of 3 rows has an embedding \(3 empty\)") as caught:
        next(stream)
    assert caught.value.__context__ is None  # no cause that is none
    assert stream.errors["code"].to_pylist() == ["empty"] * 3
    assert stream.report.num_failed == 3


@pytest.fixture
def commits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of the parts that the writer has finished."""
    numbers: list[int] = []
    commit = MemoryStore.commit

    def noted(store: MemoryStore, record: PartRecord, *columns: Any) -> None:  # noqa: ANN401
        numbers.append(record.number)
        commit(store, record, *columns)

    monkeypatch.setattr(MemoryStore, "commit", noted)
    return numbers


def test_a_slow_consumer_holds_two_batches_up_and_the_watchdog_hears_of_it(
    pictures: Path, settings: dict[str, Any], commits: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = threading.Semaphore(0)
    monkeypatch.setattr(Pipeline, "moved", lambda _: waits.release())
    with vlmembed.stream(pictures, **settings) as stream:
        for taken in (0, 1, 2):
            until(partial(has_length, commits, taken + 2))
            while waits.acquire(blocking=False):
                pass
            for _ in range(3):  # it goes on telling, so hours make no difference
                assert waits.acquire(timeout=60)
            assert commits == list(range(taken + 2))
            next(stream)


def leave_by_break(stream: vlmembed.Stream) -> None:
    for _ in stream:
        break
    stream.close()


def leave_by_error(stream: vlmembed.Stream) -> None:
    with pytest.raises(ZeroDivisionError), stream:
        _ = next(stream).num_rows / 0


def leave_by_interrupt(stream: vlmembed.Stream) -> None:
    next(stream)
    with pytest.raises(KeyboardInterrupt), stream:
        raise KeyboardInterrupt


def leave_at_once(stream: vlmembed.Stream) -> None:
    stream.close()
    stream.close()


@pytest.mark.parametrize("leave", [leave_by_break, leave_by_error, leave_by_interrupt, leave_at_once])
def test_who_leaves_early_ends_the_threads(
    leave: Callable[[vlmembed.Stream], None], pictures: Path, settings: dict[str, Any]
) -> None:
    gc.disable()  # they end by themselves, and not when something is collected
    try:
        stream = vlmembed.stream(pictures, **settings)
        leave(stream)
        until(lambda: not run_threads())  # a decode under way is waited for, for a second
    finally:
        gc.enable()
    assert list(stream) == []
    with pytest.raises(UsageError, match="read to its end"):
        _ = stream.report


def test_a_stream_that_nobody_has_any_more_ends(pictures: Path, settings: dict[str, Any]) -> None:
    for batch in vlmembed.stream(pictures, **settings):
        assert batch.num_rows == 6
        break
    gc.collect()  # the fixture waits for the threads


def test_ctrl_c_in_a_wait_leaves_the_stream_usable(
    pictures: Path, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:  # noqa: ANN401
        raise KeyboardInterrupt

    with vlmembed.stream(pictures, **settings) as stream:
        with monkeypatch.context() as patch:
            patch.setattr(stream._run._parts, "get", interrupted)
            with pytest.raises(KeyboardInterrupt):
                next(stream)
        assert sum(batch.num_rows for batch in stream) == 35


def test_ctrl_c_while_a_stream_is_set_up_ends_it(
    pictures: Path, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Impatient(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:  # noqa: ARG002  as its base
            raise KeyboardInterrupt

    run = BackgroundRun(replace(EncodeConfig(inputs=(pictures,)), **settings))
    monkeypatch.setattr(run, "_is_ready", Impatient())
    with pytest.raises(KeyboardInterrupt):
        run.start()
    assert run.take() is None


def test_a_run_that_is_stuck_for_good_does_not_hold_its_caller_up(pictures: Path, settings: dict[str, Any]) -> None:
    stream = vlmembed.stream(pictures, **settings)
    stream._run._give_up()
    with pytest.raises(StalledError, match="one of its threads could not be ended"):
        list(stream)


def test_the_model_is_loaded_and_used_in_one_thread(
    pictures: Path, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch.cuda.set_device is for one thread, so everything about the device must be done there."""
    threads = []

    def noting(method: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*arguments: Any) -> Any:  # noqa: ANN401  as the method
            threads.append(threading.current_thread().name)
            return method(*arguments)

        return noted

    monkeypatch.setattr(Encoder, "load", noting(Encoder.load))
    monkeypatch.setattr(Encoder, "_submit", noting(Encoder._submit))
    with vlmembed.stream(pictures, **settings) as stream:
        list(stream)
    assert len(threads) > 1
    assert set(threads) == {"stream"}


@pytest.mark.slow  # a process that loads torch
def test_a_program_can_end_with_a_stream_open(pictures: Path, settings: dict[str, Any]) -> None:
    script = """
import sys, vlmembed
stream = vlmembed.stream(sys.argv[1], model=sys.argv[2], rows_per_part=7)
print(next(stream).num_rows)
"""
    command = [sys.executable, "-W", "error", "-X", "dev", "-c", script, str(pictures), settings["model"]]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (run.returncode, run.stdout) == (0, "6\n"), run.stderr
    assert "Traceback" not in run.stderr


def test_a_repeat_of_a_forgotten_picture_is_encoded_again(
    tmp_path: Path, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vlmembed.streaming.background.num_recent", lambda *_: 3)
    order = [0, 1, 0, 2, 0, 3, 4, 0, 1, 1]  # 0 is forgotten when the fourth other content comes
    for row, seed in enumerate(order):
        (tmp_path / f"{row}.png").write_bytes(picture(seed))
    with vlmembed.stream(tmp_path, **settings | {"rows_per_part": 2}) as stream:
        table = read_all(stream)
    first = [None, None, "0.png", None, "0.png", None, None, None, None, "8.png"]
    assert table["duplicate_of"].to_pylist() == first
    assert (stream.report.num_embedded, stream.report.num_duplicates) == (7, 3)
    vectors = np.array(table["embedding"].to_pylist(), np.float32)
    np.testing.assert_allclose(vectors[[0, 2, 4, 7]], vectors[[0, 0, 0, 0]], atol=1e-6)


@pytest.mark.parametrize("seed", range(30))
def test_what_the_index_refers_to_is_in_the_store_however_far_it_runs_ahead(seed: int) -> None:
    """The index has seen all rows before the store sees the first; parts and contents are random."""
    generator = random.Random(seed)  # noqa: S311  the order of a test
    max_rows, rows_per_part = generator.randint(1, 12), generator.randint(1, 9)
    index = RecentHashes(max_rows)
    parts: list[StreamedPart] = []
    column = VectorColumn(name="embedding", width=1)
    schema = output_schema((column,), pa.schema([]))
    store = MemoryStore(schema, vectors=(column,), max_rows=max_rows, deliver=parts.append)
    refs = []
    for row in range(300):
        content = None if generator.random() < 0.1 else bytes([generator.randint(0, 20)]) * 32
        first_row = row if content is None else index.first_row(content, row)
        refs.append(ImageRef(row=row, key=f"k{row}", content_hash=content, first_row=first_row))
    for start in range(0, 300, rows_per_part):
        part = refs[start : start + rows_per_part]
        for ref in part:
            if ref.first_row < start:
                key, result = store.find(ref.first_row)
                assert (key, result.row) == (f"k{ref.first_row}", ref.first_row)
                assert refs[result.row].content_hash == ref.content_hash
        distinct = [(ref, result_of(ref)) for ref in part if ref.first_row == ref.row]
        store.remember(distinct)
    assert len(store._results) <= max_rows
    assert any(ref.first_row < ref.row for ref in refs)


def result_of(ref: ImageRef) -> Embedded | Failure:
    if ref.row % 3:
        return Failure(row=ref.row, stage="decode", code=FailureCode.CORRUPT, message="bad")
    vectors = {"embedding": np.full(1, ref.row, np.float32)}
    return Embedded(row=ref.row, vectors=vectors, size_hw=(1, 1), grid_hw=(1, 1))


def test_a_remembered_row_does_not_keep_its_whole_pack() -> None:
    store = MemoryStore(pa.schema([]), vectors=(), max_rows=2, deliver=lambda _: None)
    pack = np.zeros((1000, 8), np.float32)
    image = Embedded(row=0, vectors={"embedding": pack[3]}, size_hw=(1, 1), grid_hw=(1, 1))
    store.remember([(ImageRef(row=0, key="k", content_hash=bytes(32), first_row=0), image)])
    _, found = store.find(0)
    assert isinstance(found, Embedded)
    assert found.vectors["embedding"].base is None


def test_how_many_rows_are_remembered() -> None:
    assert num_recent(384 * 4, 256) == MAX_RECENT_BYTES // (1536 + ROW_BYTES) == 104_857
    assert num_recent(2**30, 256) == 256
