"""Exit codes."""

from __future__ import annotations

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_TOO_MANY_ERRORS = 3
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143
