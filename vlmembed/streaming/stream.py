"""`Stream`: the record batches of a run, one after the other, without a file."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pyarrow as pa

from vlmembed.config import EncodeConfig
from vlmembed.errors import ConfigError, UsageError
from vlmembed.schema import ERRORS_SCHEMA
from vlmembed.streaming.background import BackgroundRun

if TYPE_CHECKING:
    from typing import Self

    from vlmembed.report import RunReport
    from vlmembed.streaming.recent import StreamedPart

_ENCODE = "or let vlmembed.encode write a file"
_NOT_FOR_STREAMS = {
    "output": f"a stream writes nothing: leave it out, {_ENCODE}",
    "format": f"a stream yields Arrow and writes no file: leave it out, {_ENCODE}",
    "overwrite": "a stream writes nothing that could be replaced: leave it out",
    "work_dir": "a stream has no parts on disk: leave it out",
    "retry_failed": f"a stream knows no earlier output: leave it out, {_ENCODE}",
    "engine": f"a stream comes from this machine: leave it out, {_ENCODE}",
    "ray_address": f"a stream comes from this machine: leave it out, {_ENCODE}",
    "reuse": f"earlier outputs are looked up in an index on disk: use cache, {_ENCODE}",
}


class Stream(Iterator[pa.RecordBatch]):
    """What `vlmembed.stream` returns: an iterator of record batches in input order, and a context manager.

    A batch has the rows of one part (`rows_per_part` input rows) that have vectors, in the columns of an output file;
    a part without any gives none. Threads work ahead of who iterates, by about two parts, and then wait, for days if
    need be. They end with the last batch, with `close`, with the block, and when nobody has the stream any more.

    Used by one thread at a time.
    """

    def __init__(self, run: BackgroundRun) -> None:
        assert run.schema is not None
        self._run = run
        self._schema = run.schema
        self._num_rows = run.num_rows
        self._batches: deque[pa.RecordBatch] = deque()
        self._errors: list[pa.Table] = []
        self._is_over = False
        self._finalizer = weakref.finalize(self, run.stop)
        self._finalizer.atexit = False  # the run sees to that itself

    @classmethod
    def open(cls, config: EncodeConfig) -> Self:
        """Set the run up and begin.

        Raises:
            ConfigError: a setting that is about files. UsageError, ModelError, …: as `vlmembed.encode` before its work
                begins.
        """
        _check(config)
        run = BackgroundRun(config)
        run.start()
        return cls(run)

    @property
    def schema(self) -> pa.Schema:
        """Of the batches: that of an output file, with the provenance in its metadata, but for the counts."""
        return self._schema

    @property
    def num_rows(self) -> int | None:
        """Rows of the input; None where they are counted by reading them (tars)."""
        return self._num_rows

    @property
    def errors(self) -> pa.Table:
        """The rows that failed in the parts so far: columns id, row (of the input, from 0), stage, code and message."""
        return pa.concat_tables([ERRORS_SCHEMA.empty_table(), *self._errors])

    def take_errors(self) -> pa.Table:
        """`errors`, and forget them: where many rows fail, this keeps memory from growing with them."""
        errors = self.errors
        self._errors.clear()
        return errors

    @property
    def report(self) -> RunReport:
        """What the run did; `output` and `errors` are empty.

        Raises:
            UsageError: the stream was not read to its end.
        """
        if not self._is_over or self._run.report is None:
            left = "it was closed before that" if self._is_over else "take the batches that are left"
            msg = f"there is a report once the stream has been read to its end: {left}"
            raise UsageError(msg)
        return self._run.report

    def close(self) -> None:
        """End the run and its threads, and wait for them. What was not taken is lost."""
        self._is_over = True
        self._batches.clear()
        self._finalizer.detach()
        self._run.close()

    def __next__(self) -> pa.RecordBatch:
        while not self._batches:
            if self._is_over:
                raise StopIteration
            self._take()
        return self._batches.popleft()

    def _take(self) -> None:
        try:
            part = self._run.take()
        except Exception:
            self.close()
            raise
        if part is None:
            self.close()
        else:
            self._note(part)

    def _note(self, part: StreamedPart) -> None:
        self._batches.extend(part.batches)
        if part.errors.num_rows:
            self._errors.append(part.errors)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _check(config: EncodeConfig) -> None:
    defaults = EncodeConfig(inputs=config.inputs)
    for name, why in _NOT_FOR_STREAMS.items():
        if (value := getattr(config, name)) != getattr(defaults, name):
            msg = f"{name} is {value!r}, but {why}"
            raise ConfigError(msg)
