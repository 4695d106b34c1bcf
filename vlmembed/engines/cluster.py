"""The way to a Ray cluster: connected, looked at, and left; and what its errors mean."""

from __future__ import annotations

import logging
import os
import re
import socket
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import ray
import ray.data
from ray.data.context import ShuffleStrategy
from ray.exceptions import NodeDiedError, RayError, RayTaskError, TaskUnschedulableError, WorkerCrashedError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from vlmembed.engines.sizing import Node
from vlmembed.engines.tasks import check_machine
from vlmembed.errors import ClusterError, StoppedError, VlmembedError
from vlmembed.provenance import versions

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vlmembed.config import EncodeConfig

logger = logging.getLogger(__name__)

ADVICE = "\nFailed to apply UDF transform"
"""What Ray Data puts behind the message of an error: settings of its own."""

ANSWER_SECONDS = 10.0
"""How long the head of a cluster may take to answer at all."""

CHECK_SECONDS = 120.0
"""How long a node may take to start a process and say that it can take part."""


@contextmanager
def connected(address: str | None) -> Iterator[None]:
    """Connected to the cluster at `address`, or that RAY_ADDRESS names; else to a Ray that runs on this machine, or one
    that is started here for as long as the block runs. A connection that is there already is used, and kept.

    Raises:
        ClusterError: there is none.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a run tells nobody of itself
    if ray.is_initialized():
        yield
        return
    os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")  # a thread that outlives the run shall start no other Ray
    verbose = logging.getLogger().isEnabledFor(logging.INFO)
    level = logging.INFO if verbose else logging.ERROR
    given = address or os.environ.get("RAY_ADDRESS")
    logging.getLogger("ray.data").setLevel(level)
    _check_answers(given)
    try:
        ray.init(address=given or "auto", logging_level=level)
    except (ConnectionError, ValueError, RuntimeError) as error:
        if given and given != "local":
            raise ClusterError(_no_cluster(given, error)) from error
        ray.init(address="local", include_dashboard=False, logging_level=level)
    try:
        yield
    finally:
        ray.shutdown()


def _check_answers(address: str | None) -> None:
    """Ray itself waits for minutes where nobody answers.

    Raises:
        ClusterError: nobody does, or the address is of another kind.
    """
    if (address or "").startswith("ray://"):
        msg = (
            f"--ray-address {address} is of Ray's client, by which Ray Data does not work well: give the command on a "
            "node of the cluster, with the HOST:PORT of its head"
        )
        raise ClusterError(msg)
    match = re.fullmatch(r"\[?([^\[\]/]+)\]?:(\d+)", address or "")
    if match is None:
        return
    try:
        socket.create_connection((match[1], int(match[2])), timeout=ANSWER_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise ClusterError(_no_cluster(address, error)) from error


def _no_cluster(address: str | None, error: Exception) -> str:
    return (
        f"there is no Ray cluster at {address} ({_first_line(error)}): start one with `ray start --head`, and name its "
        "HOST:PORT; or leave --ray-address out to start one on this machine"
    )


def machines() -> list[Node]:
    """The nodes that are alive."""
    resources = [node["Resources"] for node in _alive()]
    return [Node(num_cpus=each.get("CPU", 0.0), num_gpus=each.get("GPU", 0.0)) for each in resources]


def check_machines(config: EncodeConfig, folder: Path) -> None:
    """Let every node say whether it can take part. (One that joins later says so with its first task.)

    Raises:
        ClusterError: one cannot.
    """
    look: Any = ray.remote(num_cpus=0, max_retries=0)(check_machine)
    asked = {}
    for node in _alive():
        there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        answer = look.options(scheduling_strategy=there).remote(config, str(Path.cwd()), folder.absolute(), versions())
        asked[answer] = node["NodeManagerHostname"]
    ready, late = ray.wait(list(asked), num_returns=len(asked), timeout=CHECK_SECONDS)
    for answer in ready:
        try:
            problem = ray.get(answer)
        except (TaskUnschedulableError, NodeDiedError, WorkerCrashedError):  # it has gone, and has no part in the run
            logger.warning("node %s went away", asked[answer])
            continue
        except RayError as error:
            msg = (
                f"node {asked[answer]} cannot take part ({_first_line(own_error(error))}): all nodes need this version "
                "of vlmembed, with its extra: pip install 'vlmembed[ray]'"
            )
            raise ClusterError(msg) from error
        if problem is not None:
            raise problem
    if late:
        msg = f"node {asked[late[0]]} did not say within {CHECK_SECONDS:g} s that it can take part: look after it"
        raise ClusterError(msg)


@contextmanager
def quiet_data(block_bytes: int) -> Iterator[None]:
    """Ray Data with blocks of about so many bytes, and without bars of its own, while the block runs."""
    context = ray.data.DataContext.get_current().copy()
    context.target_max_block_size = block_bytes
    context.enable_progress_bars = False
    context.shuffle_strategy = ShuffleStrategy.SHUFFLE_V2  # by tasks alone: others hold CPUs for actors
    context.raise_original_map_exception = True  # what a stage has raised, and not a text about it
    with ray.data.DataContext.current(context):
        yield


def own_error(error: BaseException) -> BaseException:
    """What was raised on purpose somewhere in the cluster, out of what Ray has wrapped it in; else `error`."""
    seen: list[BaseException] = []
    waiting: list[BaseException | None] = [error]
    while waiting:
        each = waiting.pop()
        if each is None or any(each is other for other in seen):
            continue
        if isinstance(each, VlmembedError) and not isinstance(each, (RayTaskError, StoppedError)):
            return each
        seen.append(each)
        waiting += [each.__context__, each.__cause__, getattr(each, "cause", None)]
    return error


def raise_own(error: Exception) -> NoReturn:
    """Raise what an error of the cluster means.

    Raises:
        VlmembedError: what was raised on purpose; else a ClusterError.
    """
    found = own_error(error)
    if isinstance(found, VlmembedError):
        found.args = (str(found).split(ADVICE, 1)[0],)
        raise found from error
    msg = (
        f"the cluster could not go on ({_first_line(error)}). What was committed is kept, and the same command goes on "
        "from there; should a task die again and again, a picture may crash its decoder: --decode processes outlives "
        "that"
    )
    raise ClusterError(msg) from error


def _alive() -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]


def _first_line(error: BaseException) -> str:
    lines = [line for line in str(error).strip().split("\n") if line.strip()]
    return f"{type(error).__name__}: {lines[-1][:300]}" if lines else type(error).__name__
