"""The outputs of a run's shards: each is whole, and together they are the whole run."""

from __future__ import annotations

import json
import os
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from vlmembed.config import EncodeConfig
from vlmembed.errors import InputError
from vlmembed.finished import FinishedOutput, reading
from vlmembed.output import LANCE, PUBLICATION, OutputPaths, errors_beside, is_folder_output
from vlmembed.provenance import FOLLOWS_SHARD
from vlmembed.schema import VECTORS, read_provenance
from vlmembed.shards import parse_shard, shard_text

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Self

    from vlmembed.types import Int64Array

_ERRORS = ".errors.parquet"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ShardOutput:
    """What the run of one shard has left.

    Attributes:
        path: as it was named. files: the Parquet files with its rows, in order; none where no row was embedded.
        errors: the file of the rows that failed. failed: int64, their rows in the shard, ascending.
        schema: of the files, or None. provenance: as recorded.
        index, count: which shard of how many.
    """

    path: Path
    files: tuple[Path, ...]
    errors: Path
    failed: Int64Array
    schema: pa.Schema | None
    provenance: dict[str, Any]
    index: int
    count: int

    @classmethod
    def open(cls, path: Path) -> Self:
        """Look at an output, or at the errors file that a run in which nothing was embedded has left.

        Raises:
            InputError: it cannot be read, is not whole, or is no shard.
        """
        paths = OutputPaths(output=path, is_folder=is_folder_output(path))
        if (paths.partial / PUBLICATION).exists() or (paths.partial.exists() and not path.exists()):
            msg = f"{path} is not finished: give the command that writes it once more, then merge"
            raise InputError(msg)
        output = _open_errors(path) if not path.exists() and paths.errors.exists() else FinishedOutput.open(path)
        facts = output.provenance
        if "shard" not in facts["fingerprint"]:
            msg = f"{path} is no shard: only outputs of --shard i/n can be merged, each once, and not what was merged"
            raise InputError(msg)
        index, count = parse_shard(facts["fingerprint"]["shard"])
        shard = cls(
            path=path,
            files=output.files,
            errors=output.errors,
            failed=output.failed_rows(),
            schema=output.schema.remove_metadata() if output.files else None,
            provenance=facts,
            index=index,
            count=count,
        )
        shard._check(output.num_rows)
        return shard

    def _check(self, num_found: int) -> None:
        """Do the files hold what the run has counted?"""
        counts, num_failed = self.counts, len(self.failed)
        with reading(self.errors):
            beside = read_provenance(pq.read_schema(self.errors), str(self.errors))
        problem = ""
        if num_found != self.num_rows:
            problem = f"{self.path} holds {num_found} rows, and its run wrote {self.num_rows}"
        elif num_failed != counts["failed"] or beside.get("counts") != counts:
            problem = f"{self.errors} holds {num_failed} rows of its own run, and {self.path} was written with "
            problem += f"{counts['failed']}: they do not belong together"
        elif num_failed and not 0 <= self.failed[0] <= self.failed[-1] < counts["rows"]:
            problem = f"{self.errors} names rows {self.failed[0]} to {self.failed[-1]} of {counts['rows']}"
        if problem or self.num_rows + num_failed != counts["rows"]:
            problem = problem or f"{self.path} has {self.num_rows} + {num_failed} failed rows of {counts['rows']}"
            msg = f"{problem}; put the files of its run back, or make it again with --overwrite"
            raise InputError(msg)

    @property
    def counts(self) -> dict[str, Any]:
        """Rows of the input by what became of them."""
        counts: dict[str, Any] = self.provenance["counts"]
        return counts

    @property
    def num_rows(self) -> int:
        """Rows with vectors."""
        return int(self.counts["embedded"] + self.counts["duplicates"])

    @property
    def whole(self) -> dict[str, Any]:
        """What the fingerprint of the whole run has in place of the shard's own entries."""
        whole: dict[str, Any] = self.provenance["fingerprint"]["whole"]
        return whole


def _open_errors(path: Path) -> FinishedOutput:
    """An output that is not there, since nothing was embedded: only the errors file that lies where it would.

    Raises:
        InputError: it should be there.
    """
    errors = errors_beside(path, is_folder=False)
    with reading(errors):
        facts = read_provenance(pq.read_schema(errors), str(errors))
    counts = facts.get("counts", {})
    if counts.get("embedded", 1):
        msg = f"{path} is gone, and {errors} says that it holds embeddings: put it back, or make it again"
        raise InputError(msg)
    return FinishedOutput(path=path, files=(), errors=errors, schema=pa.schema([]), provenance=facts)


def open_shards(names: Sequence[str | os.PathLike[str]]) -> list[ShardOutput]:
    """The shards of one run, by index; their order does not matter, nor that a pattern also matched their errors files.

    Raises:
        InputError: one cannot be read, they are not of one run, or not all of its shards.
    """
    if not names:
        msg = "no shards given: name the outputs of all --shard i/n runs"
        raise InputError(msg)
    paths = [Path(name) for name in names]
    for path in (path for path in list(paths) if _is_errors_file(path)):
        paths.remove(path)
        outputs = [path.with_name(path.name.removesuffix(_ERRORS) + ending) for ending in (".parquet", LANCE)]
        if not any(_same_place(output, each) for output in outputs for each in paths):
            paths.append(outputs[1] if outputs[1].exists() else outputs[0])
    shards = sorted((ShardOutput.open(path) for path in paths), key=lambda shard: shard.index)
    for shard in shards:
        _check_same_run(shards[0], shard)
    _check_all_there(shards)
    _check_same_list(shards)
    for shard in shards:
        _check_rows(shard)
    return shards


def _is_errors_file(path: Path) -> bool:
    if not path.name.endswith(_ERRORS) or not path.is_file():
        return False
    with reading(path):
        names = pq.read_schema(path).names
    return not any(VECTORS.fullmatch(name) for name in names)


def _same_place(one: Path, other: Path) -> bool:
    return os.path.realpath(one) == os.path.realpath(other)


def _check_same_run(first: ShardOutput, shard: ShardOutput) -> None:
    """Compare the settings, and what was cut into how many pieces."""

    def settings(each: ShardOutput) -> dict[str, Any]:
        return {
            **{name: value for name, value in each.provenance["fingerprint"].items() if name not in FOLLOWS_SHARD},
            "shard": f"of {each.count}",
            "rows of the whole": each.whole["num_rows"],
        }

    one, other = settings(first), settings(shard)
    lines = [
        f"{name}: {json.dumps(one.get(name))} in {first.path}, {json.dumps(other.get(name))} in {shard.path}"
        for name in sorted({*one, *other})
        if one.get(name) != other.get(name)
    ]
    if not lines and first.whole["keys_sha256"] != shard.whole["keys_sha256"]:
        lines = [f"the list of inputs: other names in {first.path} than in {shard.path}"]
    if lines:
        shown = "\n  ".join(lines)
        msg = f"these are not shards of one run:\n  {shown}\nmake those anew that differ from what you want"
        raise InputError(msg)
    if first.schema is not None and shard.schema is not None and not first.schema.equals(shard.schema):
        msg = f"{first.path} and {shard.path} have other columns: one was changed; make it again with --overwrite"
        raise InputError(msg)


def _check_all_there(shards: Sequence[ShardOutput]) -> None:
    count, given = shards[0].count, Counter(shard.index for shard in shards)
    problems = []
    if missing := [index for index in range(count) if index not in given]:
        shown = ", ".join(shard_text(index, count) for index in missing[:20])
        problems.append(f"not given: {shown}" + f" and {len(missing) - 20} more" * (len(missing) > 20))  # noqa: PLR2004  a line is enough
    for index, times in sorted(given.items()):
        if times > 1:
            named = ", ".join(str(shard.path) for shard in shards if shard.index == index)
            problems.append(f"{shard_text(index, count)} is given {times} times: {named}")
    if problems:
        msg = f"all {count} shards of a run are merged, each once; {'; '.join(problems)}"
        raise InputError(msg)


def _check_same_list(shards: Sequence[ShardOutput]) -> None:
    """Sizes and change times may differ only where failed rows were tried again: that is what a retry is for."""
    first: ShardOutput | None = None
    for shard in shards:
        if "retried" in shard.provenance:
            continue
        first = first or shard
        if shard.whole["source_sha256"] != first.whole["source_sha256"]:
            msg = (
                f"the inputs have changed between {first.path} and {shard.path}: their sizes or change times were not "
                "the same; make the older one again with --overwrite"
            )
            raise InputError(msg)


def _check_rows(shard: ShardOutput) -> None:
    if (total := shard.whole["num_rows"]) is None:
        return
    expected = total * (shard.index + 1) // shard.count - total * shard.index // shard.count
    if shard.counts["rows"] != expected:
        which = shard_text(shard.index, shard.count)
        msg = (
            f"{shard.path} has {shard.counts['rows']} rows, and shard {which} of {total} rows has {expected}: make it "
            "again with --overwrite"
        )
        raise InputError(msg)


def whole_provenance(shards: Sequence[ShardOutput], target: str | os.PathLike[str]) -> dict[str, Any]:
    """What the whole run records with its output `target`, apart from its counts; the first shard speaks for all. What
    others had otherwise is in ``merged_from``."""
    first = shards[0].provenance
    last_look = [shard.whole for shard in shards if "retried" in shard.provenance] or [shards[0].whole]
    fingerprint = {name: value for name, value in first["fingerprint"].items() if name not in ("shard", "whole")}
    recipe = replace(EncodeConfig.from_toml(first["recipe"]), shard=None, output=target)
    merged_from = []
    for shard in shards:
        entry = {
            "shard": shard_text(shard.index, shard.count),
            "counts": {name: shard.counts[name] for name in ("rows", "embedded", "duplicates", "failed")},
        }
        for name in ("backend", "versions"):
            if (theirs := shard.provenance[name]) != first[name]:
                entry[name] = {key: value for key, value in theirs.items() if first[name].get(key) != value}
        if "retried" in shard.provenance:
            entry["retried"] = shard.provenance["retried"]
        merged_from.append(entry)
    return {
        **{name: first[name] for name in ("decided", "shape", "model", "backend", "versions")},
        "fingerprint": {**fingerprint, **last_look[-1]},
        "recipe": recipe.to_toml(),
        "merged_from": merged_from,
    }


def whole_counts(shards: Sequence[ShardOutput], num_embedded: int) -> dict[str, Any]:
    """The whole run's counts, where `num_embedded` rows are no duplicates."""
    codes: Counter[str] = Counter()
    skipped: Counter[str] = Counter()
    for shard in shards:
        codes.update(shard.counts["codes"])
        theirs: Counter[str] = Counter(shard.counts["skipped"])
        # Where rows are counted by reading, a shard knows of its own files only; else each has listed the whole.
        skipped = skipped + theirs if shard.whole["num_rows"] is None else skipped | theirs
    num_rows = sum(shard.num_rows for shard in shards)
    return {
        "rows": sum(shard.counts["rows"] for shard in shards),
        "embedded": num_embedded,
        "duplicates": num_rows - num_embedded,
        "failed": sum(shard.counts["failed"] for shard in shards),
        "codes": dict(codes.most_common()),
        "skipped": dict(skipped),
    }
