"""The nodes of a run in a Ray cluster: their place, their processes, what they print, and their
end.

Ray finds the nodes and keeps them for the run. On each of them one actor (`lrl.cli.ray_node`)
starts one `lrl fit` with the variables by which Lightning knows its node; Lightning starts the
other ranks of that node, and torch.distributed connects all. So how many ranks a node has is a
matter of the run's settings alone.

Every call to a node can be made twice, and each has a deadline: Ray may say that a node does not
answer for a while. What a node prints is read from it, and not forwarded by Ray, which loses the
last lines of a run in one of three cases and makes a line of each move of a progress bar (Ray
2.60).
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
from importlib import metadata
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayError
from ray.util.placement_group import PlacementGroup, placement_group

from lrl.cli import ray_node
from lrl.cli.ray_request import RayRequest
from lrl.errors import RayRunError
from lrl.members.launchers.ray import TRAVEL, check_reachable
from lrl.members.launchers.ray_driver import in_bundle, remove, what_is_missing
from lrl.system.endpoint import is_loopback

POLL_S = 0.2
LOG_AFTER_S, LOG_EVERY_S = 10.0, 60.0
"""When a wait for nodes is reported."""
START_S = 120.0
"""Longest wait for the start of Ray's processes on nodes that are there, and of the run's."""
SILENT_S = 120.0
"""A node that has not answered for so long, or has not ended so long after SIGKILL, is lost."""
FAILED_S = 30.0
"""When a node has failed, the others have so long to end by themselves; then they are asked to."""
BAR_S = 10.0
"""A bar that grows is printed so often."""


class Stopped(Exception):
    """A signal has come before the run was started."""


@dataclass
class Node:
    """A node of the run."""

    number: int
    actor: Any
    host: str = ""
    address: str = ""
    port: int = 0
    versions: str = ""
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
        for line in lines:
            states = [state.rstrip() for state in line.decode(errors="replace").split("\r")]
            if shown := [*filter(None, states)]:
                sys.stdout.write(f"[node {self.number}] {shown[-1]}\n")
        sys.stdout.flush()


def run(words: Sequence[str], asked: RayRequest) -> int:
    """Runs `lrl` with these words on the nodes, and prints what they print; returns the run's exit
    status.

    Raises:
        RayRunError: There is no cluster, no place in it, or a node on which lrl cannot run.
    """
    try:
        check_reachable(asked.address)
        ray.init(address=asked.address, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, RuntimeError, ValueError) as error:
        raise RayRunError(
            f"--address is {asked.address}, and no Ray cluster answers there: type this on its "
            f"head, or give its host:port. {lines_of(error)[0]}"
        ) from error
    try:
        with signals() as received, placed(asked, received) as nodes:
            start(nodes, words, asked.grace_s)
            return RunMonitor(nodes, received, asked.grace_s).follow()
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
    group = placement_group([asked.bundle] * asked.nodes, strategy="STRICT_SPREAD")
    ray.cloudpickle.register_pickle_by_value(ray_node)
    actors: list[Any] = []
    for number in range(asked.nodes):
        where = in_bundle(group, number, asked.bundle)
        name = f"lrl-node-{number}-{os.getpid()}"
        kind = ray.remote(ray_node.RayNode).options(name=name, max_restarts=0, **where)
        actors.append(kind.remote())  # Ray starts it when there is a place
    try:
        found = wait_for(actors, group, asked, received)
        nodes = [Node(number, actors[number], **found[number]) for number in range(asked.nodes)]
        check(nodes)
        yield nodes
    finally:
        with suppress(RayError):
            for actor in actors:
                ray.kill(actor)
            remove(group)


def wait_for(
    actors: Sequence[Any], group: PlacementGroup, asked: RayRequest, received: list[int]
) -> list[dict[str, Any]]:
    """Waits until Ray has reserved a node for each bundle and started an actor there; returns what
    each says of its node."""
    begun, said_at = time.monotonic(), LOG_AFTER_S
    calls = [actor.look.remote() for actor in actors]
    while silent := ray.wait(calls, num_returns=len(calls), timeout=POLL_S)[1]:
        if received:
            raise Stopped
        missing = what_is_missing(
            group, [asked.bundle] * asked.nodes, "STRICT_SPREAD (one on each node)"
        )
        if has_place := not missing:
            missing = f"Ray has a place on each node, and {len(silent)} have not started a process."
        waited = time.monotonic() - begun
        if waited > asked.wait_s + (START_S if has_place else 0.0):
            raise RayRunError(
                f"After {waited:.0f} s: {missing} Lower --nodes, --gpus, --cpus or --resources "
                "(--gpus 0 on nodes without), add nodes to the cluster, look into Ray's logs on "
                "them (session_latest/logs), or raise --wait_s."
            )
        if waited > said_at:
            say(f"Waiting for {waited:.0f} s: {missing}")
            said_at += LOG_EVERY_S
    try:
        return list(ray.get(calls))
    except RayError as error:
        raise RayRunError(
            f"Ray cannot start a process on one of the nodes: {lines_of(error)[-1]}"
        ) from error


def check(nodes: Sequence[Node]) -> None:
    """Raises RayRunError if one of the nodes cannot be part of the run."""
    here = ray_node.versions(metadata.version("lrl"))
    for node in nodes:
        if node.versions != here:
            raise RayRunError(
                f"On {node.name} Ray has {node.versions}, and here is {here}: install the same on "
                "all."
            )
        if len(nodes) > 1 and is_loopback(node.address):
            raise RayRunError(
                f"Ray has {node.address} as the address of {node.host}, which other nodes do not "
                "reach: start Ray there with --node-ip-address."
            )


def start(nodes: Sequence[Node], words: Sequence[str], grace_s: float) -> None:
    """Starts the processes of the run."""
    variables = {name: value for name, value in os.environ.items() if name.startswith(TRAVEL)}
    variables |= {
        "MASTER_ADDR": nodes[0].address,
        "MASTER_PORT": str(nodes[0].port),
        "PYTHONUNBUFFERED": "1",
        "RAY_ADDRESS": ray.get_runtime_context().gcs_address,  # for `strategy.launcher: Ray`
    }
    say("; ".join(node.name for node in nodes))
    started = []
    for node in nodes:
        own = variables | {"NODE_RANK": str(node.number)}
        started.append(node.actor.start.remote([*words], own, os.getcwd(), grace_s))
    try:
        ray.get(started, timeout=START_S)
    except RayError as error:
        raise RayRunError(
            f"The run could not be started on all nodes: {lines_of(error)[-1]}"
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
            for call in ray.wait(list(reads), timeout=POLL_S)[0]:
                node = reads.pop(call)
                self._take(node, call)
                if node.runs:
                    reads[node.actor.read.remote(node.at)] = node
            self._lead()
            for node in self.nodes:
                if node.runs and time.monotonic() > node.heard + SILENT_S:
                    what = "ended after SIGKILL" if self._killed else "answered"
                    self._lose(node, f"it has not {what} for {SILENT_S:.0f} s")
        return self._status()

    def _take(self, node: Node, call: Any) -> None:
        """Takes what a node has answered."""
        try:
            text, status = ray.get(call)
        except ActorUnavailableError:  # perhaps for a while
            time.sleep(POLL_S)
            return
        except RayError as error:
            self._lose(node, f"Ray says: {lines_of(error)[-1]}")
            return
        if not self._killed:
            node.heard = time.monotonic()
        node.status = status
        node.take(text, last=status is not None)
        if status:
            say(f"{node.name} has ended with status {status}.")
            self._failure = self._failure or status
            self._ask_at = min(self._ask_at, time.monotonic() + FAILED_S)
        if status is not None and (status or node.number == 0):
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
            self._asked = True
            self._end = min(self._end, time.monotonic() + self.grace_s)
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


def lines_of(error: BaseException) -> list[str]:
    """Returns the lines of an error's text; Ray puts the cause into the last one, behind its
    traceback."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines or [type(error).__name__]


def say(what: str) -> None:
    """Prints a line of this program's own."""
    sys.stderr.write(f"lrl ray: {what}\n")
    sys.stderr.flush()
