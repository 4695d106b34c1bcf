"""An SQLite file that processes share: opened, locked, and set aside where it is damaged.

SQLite and not LMDB: a damaged or cut file is an exception there and not a SIGBUS (no page of it is mapped), no size of
a map has to be chosen, a process may open it twice, and it is in the standard library. Readers do not wait for the
writer (WAL). All processes must be on one machine, and the folder on a local disk: WAL shares memory between them, and
locks on network file systems are not to be trusted.
"""

from __future__ import annotations

import fcntl
import logging
import os
import sqlite3
import time
from contextlib import ExitStack, closing, contextmanager, suppress
from typing import TYPE_CHECKING

from vlmembed.errors import OutputError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

logger = logging.getLogger(__name__)

BUSY_SECONDS = 10.0
"""How long another process is waited for."""

_PRAGMAS = (
    "journal_mode = WAL",  # readers do not wait for the writer
    "synchronous = NORMAL",  # a power cut costs the last entries, not the file
    "mmap_size = 0",  # to read a file that was cut must not be a SIGBUS
    "cell_size_check = ON",  # damage shows when a page is read
)

_REMEDIES = {
    sqlite3.SQLITE_FULL: "free disk space, or name another folder",
    sqlite3.SQLITE_BUSY: f"another process has held it for {BUSY_SECONDS:g} s: end it, or name another folder",
    sqlite3.SQLITE_READONLY: "make it writable, or name another folder",
}
_SURROUNDINGS = {
    *_REMEDIES,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_NOLFS,
    sqlite3.SQLITE_NOMEM,
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_PROTOCOL,
}
"""Errors that are not the file's own; every other one means that it is damaged."""


def _code(error: BaseException) -> int:
    """SQLite's primary result code; -1 for an error that has none."""
    code = getattr(error, "sqlite_errorcode", -1)
    return sqlite3.SQLITE_CORRUPT if code == sqlite3.SQLITE_IOERR_SHORT_READ else code & 0xFF if code >= 0 else code


def is_damage(error: BaseException) -> bool:
    """Whether the database itself is at fault, and not what surrounds it."""
    return isinstance(error, sqlite3.Error) and _code(error) not in _SURROUNDINGS


def remedy_for(error: BaseException) -> str:
    """What to do about an error that is not the file's own."""
    return _REMEDIES.get(_code(error), "name another folder, on a sound local disk")


def open_scratch(path: Path, table: str) -> sqlite3.Connection:
    """A new database at `path` with one table, for one thread at a time. It is made again whenever it is needed, so
    nothing is synchronised to disk."""
    path.unlink(missing_ok=True)
    database = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
    for statement in ("PRAGMA journal_mode = OFF", "PRAGMA synchronous = OFF", table, "BEGIN"):
        database.execute(statement)
    return database


class SharedDatabase:
    """The file at `path`, made where it is not there, with one connection to read and one to write.

    `layout` are pragmas for a new file, `pragmas` for every connection; `schema` is a script that makes the
    tables and fails where the file is not sound, or cannot be written to.

    Attributes:
        reader, writer: each for one thread at a time, in autocommit mode. What they return of a damaged file can be of
            any type.
        is_malformed: set by whoever meets damage; the file is then set aside when it is closed.

    Raises:
        OutputError: the folder cannot be made or written to.
        sqlite3.Error: the file cannot be used for now. (A damaged one was set aside, and a new one started.)
    """

    def __init__(self, path: Path, *, layout: Sequence[str], pragmas: Sequence[str], schema: str) -> None:
        self._path, self._layout, self._schema = path, layout, schema
        self._pragmas = (*pragmas, *_PRAGMAS)
        self.is_malformed = False
        with ExitStack() as stack:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                self._lock = os.open(path.with_name("lock"), os.O_RDWR | os.O_CREAT, 0o666)
                stack.callback(os.close, self._lock)
                self._open()
            except (OSError, sqlite3.Error) as error:
                if isinstance(error, sqlite3.Error) and _code(error) != sqlite3.SQLITE_CANTOPEN:
                    raise
                msg = f"cannot write to {path.parent} ({error}): make it a writable folder, or name another one"
                raise OutputError(msg) from error
            self._exit = stack.pop_all()

    def _open(self) -> None:
        alone = self._take_lock(fcntl.LOCK_EX, seconds=0)
        if not alone and not self._take_lock(fcntl.LOCK_SH, seconds=BUSY_SECONDS):
            msg = f"another process has been opening it for {BUSY_SECONDS:g} s"
            raise sqlite3.OperationalError(msg)
        try:
            self._connect()
        except sqlite3.Error as error:
            is_odd = _code(error) == sqlite3.SQLITE_READONLY and os.access(self._path, os.W_OK)  # of a later SQLite
            if not is_damage(error) and not is_odd:
                raise
            if not alone:
                msg = f"{error}, and another process has it open"
                raise sqlite3.DatabaseError(msg) from error
            self._set_aside(error)
            self._connect()
        if alone:
            self._take_lock(fcntl.LOCK_SH, seconds=BUSY_SECONDS)

    def _take_lock(self, kind: int, *, seconds: float) -> bool:
        """Whoever has the database open holds a shared lock. Who sets it aside holds an exclusive one: SQLite loses
        data where a file is renamed that is in use."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                fcntl.flock(self._lock, kind | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    return False
                time.sleep(0.02)
            else:
                return True

    def _connect(self) -> None:
        with ExitStack() as stack:
            self.reader, self.writer = (stack.enter_context(closing(self._connection())) for _ in range(2))
            self._connections = stack.pop_all()

    def _connection(self) -> sqlite3.Connection:
        with ExitStack() as stack:
            connection = sqlite3.connect(
                self._path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False
            )
            stack.callback(connection.close)
            connection.text_factory = bytes  # what damage makes text of need not be Unicode
            is_new = not connection.execute("PRAGMA page_count").fetchone()[0]
            for pragma in (*self._layout, *self._pragmas) if is_new else self._pragmas:
                connection.execute(f"PRAGMA {pragma}").fetchall()
            connection.executescript(self._schema)
            stack.pop_all()
        return connection

    def _set_aside(self, reason: object) -> None:
        aside = self._path.with_name(f"{self._path.name}.damaged")
        for suffix in ("", "-wal", "-shm"):  # the file first: SQLite drops a log that stands beside no file
            source, target = (path.with_name(path.name + suffix) for path in (self._path, aside))
            target.unlink(missing_ok=True)
            if source.exists():
                source.replace(target)
        logger.error("%s is damaged (%s): set aside as %s, which can be deleted", self._path, reason, aside.name)

    @property
    def log_bytes(self) -> int:
        """Size of the write-ahead log."""
        try:
            return self._path.with_name(f"{self._path.name}-wal").stat().st_size
        except OSError:
            return 0

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """What the writer does in the block lasts whole or not at all."""
        self.writer.execute("BEGIN IMMEDIATE")
        try:
            yield
            self.writer.execute("COMMIT")
        except BaseException:
            if self.writer.in_transaction:  # some errors have ended it already
                with suppress(sqlite3.Error):
                    self.writer.execute("ROLLBACK")
            raise

    def close(self) -> None:
        """Let go of the file. A malformed one is set aside, unless another process has it open."""
        with self._exit:
            with suppress(sqlite3.Error):
                self._connections.close()
            if self.is_malformed and self._take_lock(fcntl.LOCK_EX, seconds=0):
                with suppress(OSError):
                    self._set_aside("as was reported")
