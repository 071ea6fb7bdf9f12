"""The nodes of a run in a Ray cluster: their place, their processes, what they print, and their
end.

Ray finds the nodes and keeps them for the run. On each of them one actor (`lrl.cli.ray_node`)
starts one `lrl fit` with the variables by which Lightning knows its node; Lightning starts the
other ranks of that node, and torch.distributed connects all. So how many ranks a node has is a
matter of the run's settings alone.

Every call to a node can be made twice, and each has a deadline: Ray may say that a node does not
answer for a while.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayError
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from lrl.cli import ray_node
from lrl.errors import RayRunError
from lrl.members.launchers.ray import TRAVEL
from lrl.members.launchers.ray_driver import remove, what_is_missing
from lrl.system.endpoint import is_loopback

POLL_S = 0.2
LOG_AFTER_S, LOG_EVERY_S = 10.0, 60.0
"""When a wait for places is reported."""
START_S = 120.0
"""Longest wait for the start of the run's processes, on nodes that have answered."""
SILENT_S = 120.0
"""A node that has not answered for so long is lost."""
FAILED_S = 30.0
"""When a node has failed, the others have so long to end by themselves; then they are asked to."""
BAR_S = 10.0
"""A bar that grows is printed so often."""
KILLED_S = 60.0
"""Longest wait for killed processes."""


class Stopped(Exception):
    """A signal has come before the run was started."""


@dataclass(frozen=True)
class RayRequest:
    """The nodes that a run wants from Ray, and how long it waits."""

    nodes: int
    bundle: dict[str, float]
    """Resources of each node."""
    address: str
    wait_s: float
    """Longest wait until the nodes are there, in seconds."""
    grace_s: float
    """Seconds that the run has to save and to end."""
    folder: str = field(default_factory=os.getcwd)
    """The working folder, on nodes that have it."""


@dataclass
class Node:
    """A node of the run."""

    number: int
    actor: Any
    several: bool
    host: str = ""
    address: str = ""
    port: int = 0
    versions: dict[str, str] = field(default_factory=dict)
    status: int | None = None
    """Exit status of its process, None while it runs."""
    lost: str = ""
    """Why it is no part of the run any more."""
    at: int = 0
    """Bytes that have been read."""
    line: bytes = b""
    """The beginning of a line whose end is missing."""
    heard: float = field(default_factory=time.monotonic)
    shown: float = float("-inf")
    """When a bar was printed."""

    @property
    def runs(self) -> bool:
        """Whether its process runs."""
        return self.status is None and not self.lost

    @property
    def name(self) -> str:
        """Its number and place."""
        return f"node {self.number} ({self.host}, {self.address})"

    def take(self, text: bytes, last: bool = False) -> None:
        """Prints whole lines of it, as a terminal would show them at their end, and now and then a
        bar that grows."""
        self.at += len(text)
        *lines, self.line = (self.line + text).split(b"\n")
        if last or (b"\r" in self.line and time.monotonic() > self.shown + BAR_S):
            lines.append(self.line)
            self.line = b""
            self.shown = time.monotonic()
        head = f"[node {self.number}] " if self.several else ""
        sys.stdout.write(
            "".join(f"{head}{shown}\n" for line in lines if (shown := last_state(line)))
        )
        sys.stdout.flush()


def last_state(line: bytes) -> str:
    """Returns the last state of a progress bar's line."""
    parts = [part.rstrip() for part in line.decode(errors="replace").split("\r")]
    return next((part for part in reversed(parts) if part), "")


def run(words: Sequence[str], asked: RayRequest) -> int:
    """Runs `lrl` with these words on the nodes, and prints what they print; returns the run's exit
    status.

    Raises:
        RayRunError: There is no cluster, no place in it, or a node on which lrl cannot run.
    """
    try:
        ray.init(address=asked.address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise RayRunError(
            f"--address is {asked.address}, and there is no connection to a Ray cluster: type this "
            f"on its head, or give its host:port. Ray says: {first_line(error)}"
        ) from error
    try:
        with signals() as received, placed(asked, received) as nodes:
            try:
                start(nodes, words, asked)
                return RunMonitor(nodes, received, asked.grace_s).follow()
            finally:
                for node in nodes:
                    with suppress(RayError):
                        ray.kill(node.actor)
    except Stopped:
        return 128 + received[0]
    finally:
        ray.shutdown()


@contextmanager
def signals() -> Iterator[list[int]]:
    """Yields the list to which SIGINT and SIGTERM are added. Ray's own handler of SIGTERM would end
    this process."""
    received: list[int] = []
    before = {one: signal.signal(one, lambda number, _: received.append(number)) for one in (2, 15)}
    try:
        yield received
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


@contextmanager
def placed(asked: RayRequest, received: list[int]) -> Iterator[list[Node]]:
    """Yields the nodes, each with an actor that has answered; gives their places back at the end.

    Raises:
        RayRunError: Not all are there in time, or one cannot run lrl.
        Stopped: By a signal.
    """
    start = time.monotonic()
    bundles = [asked.bundle] * asked.nodes
    group = placement_group(bundles, strategy="STRICT_SPREAD")
    try:
        wait_for_places(group, bundles, asked, received)
        nodes = [
            Node(number, actor_of(group, number, asked.bundle), asked.nodes > 1)
            for number in range(asked.nodes)
        ]
        left_s = max(START_S, asked.wait_s + start - time.monotonic())
        for node, found in zip(nodes, node_info(nodes, left_s, received), strict=True):
            node.host, node.address, node.port, node.versions = (
                found[name] for name in ("host", "address", "port", "versions")
            )
        check(nodes)
        yield nodes
    finally:
        with suppress(RayError):
            remove(group)


def wait_for_places(
    group: PlacementGroup, bundles: list[dict[str, float]], asked: RayRequest, received: list[int]
) -> None:
    """Waits until Ray has reserved a node for each bundle."""
    start, said_at = time.monotonic(), LOG_AFTER_S
    while missing := what_is_missing(group, bundles, "STRICT_SPREAD (one on each node)"):
        stop_if_asked(received)
        waited = time.monotonic() - start
        if waited > asked.wait_s:
            raise RayRunError(
                f"After {waited:.0f} s: {missing} Lower --nodes, --gpus, --cpus or --resources "
                "(--gpus 0 on nodes without), add nodes to the cluster, or raise --wait_s."
            )
        if waited > said_at:
            say(f"Waiting for {waited:.0f} s: {missing}")
            said_at += LOG_EVERY_S
        time.sleep(POLL_S)


def actor_of(group: PlacementGroup, number: int, bundle: dict[str, float]) -> Any:
    """Returns an actor in a bundle of the placement group."""
    ray.cloudpickle.register_pickle_by_value(ray_node)
    own = dict(bundle)
    return (
        ray.remote(ray_node.RayNode)
        .options(
            name=f"lrl-node-{number}-{os.getpid()}",
            num_cpus=own.pop("CPU", 0),
            num_gpus=own.pop("GPU", 0),
            resources=own,
            max_restarts=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                group, placement_group_bundle_index=number
            ),
        )
        .remote()
    )


def node_info(nodes: Sequence[Node], timeout_s: float, received: list[int]) -> list[dict[str, Any]]:
    """Returns what each node says of itself."""
    asked = [node.actor.look.remote() for node in nodes]
    end = time.monotonic() + timeout_s
    while len(ray.wait(asked, num_returns=len(asked), timeout=POLL_S)[0]) < len(asked):
        stop_if_asked(received)
        if time.monotonic() > end:
            silent = [
                node.number
                for node, one in zip(nodes, asked, strict=True)
                if not ray.wait([one], timeout=0)[0]
            ]
            raise RayRunError(
                f"After {timeout_s:.0f} s Ray has not started its process for node "
                f"{', '.join(map(str, silent))}. Look into the logs of Ray on its nodes "
                "(session_latest/logs in Ray's folder), or raise --wait_s."
            )
    try:
        return list(ray.get(asked))
    except RayError as error:
        raise RayRunError(
            f"Ray cannot start a process on one of the nodes: {last_line(error)}"
        ) from error


def check(nodes: Sequence[Node]) -> None:
    """Raises RayRunError if one of the nodes cannot be part of the run."""
    from importlib import metadata

    mine = {"python": ".".join(map(str, sys.version_info[:2])), "lrl": metadata.version("lrl")}
    for node in nodes:
        if "lrl" not in node.versions:
            raise RayRunError(
                f"There is no lrl in the Python of Ray on {node.name}: install it there."
            )
        if node.versions != mine:
            theirs, here = (
                ", ".join(f"{name} {one[name]}" for name in mine) for one in (node.versions, mine)
            )
            raise RayRunError(
                f"On {node.name} there is {theirs}, and here are {here}: install the same on all."
            )
    if len(nodes) > 1 and is_loopback(nodes[0].address):
        raise RayRunError(
            f"Ray has {nodes[0].address} as the address of {nodes[0].host}, which other nodes do "
            "not reach: start Ray there with --node-ip-address."
        )


def start(nodes: Sequence[Node], words: Sequence[str], asked: RayRequest) -> None:
    """Starts the processes of the run."""
    first = nodes[0]
    travelling = {name: value for name, value in os.environ.items() if name.startswith(TRAVEL)}
    common = {
        "MASTER_ADDR": first.address,
        "MASTER_PORT": str(first.port),
        "PYTHONUNBUFFERED": "1",
        "RAY_ADDRESS": ray.get_runtime_context().gcs_address,  # for `strategy.launcher: Ray`
    }
    say("; ".join(node.name for node in nodes))
    started = [
        node.actor.start.remote(
            *(
                [*words],
                travelling | common | {"NODE_RANK": str(node.number)},
                asked.folder,
                asked.grace_s,
            )
        )
        for node in nodes
    ]
    try:
        ray.get(started, timeout=START_S)
    except RayError as error:
        raise RayRunError(
            f"The run could not be started on all nodes: {last_line(error)}"
        ) from error


class RunMonitor:
    """Prints what the nodes print until all have ended, and ends the others with the first one.

    Signals are for rank 0, on node 0, which saves and ends, and the other ranks with it; they
    ignore signals.
    """

    def __init__(self, nodes: Sequence[Node], received: list[int], grace_s: float) -> None:
        self.nodes = nodes
        self.received = received
        self.grace_s = grace_s
        self._ask_at = self._end = float("inf")
        self._asked = self._killed = False
        self._failure = 0  # status of the first node that has failed

    def follow(self) -> int:
        """Returns the run's exit status."""
        reads = {node.actor.read.remote(node.at): node for node in self.nodes}
        while any(node.runs for node in self.nodes):
            for done in ray.wait(list(reads), timeout=POLL_S)[0]:
                node = reads.pop(done)
                self._take(node, done)
                if node.runs:
                    reads[node.actor.read.remote(node.at)] = node
            for call, node in list(reads.items()):
                if time.monotonic() > node.heard + SILENT_S:
                    self._lose(node, f"it has not answered for {SILENT_S:.0f} s")
                    del reads[call]
            self._lead()
            if self._killed and time.monotonic() > self._end + KILLED_S:
                for node in filter(lambda one: one.runs, self.nodes):
                    self._lose(node, "its processes have not ended after SIGKILL")
        return self._status()

    def _take(self, node: Node, call: Any) -> None:
        """Takes what a node has answered."""
        try:
            text, node.status = ray.get(call)
        except ActorUnavailableError:  # perhaps for a while
            time.sleep(POLL_S)
            return
        except RayError as error:
            self._lose(node, f"Ray says: {last_line(error)}")
            return
        node.heard = time.monotonic()
        node.take(text, last=node.status is not None)
        if node.status:
            say(f"{node.name} has ended with status {node.status}{meaning(node.status)}.")
            self._failure = self._failure or node.status
            self._ask_at = min(self._ask_at, time.monotonic() + FAILED_S)
        if node.status is not None and (node.status or node.number == 0):
            self._end = min(self._end, time.monotonic() + self.grace_s)

    def _lose(self, node: Node, why: str) -> None:
        node.lost = why
        node.take(b"", last=True)
        say(f"{node.name} is lost: {why}. The run ends; start it again with --ckpt_path.")
        self._ask(signal.SIGTERM)

    def _lead(self) -> None:
        """Passes signals on, and kills what has not ended in time."""
        if self.received or time.monotonic() > self._ask_at:
            self._ask(self.received[0] if self.received else signal.SIGTERM)
        if not self._killed and (len(self.received) > 1 or time.monotonic() > self._end):
            self._killed = True
            self._end = time.monotonic()
            self._send(signal.SIGKILL)

    def _ask(self, signum: int) -> None:
        """Asks the run to end; once, since a second signal would end it without a checkpoint."""
        if not self._asked:
            self._asked, self._end = True, min(self._end, time.monotonic() + self.grace_s)
            self._send(signum)

    def _send(self, signum: int) -> None:
        for node in self.nodes:
            if node.runs:
                node.actor.send.remote(int(signum))

    def _status(self) -> int:
        """Returns the run's status: rank 0's, unless only another node has seen a fault."""
        lost = any(node.lost for node in self.nodes)
        if (lost or self._asked) and not self.received:
            # Rank 0's own is that of the signal by which this program has ended it.
            return 1 if lost else self._failure
        return next((node.status for node in self.nodes if node.status), 0)


def stop_if_asked(received: list[int]) -> None:
    """Raises Stopped if a signal has come."""
    if received:
        raise Stopped


def meaning(status: int) -> str:
    """Returns what an exit status says, in brackets."""
    with suppress(ValueError):
        return f" ({signal.Signals(status - 128).name})" if status > 128 else ""
    return ""


def first_line(error: BaseException) -> str:
    """Returns the first line of an error that says something."""
    return next(
        (line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__
    )


def last_line(error: BaseException) -> str:
    """Returns the last one: Ray puts the cause of an error behind its traceback."""
    return next(
        (line.strip() for line in reversed(str(error).splitlines()) if line.strip()),
        type(error).__name__,
    )


def say(what: str) -> None:
    """Prints a line of this program's own."""
    sys.stderr.write(f"lrl ray: {what}\n")
    sys.stderr.flush()
