"""The local folder in which a run with a remote output works, and what it knows of the files there."""

from __future__ import annotations

import json
import os
import secrets
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from vlmembed.atomic import atomic, remove
from vlmembed.errors import OutputError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

STATE = "mirror.json"
FILES = "mirror-files.jsonl"


class WorkFolder:
    """A folder of this process; the files in it have the names that their objects have below `url`.

    It remembers which of a finished output's files lie on the remote side just as they lie here: those that were
    downloaded, and those that were uploaded since. A file that was written since is neither.

    Attributes:
        token: of this folder's runs, through all their starts.
    """

    def __init__(self, folder: Path, url: str) -> None:
        """Make the folder, or take over what an earlier start has left in it.

        Raises:
            OutputError: another process of this machine works there, or the folder cannot be written.
        """
        self._folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # beside the folder, which is removed while it is held
            self._lock = FileLock(folder.with_name(f"{folder.name}.lock"), timeout=0)
            self._lock.acquire()
        except Timeout as error:
            msg = f"another process is writing to {url}: wait for it, or choose another output"
            raise OutputError(msg) from error
        except OSError as error:
            msg = f"cannot write to {folder} ({error}): make the folder writable, or name another with --work-dir"
            raise OutputError(msg) from error
        self._state = self._read_state()
        self.token: str = self._state.setdefault("token", secrets.token_hex(16))
        self._files: dict[str, tuple[str, list[int]]] = {}
        for name, how, identity in self._read_lines():
            self._files[name] = how, identity

    def _read_state(self) -> dict[str, Any]:
        try:
            state = json.loads((self._folder / STATE).read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            return {}
        return state if isinstance(state, dict) else {}

    def _read_lines(self) -> Iterator[tuple[str, str, list[int]]]:
        """What earlier starts have noted. A line that was cut when one of them ended is passed over: what it told of is
        not known to be there, and is uploaded again."""
        try:
            content = (self._folder / FILES).read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return
        for line in content.split("\n"):
            with suppress(ValueError, KeyError, TypeError):  # no JSON; JSON of something else
                found = json.loads(line)
                yield str(found["name"]), str(found["how"]), list(found["identity"])

    def path(self, name: str) -> Path:
        """Where the file of an object is."""
        return self._folder / name

    def name_of(self, path: Path) -> str:
        """The object of a file."""
        return path.relative_to(self._folder).as_posix()

    @property
    def base(self) -> list[int] | None:
        """Identity of the finished output that lay there when the run began."""
        return self._state.get("base")

    @property
    def run(self) -> str | None:
        """Which run's parts are, or were, in the partial folder."""
        return self._state.get("run")

    @property
    def is_fetching(self) -> bool:
        """A finished output is being downloaded, or its download was cut."""
        return bool(self._state.get("is_fetching"))

    def remember(self, **facts: Any) -> None:  # noqa: ANN401  JSON
        """Keep facts over a restart: `base`, `run`, `is_fetching`."""
        self._state |= facts
        with atomic(self._folder / STATE) as path:
            path.write_text(json.dumps(self._state), encoding="utf-8")

    def note(self, name: str, how: str) -> None:
        """A file is the same here and there, because it was ``"fetched"`` or ``"uploaded"``."""
        self._files[name] = how, _identity(self.path(name))
        self._append([name])

    def _append(self, names: Iterable[str]) -> None:
        with (self._folder / FILES).open("a+b") as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":  # the last line was cut
                    file.write(b"\n")
            for name in names:
                how, identity = self._files[name]
                line = json.dumps({"name": name, "how": how, "identity": identity}) + "\n"
                file.write(line.encode())

    def is_fetched(self, name: str) -> bool:
        """Whether a file is as it was downloaded."""
        return self._is_noted(name, ("fetched",))

    def is_there(self, name: str) -> bool:
        """Whether the remote side has a file as it is here."""
        return self._is_noted(name, ("fetched", "uploaded"))

    def _is_noted(self, name: str, ways: tuple[str, ...]) -> bool:
        how, identity = self._files.get(name, ("", []))
        return how in ways and self.path(name).exists() and _identity(self.path(name)) == identity

    def forget_uploads(self) -> None:
        """Others may have written there since."""
        self._files = {name: entry for name, entry in self._files.items() if entry[0] == "fetched"}
        (self._folder / FILES).unlink(missing_ok=True)
        self._append(self._files)

    def remove(self, names: Iterable[str]) -> None:
        """Delete files."""
        for name in names:
            self.path(name).unlink(missing_ok=True)

    def drop(self) -> None:
        """Remove all that is in the folder, and what is known of it."""
        for path in self._folder.iterdir():
            remove(path)
        self._state = {"token": self.token}
        self._files = {}

    def close(self) -> None:
        """Let another process work here; a folder with nothing in it goes."""
        with suppress(OSError):
            self._folder.rmdir()
        self._lock.release()


def default_folder() -> Path:
    """Where working folders are if nobody says otherwise: ``$XDG_CACHE_HOME/vlmembed/runs``, by default below
    ``~/.cache``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vlmembed" / "runs"


def _identity(path: Path) -> list[int]:
    found = path.stat()
    return [found.st_size, found.st_mtime_ns, found.st_ino]
