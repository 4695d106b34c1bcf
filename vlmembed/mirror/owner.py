"""Which process writes to a remote output: an object with its token, since object stores have no locks.

pyarrow cannot say "write this only if nothing is there", so two processes that begin within the same moment can both
believe that they are the one. Each looks again before everything that it makes count, and the one whose token was
written over stops there. What is left is the time between that look and the write behind it: a fraction of a second, in
which a part of the loser may be written. That does no harm: a part names the run that it is of, and counts in no other.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

from vlmembed.errors import OutputError

if TYPE_CHECKING:
    from vlmembed.mirror.objects import Objects

logger = logging.getLogger(__name__)

RENEW_SECONDS = 60.0
STALE_SECONDS = 600.0
"""A process renews its token this often. One that has not for so long is taken for dead; the clocks of the machine and
of the store may be minutes apart."""


class Owner:
    """The claim of one process, by its `token`, to the output whose object for it is `name`.

    A process that was killed leaves its token; another one with the same token, of the same working folder, goes on at
    once, others when it is stale.
    """

    def __init__(self, objects: Objects, name: str, token: str) -> None:
        self._objects = objects
        self._name = name
        self._token = token
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._is_held = False

    def check_free(self) -> None:
        """Look whether another process is at it.

        Raises:
            OutputError: it is.
        """
        found = self._read()
        if found is None or found.get("token") == self._token:
            return
        info = self._objects.info(self._name)
        age_seconds = 0.0 if info is None else time.time() - info.mtime_seconds
        if info is not None and age_seconds < STALE_SECONDS:
            raise self._taken(found, f"wrote last {age_seconds:.0f} s ago")

    def claim(self) -> bool:
        """Become the one that writes, and stay it until `release`; tells whether nobody else was it since this token
        was.

        Raises:
            OutputError: another process is.
        """
        if self._is_held:
            self.check()
            return True
        self.check_free()
        before = self._read()
        self._write()
        self._is_held = True
        self.check()
        self._over.clear()
        self._thread = threading.Thread(target=self._keep_renewing, name="owner", daemon=True)
        self._thread.start()
        return before is not None and before.get("token") == self._token

    def check(self) -> None:
        """Look whether this process is still the one.

        Raises:
            OutputError: another has taken over.
        """
        found = self._read()
        if found is None:  # somebody has tidied up
            self._write()
        elif found.get("token") != self._token:
            self._is_held = False
            raise self._taken(found, "has taken over")

    def release(self) -> None:
        """Let others write at once."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()
        if not self._is_held:
            return
        self._is_held = False
        found = self._read()
        if found is not None and found.get("token") == self._token:
            self._objects.delete(self._name)

    def _keep_renewing(self) -> None:
        while not self._over.wait(RENEW_SECONDS):
            try:
                self.check()
                self._write()
            except OutputError:
                return  # the next look before a write says so
            except OSError as error:
                logger.warning("%s could not be renewed: %s", self._objects.url(self._name), error)

    def _read(self) -> dict[str, Any] | None:
        content = self._objects.read(self._name)
        if content is None:
            return None
        try:
            found = json.loads(content)
        except ValueError:
            return None
        return found if isinstance(found, dict) else None

    def _write(self) -> None:
        written = {"token": self._token, "host": socket.gethostname(), "pid": os.getpid()}
        self._objects.put(self._name, json.dumps(written).encode())

    def _taken(self, found: dict[str, Any], doing: str) -> OutputError:
        who = f"process {found.get('pid', '?')} on {found.get('host', 'an unknown machine')}"
        url = self._objects.url(self._name)
        return OutputError(
            f"another process is writing to {url.rpartition('/')[0]} ({who} {doing}): wait for it, or choose another "
            f"output; if it is dead, it counts as such {STALE_SECONDS / 60:.0f} minutes after its last sign, or as "
            f"soon as {url} is deleted"
        )
