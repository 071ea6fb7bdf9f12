"""`lrl ray`: runs a command of lrl on nodes of a Ray cluster, as srun does on those of SLURM.

`lrl ray --nodes 2 --gpus 8 fit ...` trains; `lrl.members.launchers.Ray` starts each member so. A
placement group reserves the nodes. On each, an actor starts the command under a guard, with torchrun's
variables for the ranks of several nodes.

`ray job submit` can stand before the command, and not in its place: it places no nodes, kills what
it runs 3 s after `ray job stop`, and its exit status is 1 whatever the run's was. Nor does Ray
Train's integration of Lightning: it kills the ranks before they can save, and their devices are
theirs alone, without some for generators. What a node prints is read from it, since Ray's own
forwarding loses the last lines of a run in one of three cases (Ray 2.60).

The guard is a program of its own, `python -m lrl.cli.ray GRACE_S COMMAND ...`, for Ray kills the
children of its actors, and nothing below them. Its first process only passes on signals and the exit
status. Its second runs the command: SIGTERM, and the end of the first, however it ends, ask the command
to end, which then has GRACE_S seconds to save; SIGQUIT kills it at once. What it has started is killed
behind it.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lrl.generators.supervisor import TICK_S, Tree
from lrl.system.processes import (
    adopt_orphans,
    bound_to_this_process,
    die_with,
    shell_status,
    start_bound,
)

if __name__ != "__main__":  # the guard lives as long as the run, and needs none of it
    import ray
    from jsonargparse import ArgumentParser
    from jsonargparse.typing import NonNegativeInt, PositiveFloat, PositiveInt
    from ray.exceptions import ActorUnavailableError, RayError
    from ray.util.placement_group import (
        PlacementGroup,
        placement_group,
        placement_group_table,
        remove_placement_group,
    )
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

TRAINS = ("fit", "validate")
EXAMPLE = "lrl ray --nodes 2 --gpus 8 fit --config own.yaml"
TRAVEL = ("LRL_", "VLLM_", "HF_", "NCCL_", "GLOO_")
"""Beginnings of the variables that the command gets from here. The others are its node's own."""
START_S = 120.0
"""Longest wait for the start of Ray's processes on nodes that are there, and of the command's."""
FAILED_S = 30.0
"""When a node has failed, the others have so long to end by themselves; then they are asked to."""
POLL_S = 0.2
READ_S = 1.0
"""Longest wait of a call for something to read; other calls wait behind it."""
PLACING_S = 20.0
"""Longest wait for the end of Ray's placing, which takes milliseconds."""
PLACING = ("QUEUED", "SCHEDULING_STARTED")
BEHIND_S = 40.0
"""Seconds that what the command has started may outlast it: supervisors end vLLM and remove its
files."""
PASSED_ON = (signal.SIGTERM, signal.SIGQUIT)


@dataclass(frozen=True)
class Request:
    """The nodes and resources that a command asks Ray for.

    Args:
        gpus: GPUs of each node (for fit trainer.devices; 0 on a CPU).
        nodes: Nodes; sets trainer.num_nodes.
        cpus: CPU cores of each, as Ray counts them.
        resources: Ray's own resources of each, such as '{"h100": 1}'.
        address: The cluster's, host:port; auto is the one of this machine.
        wait_s: Longest wait for the nodes, in seconds.
        grace_s: Longest wait for a command that saves and ends, in seconds.
    """

    gpus: NonNegativeInt
    nodes: PositiveInt = 1
    cpus: PositiveFloat = 1.0
    resources: dict[str, float] = field(default_factory=dict)
    address: str = "auto"
    wait_s: PositiveFloat = 1800.0
    grace_s: PositiveFloat = 600.0

    @property
    def bundles(self) -> list[dict[str, float]]:
        """The resources of each node."""
        asked = {"CPU": self.cpus, "GPU": float(self.gpus), **self.resources}
        return [{name: amount for name, amount in asked.items() if amount}] * self.nodes


def main(argv: Sequence[str] | None = None) -> int:
    """Places and runs it; returns the exit status: the command's, 2 if the words are wrong, 1 if it
    cannot be placed or a node is lost."""
    parser = ArgumentParser(
        prog="lrl ray",
        usage=f"lrl ray --gpus N [...] fit --config RECIPE [...]\n\nAs in: {EXAMPLE}",
        description="Run a command of lrl on nodes of a Ray cluster, and print what it prints.",
        allow_abbrev=False,
    )
    parser.add_class_arguments(Request)
    words = list(sys.argv[1:] if argv is None else argv)
    verbs = (*TRAINS, "lrl")
    at = next((number for number, word in enumerate(words) if word in verbs), len(words))
    asked, own = Request(**vars(parser.parse_args(words[:at]))), words[at:]
    if not own:
        parser.error(f"there is no fit and no validate: {EXAMPLE}")
    if own[0] in TRAINS:
        own += ["--trainer.num_nodes", str(asked.nodes)]
    try:
        return run(own[own[0] == "lrl" :], asked)
    except (OSError, RuntimeError, RayError) as error:
        sys.stderr.write(f"lrl: error: {_cause(error)}\n")
        return 1


def run(words: Sequence[str], asked: Request) -> int:
    """Runs `lrl` with these words on the nodes, and prints what they print; returns the exit status.
    Raises OSError or RayError if it cannot be placed or started."""
    ray.init(address=asked.address, log_to_driver=False, logging_level=logging.ERROR)
    received: list[int] = []
    for signum in (signal.SIGINT, signal.SIGTERM):  # Ray's own handler would end this process
        signal.signal(signum, lambda number, _: received.append(number))
    group = placement_group(asked.bundles, strategy="STRICT_SPREAD")
    try:
        wait_for_place(group, asked, received)
        return 128 + received[0] if received else follow(start(group, words, asked), received)
    finally:
        remove(group)  # and with it the actors
        ray.shutdown()


def wait_for_place(group: PlacementGroup, asked: Request, received: list[int]) -> None:
    """Waits until Ray has reserved the nodes, or a signal has come."""
    nodes = "; ".join(_named(node["Resources"]) for node in ray.nodes() if node["Alive"])
    place = (
        f"{asked.nodes} times {_named(asked.bundles[0])}, each on a node of its own. The nodes have "
        f"{nodes}, less what others use."
    )
    say(f"waits for {place}")
    end = time.monotonic() + asked.wait_s
    while not received and not group.wait(POLL_S):
        if time.monotonic() > end:
            text = f"after {asked.wait_s:g} s Ray has no place for {place}"
            raise TimeoutError(f"{text} Ask for less, add nodes, or raise --wait_s.")


def _named(resources: dict[str, float]) -> str:
    """Without those that Ray makes up for a node itself."""
    return ", ".join(f"{name}: {amount:g}" for name, amount in resources.items() if ":" not in name)


def remove(group: PlacementGroup) -> None:
    """Removes a placement group, but not while Ray places it.

    What a node has reserved by then may stay reserved for ever: so two cores were lost in twenty
    removals, and later runs waited for a place in vain (Ray 2.60; ray-project/ray, issue 64693).
    """
    end = time.monotonic() + PLACING_S
    while time.monotonic() < end:
        if placement_group_table(group)["stats"]["scheduling_state"] not in PLACING:
            break
        time.sleep(0.01)
    remove_placement_group(group)


class NodeActor:
    """The command on one node."""

    def __init__(self) -> None:
        # A pipe would break, and the command with it, at the end of this process.
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 (open as long as the actor lives)

    def place(self) -> tuple[str, str, int]:
        """Returns the host's name, its address in the cluster, and a free port there."""
        address = ray.util.get_node_ip_address()
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as free:
            free.bind((address, 0))
            return socket.gethostname(), address, free.getsockname()[1]

    def start(
        self, words: list[str], variables: dict[str, str], folder: str, grace_s: float
    ) -> None:
        """Runs `lrl` with these words, in `folder` if this node has it."""
        # Lightning would take this process for one of SLURM's, and lrl Ray's number of threads for
        # the user's.
        own = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("SLURM_") and name != "OMP_NUM_THREADS"
        }
        guard = [sys.executable, "-P", "-m", "lrl.cli.ray", str(grace_s)]
        self._process = subprocess.Popen(
            bound_to_this_process([*guard, str(Path(sys.executable).with_name("lrl")), *words]),
            env=own | variables,
            cwd=folder if os.path.isdir(folder) else None,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._output,
            start_new_session=True,
        )

    def read(self, at: int) -> tuple[bytes, int | None]:
        """Returns what was printed from byte `at` on, and the exit status when all of it has been
        read."""
        end = time.monotonic() + READ_S
        while True:
            status = self._process.poll()
            if text := os.pread(self._output.fileno(), 1 << 20, at):
                return text, None
            if status is not None or time.monotonic() > end:
                return b"", status
            time.sleep(POLL_S)

    def send(self, signum: int) -> None:
        self._process.send_signal(signum)


@dataclass
class Node:
    """A node of the command, seen from here."""

    name: str
    actor: Any
    prefix: str  # of each line that it prints
    status: int | None = None  # None while it runs
    at: int = 0  # bytes that have been read
    line: bytes = b""  # the beginning of a line whose end is missing

    def take(self, call: Any) -> bool:
        """Prints the answer of `NodeActor.read`; returns whether the command still runs."""
        text = b""
        try:
            text, self.status = ray.get(call)
        except ActorUnavailableError:  # perhaps for a while
            time.sleep(POLL_S)
        except RayError as error:
            say(
                f"{self.name} is lost: {_cause(error)} The run ends; start it again with --ckpt_path."
            )
            self.status = 1
        self.at += len(text)
        *lines, self.line = (self.line + text).split(b"\n")
        if self.status is not None and self.line:
            lines.append(self.line)
        for line in lines:
            shown = line.decode(errors="replace").rstrip("\r").rpartition("\r")[2]  # of a bar
            sys.stdout.write(f"{self.prefix}{shown}\n")
        sys.stdout.flush()
        if self.status:
            say(f"{self.name} has ended with status {self.status}.")
        return self.status is None


def start(group: PlacementGroup, words: Sequence[str], asked: Request) -> list[Node]:
    """Starts the command on all nodes."""
    kind: Any = ray.remote(NodeActor)
    how = {"num_cpus": asked.cpus, "num_gpus": asked.gpus, "resources": asked.resources}
    actors = [
        kind.options(
            **how, scheduling_strategy=PlacementGroupSchedulingStrategy(group, number)
        ).remote()
        for number in range(asked.nodes)
    ]
    places = ray.get([actor.place.remote() for actor in actors], timeout=START_S)
    variables = {name: value for name, value in os.environ.items() if name.startswith(TRAVEL)}
    variables["PYTHONUNBUFFERED"] = "1"
    variables["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address  # for `launcher: Ray`
    several = asked.nodes > 1
    if several:
        _, variables["MASTER_ADDR"], port = places[0]
        variables["MASTER_PORT"] = str(port)
    nodes, starts = [], []
    for number, (actor, (host, address, _)) in enumerate(zip(actors, places, strict=True)):
        own = variables | ({"NODE_RANK": str(number)} if several else {})
        starts.append(actor.start.remote([*words], own, os.getcwd(), asked.grace_s))
        name = f"node {number} ({host}, {address})"
        nodes.append(Node(name, actor, prefix=f"[node {number}] " if several else ""))
    say("; ".join(node.name for node in nodes))
    ray.get(starts, timeout=START_S)
    return nodes


def follow(nodes: Sequence[Node], received: list[int]) -> int:
    """Prints what the nodes print until all have ended, and ends the others with the first one;
    returns the exit status: node 0's after a signal, else that of the first one that has failed.

    A signal, and a second one, are for all nodes: rank 0 saves and ends, and the other ranks, which
    ignore signals, with it.
    """
    reads = {node.actor.read.remote(node.at): node for node in nodes}
    failed, ask_at, asked = 0, float("inf"), 0
    while reads:
        for call in ray.wait(list(reads), timeout=POLL_S)[0]:
            node = reads.pop(call)
            if node.take(call):
                reads[node.actor.read.remote(node.at)] = node
            elif node.status or node is nodes[0]:
                failed = failed or node.status or 0
                ask_at = min(ask_at, time.monotonic() + FAILED_S)
        if asked < min(max(len(received), time.monotonic() > ask_at), 2):
            for node in reads.values():
                node.actor.send.remote(signal.SIGQUIT if asked else signal.SIGTERM)
            asked += 1
    return (received and nodes[0].status) or failed


def say(what: str) -> None:
    sys.stderr.write(f"lrl ray: {what}\n")
    sys.stderr.flush()


def _cause(error: Exception) -> str:
    """Ray puts it into the last line, behind its traceback."""
    return str(error).strip().splitlines()[-1]


def guard(command: list[str], grace_s: float) -> int:
    """Runs `command`; returns its exit status as a shell gives it (128 + signal)."""
    adopt_orphans()
    child = start_bound(command, by=signal.SIGKILL, stdin=subprocess.DEVNULL)
    asked: list[int] = []
    for signum in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(signum, lambda number, _: asked.append(number))
    while child.poll() is None and not asked:
        time.sleep(TICK_S)
    child.terminate()  # once: a second SIGTERM would end the command at once
    end = time.monotonic() + grace_s
    while child.poll() is None and signal.SIGQUIT not in asked and time.monotonic() < end:
        time.sleep(TICK_S)
    child.kill()
    Tree(child).end(BEHIND_S)
    return shell_status(child.poll())


def guard_program() -> int:
    """Runs the guard's two processes; returns the command's exit status."""
    # Ray blocks SIGINT in its processes, and children inherit that.
    signal.pthread_sigmask(signal.SIG_SETMASK, PASSED_ON)
    owner = os.getpid()
    if (child := os.fork()) == 0:
        die_with(owner, by=signal.SIGHUP)
        for ignored in (signal.SIGINT, signal.SIGHUP, *PASSED_ON):
            signal.signal(ignored, lambda *_: None)  # not SIG_IGN, which the command would inherit
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        return guard(sys.argv[2:], float(sys.argv[1]))
    for signum in PASSED_ON:
        signal.signal(signum, lambda number, _: os.kill(child, number))
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) % 256


if __name__ == "__main__":
    sys.exit(guard_program())
