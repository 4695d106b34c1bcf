"""The content of a file on a web server that takes no ranges: one stream from its beginning, read forwards."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

from vlmembed.remote.retries import Deadline, TransientError
from vlmembed.remote.transport import translated
from vlmembed.remote.urls import shown_url
from vlmembed.remote.web_answer import check_unchanged

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vlmembed.remote.http import HttpClient
    from vlmembed.remote.web_answer import WebInfo

_NO_DEADLINE_SECONDS = 10.0 * 365 * 86_400


class WebStream:
    """Blocks of a `RemoteFile`. When the connection breaks, another one is opened and what was read passed over.

    The connection stays open as long as the file; it does not count as one of its host's, or a list of URLs of its own
    host could wait for itself.
    """

    def __init__(self, client: HttpClient, url: str, expected: WebInfo) -> None:
        self._client = client
        self._url = url
        self._expected = expected
        self._stack = ExitStack()
        self._chunks: Iterator[bytes] | None = None
        self._chunk = memoryview(b"")
        self._position = 0
        """Of the first byte of `_chunk`."""

    def read(self, position: int, num_bytes: int) -> memoryview:
        """As `Blocks` says.

        Raises:
            OSError: it lies before what was read, too.
        """
        if position < self._position:
            msg = (
                f"{shown_url(self._url)}: the server takes no ranges, so nothing can be read again (position "
                f"{position}, {self._position} is reached): download the file, or put it on another server"
            )
            raise OSError(msg)
        self._client.retries.run(lambda _: self._advance(position), timeout_seconds=_NO_DEADLINE_SECONDS)
        skipped = position - self._position
        return self._chunk[skipped : skipped + num_bytes]

    def close(self) -> None:
        """End the connection."""
        self._chunks = None
        self._stack.close()

    def _advance(self, position: int) -> None:
        """Read until the position is in the chunk, or the file ends."""
        try:
            with translated(self._url):
                while self._position + self._chunk.nbytes <= position:
                    chunks = self._chunks or self._open()
                    chunk = next(chunks, None)
                    if chunk is None:
                        self._check_end(self._position + self._chunk.nbytes)
                        self._position += self._chunk.nbytes
                        self._chunk = memoryview(b"")
                        return
                    self._position += self._chunk.nbytes
                    self._chunk = memoryview(chunk)
        except TransientError:
            self.close()
            raise

    def _open(self) -> Iterator[bytes]:
        """Begin again, and pass over what was read."""
        answer = self._stack.enter_context(
            self._client.answer("GET", self._url, {}, Deadline(_NO_DEADLINE_SECONDS), in_slot=False)
        )
        check_unchanged(self._url, self._expected, answer)
        self._chunks = answer.chunks
        self._position, self._chunk = 0, memoryview(b"")
        return answer.chunks

    def _check_end(self, num_bytes: int) -> None:
        if self._expected.num_bytes not in (None, num_bytes):
            msg = f"{shown_url(self._url)}: {num_bytes} bytes came of {self._expected.num_bytes}"
            raise TransientError(msg)
