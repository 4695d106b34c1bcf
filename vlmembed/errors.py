"""The exception tree, and the codes that a failed row can carry.

A bad image is a row with a code; a bad setting is an exception.

    VlmembedError
    ├── UsageError              the command or its inputs must be changed      (exit code 2)
    │   ├── ConfigError         a setting is out of range, or two contradict
    │   ├── InputError          an input is absent, empty or ambiguous
    │   └── OutputError         the output exists, or belongs to another run
    ├── RunError                the run could not go on                        (exit code 1)
    │   ├── ModelError          no weights, an unknown tower, a bad checkpoint
    │   ├── MissingExtraError   an optional package is not installed
    │   ├── DeviceError         a device reported an error other than a lack of memory
    │   ├── WorkerError         no worker process is left, or none can take a pack
    │   ├── ClusterError        no cluster at the address, too little in it, or a node that cannot take part
    │   ├── StorageError        a file of the run could not be written, or is not what was written
    │   ├── StalledError        nothing moved for so long that the run was given up
    │   ├── RowFailedError      ``on_error="fail"`` met a failed row
    │   ├── NothingEmbeddedError  the run ended without a single embedding
    │   └── AccountingError     rows read != embedded + duplicates + failed
    ├── ImageError              one image failed; becomes a `Failure`, never reaches the caller
    └── StoppedError            another stage ended the run; never reaches the caller
"""

from __future__ import annotations

from enum import StrEnum


class FailureCode(StrEnum):
    """Why a row has no embedding. The values are part of the output format."""

    MISSING = "missing"
    EMPTY = "empty"
    UNSUPPORTED_FORMAT = "unsupported_format"
    TRUNCATED = "truncated"
    CORRUPT = "corrupt"
    TOO_LARGE = "too_large"
    ASPECT_RATIO = "aspect_ratio"
    OUT_OF_MEMORY = "out_of_memory"
    TIMEOUT = "timeout"
    DECODER_CRASH = "decoder_crash"
    NON_FINITE = "non_finite"
    UNREADABLE = "unreadable"
    FETCH_FAILED = "fetch_failed"
    NULL = "null"


class VlmembedError(Exception):
    """Base of everything that vlmembed raises on purpose."""


class UsageError(VlmembedError):
    """The command, its settings or its inputs must be changed before a run can start."""


class ConfigError(UsageError):
    """A setting is out of range, or two settings contradict each other."""


class InputError(UsageError):
    """An input does not exist, holds nothing to embed, or is ambiguous."""


class OutputError(UsageError):
    """The output already exists, or holds the parts of a different run."""


class RunError(VlmembedError):
    """A run that could not start or could not go on."""


class ModelError(RunError):
    """The model's weights are absent, of an unknown kind, or do not fit its config."""


class MissingExtraError(RunError):
    """An optional package is not installed; the message holds the command that installs it."""


class DeviceError(RunError):
    """A device reported an error; what it computes from then on cannot be trusted."""


class WorkerError(RunError):
    """No worker process is left, or a pack has ended several of them."""


class ClusterError(RunError):
    """There is no cluster, it has too little, one of its nodes cannot take part, or its work failed for good."""


class StorageError(RunError):
    """A file of the run could not be written, or does not hold what was written into it."""


class StalledError(RunError):
    """Nothing moved for so long that the run was given up."""


class RowFailedError(RunError):
    """A row failed while ``on_error`` is ``"fail"``."""


class NothingEmbeddedError(RunError):
    """The run read its whole input and not one row has an embedding."""


class AccountingError(RunError):
    """Rows were lost or counted twice: a bug in vlmembed, never in the data."""


class ImageError(VlmembedError):
    """One image could not be turned into patches.

    Attributes:
        code: the `FailureCode` that its row will carry.
    """

    def __init__(self, code: FailureCode, message: str) -> None:
        super().__init__(message)
        self.code = code

    def __reduce__(self) -> tuple[type[ImageError], tuple[FailureCode, str]]:
        """How it is pickled: exceptions are made anew from their message alone otherwise."""
        return type(self), (self.code, str(self))


class StoppedError(VlmembedError):
    """Raised in a stage that waits on a queue when the run is over for another reason."""
