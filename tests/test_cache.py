"""The cache gives back what was put in or nothing, whatever happens to its file, and never ends a run."""

from __future__ import annotations

import hashlib
import logging
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from vlmembed import database
from vlmembed.cache import EmbeddingCache, pack, unpack
from vlmembed.cachefile import FILE_NAME, PAGE_BYTES
from vlmembed.errors import OutputError
from vlmembed.schema import VectorColumn
from vlmembed.types import Embedded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

POOLED = (VectorColumn(name="embedding", width=48),)
HALVES = (VectorColumn(name="embedding", width=5, dtype="float16"),)
TOKENS = (
    VectorColumn(name="tokens", width=8, dtype="float16", per_token=True),
    VectorColumn(name="deepstack_0", width=4, per_token=True),
)
LARGE = 2**28


def hash_of(number: int) -> bytes:
    return hashlib.sha256(str(number).encode()).digest()


def embedded(number: int, columns: tuple[VectorColumn, ...] = POOLED) -> Embedded:
    """The one right result for content `number`: values that no other number has."""
    generator = np.random.default_rng(number)
    count = number % 7
    vectors = {
        column.name: generator.standard_normal((count, column.width) if column.per_token else column.width).astype(
            column.dtype
        )
        for column in columns
    }
    return Embedded(row=number, vectors=vectors, size_hw=(number + 1, 70_000), grid_hw=(3, number % 11))


def open_cache(
    folder: Path,
    columns: tuple[VectorColumn, ...] = POOLED,
    *,
    fingerprint: dict[str, Any] | None = None,
    max_bytes: int = LARGE,
) -> EmbeddingCache:
    fingerprint = {"weights_sha256": "ab"} if fingerprint is None else fingerprint
    return EmbeddingCache(folder, fingerprint=fingerprint, vectors=columns, max_bytes=max_bytes)


def images(numbers: Iterable[int], columns: tuple[VectorColumn, ...] = POOLED) -> list[tuple[bytes, Embedded]]:
    return [(hash_of(number), embedded(number, columns)) for number in numbers]


def same(found: Embedded, number: int, columns: tuple[VectorColumn, ...] = POOLED) -> bool:
    """Bit for bit, dtypes and shapes included."""
    right = embedded(number, columns)
    return (found.size_hw, found.grid_hw, list(found.vectors)) == (
        right.size_hw,
        right.grid_hw,
        list(right.vectors),
    ) and all(
        values.dtype == found.vectors[name].dtype
        and values.shape == found.vectors[name].shape
        and values.tobytes() == found.vectors[name].tobytes()
        for name, values in right.vectors.items()
    )


def found_in(cache: EmbeddingCache, numbers: Iterable[int], columns: tuple[VectorColumn, ...] = POOLED) -> set[int]:
    """Which of the numbers are there; each that is must be right."""
    found = set()
    for number in numbers:
        if (image := cache.find(hash_of(number), 10_000 + number)) is not None:
            assert same(image, number, columns), number
            assert image.row == 10_000 + number
            found.add(number)
    return found


def edit(folder: Path, statement: str, *values: object) -> None:
    with closing(sqlite3.connect(folder / FILE_NAME)) as connection, connection:
        assert connection.execute(statement, values).rowcount > 0


@pytest.mark.parametrize("columns", [POOLED, HALVES, TOKENS], ids=["float32", "float16", "two token columns"])
def test_what_is_put_in_comes_back_bit_for_bit(tmp_path: Path, columns: tuple[VectorColumn, ...]) -> None:
    with open_cache(tmp_path / "new" / "folder", columns) as cache:
        assert cache.find(hash_of(1), 0) is None
        cache.put(images(range(20), columns))
        assert found_in(cache, range(25), columns) == set(range(20))
        assert cache.num_found == 20
    with open_cache(tmp_path / "new" / "folder", columns) as cache:  # and in another run
        assert found_in(cache, range(25), columns) == set(range(20))
        assert cache.num_damaged == 0
        image = cache.find(hash_of(5), 3)
        assert image is not None
        assert all(values.flags.writeable for values in image.vectors.values())


def test_special_values_are_kept_as_they_are(tmp_path: Path) -> None:
    values = np.array([-0.0, 1e-45, 3.4028235e38, 1.0, 0.1], np.float32)
    image = Embedded(row=0, vectors={"embedding": values}, size_hw=(2**31 - 1, 1), grid_hw=(1, 1))
    columns = (VectorColumn(name="embedding", width=5),)
    with open_cache(tmp_path, columns) as cache:
        cache.put([(hash_of(0), image)])
        found = cache.find(hash_of(0), 0)
    assert found is not None
    assert found.vectors["embedding"].tobytes() == values.tobytes()
    assert found.size_hw == (2**31 - 1, 1)


def test_another_encoder_finds_nothing(tmp_path: Path) -> None:
    fingerprint = {"weights_sha256": "ab", "resize": {"patch_size": 14, "mode": "native"}}
    with open_cache(tmp_path, fingerprint=fingerprint) as cache:
        cache.put(images([1]))
    with open_cache(tmp_path, fingerprint={"weights_sha256": "ab"}) as cache:
        assert cache.find(hash_of(1), 0) is None
    other = {"resize": {"mode": "official", "patch_size": 14}, "weights_sha256": "ab"}
    with open_cache(tmp_path, fingerprint=other) as cache:
        assert cache.find(hash_of(1), 0) is None
        cache.put(images([2]))
    reordered = {"resize": {"mode": "native", "patch_size": 14}, "weights_sha256": "ab"}
    with open_cache(tmp_path, fingerprint=reordered) as cache:
        assert found_in(cache, [1, 2]) == {1}
        assert cache.num_damaged == 0


def test_a_large_value_is_kept(tmp_path: Path) -> None:
    columns = (VectorColumn(name="tokens", width=1024, per_token=True),)
    tokens = np.random.default_rng(0).standard_normal((3000, 1024)).astype(np.float32)
    image = Embedded(row=0, vectors={"tokens": tokens}, size_hw=(9, 9), grid_hw=(60, 50))
    with open_cache(tmp_path, columns) as cache:
        cache.put([(hash_of(0), image)])
        found = cache.find(hash_of(0), 0)
    assert found is not None
    assert np.array_equal(found.vectors["tokens"], tokens)


def test_no_changed_byte_goes_unnoticed() -> None:
    key = hash_of(3) + hash_of(4)
    value = pack(key, embedded(5, TOKENS), TOKENS)
    assert (image := unpack(key, value, TOKENS, 5)) is not None
    assert same(image, 5, TOKENS)
    for at in range(len(value)):
        for change in (1, 128, 255):
            damaged = bytearray(value)
            damaged[at] ^= change
            assert unpack(key, bytes(damaged), TOKENS, 5) is None
        assert unpack(key, value[:at], TOKENS, 5) is None
    assert unpack(hash_of(4) + hash_of(3), value, TOKENS, 5) is None
    assert unpack(key, value + b"\0", TOKENS, 5) is None


@pytest.mark.parametrize(
    "damage",
    ["cast(substr(value, 1, 60) || x'00' || substr(value, 62) as blob)", "substr(value, 1, 100)", "x''", "7", "'text'"],
)
def test_a_damaged_entry_is_computed_again_and_repaired(tmp_path: Path, damage: str) -> None:
    with open_cache(tmp_path) as cache:
        cache.put(images(range(3)))
    edit(tmp_path, f"UPDATE entries SET value = {damage} WHERE id = 2")  # noqa: S608  the test's own text
    with open_cache(tmp_path) as cache:
        assert found_in(cache, range(3)) == {0, 2}
        assert (cache.num_found, cache.num_damaged) == (2, 1)
        cache.put(images([1]))
        assert found_in(cache, range(3)) == {0, 1, 2}
    with open_cache(tmp_path) as cache:
        assert found_in(cache, range(3)) == {0, 1, 2}
        assert cache.num_damaged == 0


def test_a_damaged_entry_that_is_not_computed_again_is_dropped(tmp_path: Path) -> None:
    with open_cache(tmp_path) as cache:
        cache.put(images(range(3)))
    edit(tmp_path, "UPDATE entries SET value = x'00' WHERE id = 2")
    with open_cache(tmp_path) as cache:
        assert cache.find(hash_of(1), 0) is None
    with open_cache(tmp_path) as cache:
        assert cache.find(hash_of(1), 0) is None
        assert cache.num_damaged == 0


def test_a_value_under_another_key_is_not_taken(tmp_path: Path) -> None:
    with open_cache(tmp_path) as cache:
        cache.put(images(range(2)))
    edit(tmp_path, "UPDATE entries SET value = (SELECT value FROM entries WHERE id = 1) WHERE id = 2")
    with open_cache(tmp_path) as cache:
        assert found_in(cache, range(2)) == {0}
        assert cache.num_damaged == 1


def half(content: bytes) -> bytes:
    return content[: len(content) // 2]


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "garbage": lambda _: np.random.default_rng(0).bytes(100_000),
    "text": lambda _: b"not a database\n" * 3,
    "empty": lambda _: b"",
    "one byte": lambda content: content[:1],
    "cut in the header": lambda content: content[:50],
    "cut behind the first page": lambda content: content[:PAGE_BYTES],
    "cut in the middle": half,
    "cut at the end": lambda content: content[:-1],
    "header zeroed": lambda content: bytes(100) + content[100:],
    "schema zeroed": lambda content: content[:100] + bytes(PAGE_BYTES - 100) + content[PAGE_BYTES:],
    "all zero": lambda content: bytes(len(content)),
    "write version unknown": lambda content: content[:18] + b"\7" + content[19:],
    "read version unknown": lambda content: content[:19] + b"\7" + content[20:],
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_file_is_replaced(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    with open_cache(tmp_path) as cache:
        cache.put(images(range(300)))
    path = tmp_path / FILE_NAME
    path.write_bytes(damage(path.read_bytes()))
    with open_cache(tmp_path) as cache:
        found_in(cache, range(300))
        cache.put(images(range(300, 310)))
    with open_cache(tmp_path) as cache:
        cache.put(images(range(300, 310)))
        assert found_in(cache, range(300, 310)) == set(range(300, 310))


def test_a_file_that_is_set_aside_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / FILE_NAME).write_bytes(b"nonsense" * 1000)
    with caplog.at_level(logging.WARNING), open_cache(tmp_path) as cache:
        cache.put(images([1]))
        assert found_in(cache, [1]) == {1}
    (message,) = caplog.messages
    assert str(tmp_path / FILE_NAME) in message
    assert f"set aside as {FILE_NAME}.damaged" in message
    assert (tmp_path / f"{FILE_NAME}.damaged").read_bytes() == b"nonsense" * 1000


def test_a_database_with_other_tables_is_replaced(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / FILE_NAME)) as connection, connection:
        connection.execute("CREATE TABLE entries (name TEXT)")
    with open_cache(tmp_path) as cache:
        cache.put(images([1]))
        assert found_in(cache, [1]) == {1}
    assert (tmp_path / f"{FILE_NAME}.damaged").exists()


def corrupt(path: Path, seed: int) -> None:
    """Overwrite a few stretches anywhere, of one byte or of a page."""
    generator = random.Random(seed)  # noqa: S311  not for secrets
    with path.open("r+b") as file:
        size = path.stat().st_size
        for _ in range(generator.choice([1, 1, 2, 5])):
            length = generator.choice([1, 1, 4, 64, PAGE_BYTES])
            at = generator.randrange(size)
            if generator.random() < 0.3:  # where pages say what they hold
                at = at // PAGE_BYTES * PAGE_BYTES + generator.randrange(16)
            file.seek(at)
            file.write(generator.choice([generator.randbytes(length), bytes(length)])[: size - at])


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache of 250 small entries and 5 that have pages of their own, some of them evicted pages."""
    folder = tmp_path_factory.mktemp("filled")
    with open_cache(folder) as cache:
        cache.put(images(range(250)))
    with open_cache(folder, TOKENS) as cache:
        cache.put(images(range(250), TOKENS))
    edit(folder, "DELETE FROM entries WHERE id BETWEEN 100 AND 200")
    return folder / FILE_NAME


@pytest.mark.parametrize("block", range(4))
def test_corrupted_pages_never_give_a_wrong_vector_or_an_exception(filled: Path, tmp_path: Path, block: int) -> None:
    num_found = 0
    for seed in range(block * 8, block * 8 + 8):
        folder = tmp_path / str(seed)
        folder.mkdir()
        shutil.copy(filled, folder)
        corrupt(folder / FILE_NAME, seed)
        with open_cache(folder) as cache, open_cache(folder, TOKENS) as tokens:
            num_found += len(found_in(cache, range(250))) + len(found_in(tokens, range(0, 250, 5), TOKENS))
            cache.put(images(range(1000, 1100)))
            tokens.put(images(range(1000, 1020), TOKENS))
        with open_cache(folder) as cache:
            cache.put(images(range(1100, 1120)))
            found_in(cache, range(250))
            found_in(cache, range(1000, 1120))
    assert num_found > 500  # most damage is small


def test_damage_met_in_a_run_is_told_once_and_gone_in_the_next(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with open_cache(tmp_path) as cache:
        cache.put(images(range(500)))
    path = tmp_path / FILE_NAME
    content = path.read_bytes()
    page = content.index(embedded(400).vectors["embedding"].tobytes()) // PAGE_BYTES
    with open_cache(tmp_path) as cache, caplog.at_level(logging.WARNING):
        with path.open("r+b") as file:
            file.seek(page * PAGE_BYTES)
            file.write(b"\xff" * 100)
        found = found_in(cache, range(500))
        assert 300 < len(found) < 500
        assert cache.num_damaged == 500 - len(found)
        cache.put(images([600]))  # not written where it could spoil more
        assert cache.find(hash_of(600), 0) is None
        assert len([each for each in caplog.messages if "no longer written to" in each]) == 1
    assert "set aside" in caplog.messages[-1]
    with open_cache(tmp_path) as cache:
        cache.put(images(range(500)))
        assert found_in(cache, range(500)) == set(range(500))


def test_a_damaged_file_that_another_run_has_open_stays(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with open_cache(tmp_path) as cache:
        cache.put(images([1]))
    with open_cache(tmp_path):
        with (tmp_path / FILE_NAME).open("r+b") as file:
            file.write(bytes(PAGE_BYTES))
        with caplog.at_level(logging.WARNING), open_cache(tmp_path) as second:
            assert found_in(second, [1]) == set()
            second.put(images([2]))
        (message,) = caplog.messages
        assert "is not used (file is not a database, and another process has it open)" in message
        assert not (tmp_path / f"{FILE_NAME}.damaged").exists()
    with open_cache(tmp_path) as third:
        third.put(images([3]))
        assert found_in(third, [3]) == {3}


def other_process(script: str, folder: Path, number: int) -> subprocess.Popen[str]:
    """Runs `script` with `folder` and `number`, and says "ready" first; each `read()` there waits for a `go`."""
    opening = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from pathlib import Path
from test_cache import found_in, images, open_cache
folder, number, read = Path(sys.argv[1]), int(sys.argv[2]), sys.stdin.readline
print("ready", flush=True)
read()
"""
    return subprocess.Popen(
        [sys.executable, "-c", opening + script, str(folder), str(number)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def go(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


WRITE_FOREVER = """
with open_cache(folder) as cache:
    print("open", flush=True)
    for start in range(number, number + 10**6, 50):
        cache.put(images(range(start, start + 50)))
"""


def test_a_killed_writer_leaves_whole_entries(tmp_path: Path) -> None:
    generator = random.Random(1)  # noqa: S311  not for secrets
    known: set[int] = set()
    starts = range(0, 40_000, 10_000)
    processes = [other_process(WRITE_FOREVER, tmp_path, first) for first in starts]  # they load while others write
    for first, process in zip(starts, processes, strict=True):
        assert line_of(process) == "ready"
        go(process)
        assert line_of(process) == "open"
        time.sleep(generator.uniform(0.02, 0.3))
        process.kill()
        process.communicate(timeout=60)
        assert process.returncode == -signal.SIGKILL
        with open_cache(tmp_path) as cache:
            found = found_in(cache, range(first, first + 3000))
            assert found == set(range(first, first + len(found)))  # whole puts, in order
            assert len(found) % 50 == 0
            assert found_in(cache, known) == known
            assert cache.num_damaged == 0
        known |= found
    assert len(known) > 100
    assert not (tmp_path / f"{FILE_NAME}.damaged").exists()


WRITE_AND_READ = """
with open_cache(folder) as cache:
    for start in range(0, 400, 20):
        cache.put(images(range(number + start, number + start + 20)))
        found_in(cache, range(400 - number + start, 400 - number + start + 20))
    print("written", flush=True)
    read()
    print(len(found_in(cache, range(800))), cache.num_damaged, flush=True)
"""


def test_two_processes_share_it(tmp_path: Path) -> None:
    processes = [other_process(WRITE_AND_READ, tmp_path, first) for first in (0, 400)]
    for expected in ("ready", "written"):
        assert [line_of(process) for process in processes] == [expected] * 2
        for process in processes:
            go(process)
    for process in processes:
        out, errors = process.communicate(timeout=60)
        assert (out, errors, process.returncode) == ("800 0\n", "", 0)


def test_reading_goes_on_while_another_thread_writes(tmp_path: Path) -> None:
    with open_cache(tmp_path) as cache:
        cache.put(images(range(100)))

        def write() -> None:
            for start in range(100, 2000, 50):
                cache.put(images(range(start, start + 50)))

        writer = threading.Thread(target=write)
        writer.start()
        while writer.is_alive():
            assert found_in(cache, range(100)) == set(range(100))
        writer.join()
        assert found_in(cache, range(2000)) == set(range(2000))
        assert cache.num_damaged == 0


WIDE = (VectorColumn(name="embedding", width=1000),)
MIB = 2**20


def wide(numbers: Iterable[int]) -> list[tuple[bytes, Embedded]]:
    return images(numbers, WIDE)


def files_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def test_a_full_cache_drops_what_was_not_used_for_longest(tmp_path: Path) -> None:
    with open_cache(tmp_path, WIDE, max_bytes=4 * MIB) as cache:
        largest = 0
        for number in range(0, 600, 20):
            cache.put(wide(range(number, number + 20)))
            assert cache.find(hash_of(7), 0) is not None  # used all the time
            largest = max(largest, files_bytes(tmp_path) - (tmp_path / f"{FILE_NAME}-shm").stat().st_size)
        assert largest < 4.2 * MIB
        found = sorted(found_in(cache, range(8, 600), WIDE))
        assert found == list(range(found[0], 600))  # the latest, without a gap
        assert 400 < len(found) < 700
        for number in range(600, 1600, 100):
            cache.put(wide(range(number, number + 100)))
            assert cache.find(hash_of(7), 0) is not None
    assert files_bytes(tmp_path) < 3.1 * MIB


def test_uses_of_an_earlier_run_count(tmp_path: Path) -> None:
    with open_cache(tmp_path, WIDE, max_bytes=4 * MIB) as cache:
        cache.put(wide(range(500)))
    with open_cache(tmp_path, WIDE, max_bytes=4 * MIB) as cache:
        assert found_in(cache, range(50), WIDE) == set(range(50))  # nothing is put: the uses are written at the end
    with open_cache(tmp_path, WIDE, max_bytes=4 * MIB) as cache:
        cache.put(wide(range(500, 800)))
        assert found_in(cache, range(50), WIDE) == set(range(50))
        assert found_in(cache, range(50, 200), WIDE) == set()


def test_hits_cost_no_write_while_there_is_room(tmp_path: Path) -> None:
    with open_cache(tmp_path) as cache:
        cache.put(images(range(100)))
    before = (tmp_path / FILE_NAME).read_bytes()
    with open_cache(tmp_path) as cache:
        assert found_in(cache, range(100)) == set(range(100))
        cache.put(images(range(100)))
    assert (tmp_path / FILE_NAME).read_bytes() == before


def test_a_lowered_cap_shrinks_the_file(tmp_path: Path) -> None:
    with open_cache(tmp_path, WIDE) as cache:
        cache.put(wide(range(1000)))
    assert files_bytes(tmp_path) > 4 * MIB
    with open_cache(tmp_path, WIDE, max_bytes=2 * MIB):
        pass
    assert files_bytes(tmp_path) < 2 * MIB
    with open_cache(tmp_path, WIDE) as cache:
        found = sorted(found_in(cache, range(1000), WIDE))
        assert found == list(range(found[0], 1000))
        assert 250 < len(found) < 500


def test_a_value_larger_than_the_cap_is_not_stored(tmp_path: Path) -> None:
    huge = Embedded(row=0, vectors={"embedding": np.ones(10**6, np.float32)}, size_hw=(1, 1), grid_hw=(1, 1))
    columns = (VectorColumn(name="embedding", width=10**6),)
    with open_cache(tmp_path, WIDE, max_bytes=3 * MIB) as cache:
        cache.put(wide(range(10)))
    with open_cache(tmp_path, columns, max_bytes=3 * MIB) as cache:
        cache.put([(hash_of(99), huge)])
        assert cache.find(hash_of(99), 0) is None
    with open_cache(tmp_path, WIDE, max_bytes=3 * MIB) as cache:
        assert found_in(cache, range(10), WIDE) == set(range(10))
    with open_cache(tmp_path / "one", WIDE, max_bytes=1) as cache:
        cache.put(wide(range(10)))
        assert found_in(cache, range(10), WIDE) == set()


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/vlmembed")):
        with pytest.raises(OutputError, match=rf"cannot write to {folder} \(.*make it a writable folder, or name"):
            open_cache(folder)
    (tmp_path / "odd" / FILE_NAME).mkdir(parents=True)
    with pytest.raises(OutputError, match="unable to open database file"):
        open_cache(tmp_path / "odd")


def test_a_read_only_folder_is_refused() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        open_cache(folder).close()
        folder.chmod(0o555)
        (folder / "lock").chmod(0o666)
        before = os.geteuid()
        try:
            if before == 0:  # root may write anywhere
                os.seteuid(65534)
            with pytest.raises(OutputError, match="make it a writable folder"):
                open_cache(folder)
        finally:
            os.seteuid(before)
            folder.chmod(0o755)


def test_a_full_disk_stops_the_writing_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with open_cache(tmp_path) as cache:
        cache.put(images(range(100)))
        pages = cache._file.database.writer.execute("PRAGMA page_count").fetchone()[0]  # type: ignore[union-attr]
        cache._file.database.writer.execute(f"PRAGMA max_page_count = {pages + 1}")  # type: ignore[union-attr]
        with caplog.at_level(logging.WARNING):
            cache.put(images(range(100, 1000)))
            cache.put(images(range(1000, 2000)))
        (message,) = caplog.messages
        assert "no longer written to (database or disk is full): free disk space" in message
        assert found_in(cache, range(2000)) == set(range(100))  # whole transactions or nothing
    with open_cache(tmp_path) as cache:
        assert found_in(cache, range(2000)) == set(range(100))
        cache.put(images(range(100, 200)))
        assert found_in(cache, range(2000)) == set(range(200))


def test_a_process_that_holds_it_too_long_stops_the_writing_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "BUSY_SECONDS", 0.1)
    with open_cache(tmp_path) as cache:
        cache.put(images([1]))
        with closing(sqlite3.connect(tmp_path / FILE_NAME, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            with caplog.at_level(logging.WARNING):
                cache.put(images([2]))
                cache.put(images([3]))
            other.execute("ROLLBACK")
        (message,) = caplog.messages
        assert "no longer written to (database is locked): another process has held it" in message
        assert found_in(cache, [1, 2, 3]) == {1}


def test_an_error_of_the_disk_switches_reading_off(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    failure = sqlite3.OperationalError("disk I/O error")
    failure.sqlite_errorcode = sqlite3.SQLITE_IOERR_READ
    calls = []

    def fail(key: bytes) -> None:
        calls.append(key)
        raise failure

    with open_cache(tmp_path) as cache:
        cache.put(images([1]))
        monkeypatch.setattr(cache._file, "find", fail)
        with caplog.at_level(logging.WARNING):
            assert cache.find(hash_of(1), 0) is None
            assert cache.find(hash_of(1), 0) is None
        (message,) = caplog.messages
        assert "no longer read (disk I/O error): name another folder, on a sound local disk" in message
        assert len(calls) == 1
        cache.put(images([2]))
    with open_cache(tmp_path) as cache:
        assert found_in(cache, [1, 2]) == {1, 2}


def test_an_exception_of_the_caller_leaves_nothing_half_done(tmp_path: Path) -> None:
    def broken() -> Iterable[tuple[bytes, Embedded]]:
        yield from images(range(3))
        msg = "the caller's own"
        raise RuntimeError(msg)

    with open_cache(tmp_path) as cache:
        with pytest.raises(RuntimeError, match="the caller's own"):
            cache.put(broken())
        cache.put(images([5]))
        assert found_in(cache, range(10)) == {5}


def test_it_can_be_closed_twice_and_is_silent_then(tmp_path: Path) -> None:
    cache = open_cache(tmp_path)
    cache.put(images([1]))
    cache.close()
    cache.close()
    cache.put(images([2]))
    assert cache.find(hash_of(1), 0) is None


def test_a_file_that_may_not_be_written_is_not_set_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with open_cache(tmp_path) as cache:
        cache.put(images(range(3)))
    before = (tmp_path / FILE_NAME).read_bytes()

    def refuse(_: database.SharedDatabase) -> None:
        error = sqlite3.OperationalError("attempt to write a readonly database")
        error.sqlite_errorcode = sqlite3.SQLITE_READONLY
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(database.SharedDatabase, "_connect", refuse)
        patch.setattr("os.access", lambda *_: False)
        with open_cache(tmp_path) as cache:
            assert found_in(cache, range(3)) == set()
            cache.put(images([7]))
    assert "make it writable" in caplog.text
    assert (tmp_path / FILE_NAME).read_bytes() == before
    with open_cache(tmp_path) as cache:
        assert found_in(cache, range(3)) == {0, 1, 2}
