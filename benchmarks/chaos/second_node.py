"""The second machine of a run, a network namespace: its processes, its cable, and what runs on
it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

from benchmarks.chaos.faults import PARTS, SUPERVISOR
from benchmarks.chaos.launch import JOIN_PORT, LOOK_S, WAIT_S, Target
from lrl.generators.supervisor import mapped, remove_shared
from tests.leftovers import every_process, prefixes, wait_for, words
from tests.network_namespace import HERE, THERE, network_namespace
from tests.ray_cluster import ADDRESS, RayCluster, RayNode

ON_SECOND = {
    "join": "lrl join",
    "supervisor": SUPERVISOR,
    **PARTS,
    "rank 1": "benchmarks.chaos.target",
}
"""The processes there, and a word of their command lines."""
MEETING_PORT = 29511
AGAIN_S = 2.0
"""Seconds after which somebody starts an ended command again."""


class SecondNode:
    """A machine behind a cable.

    Args:
        name: Of its network namespace.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.prefix = ["ip", "netns", "exec", name]
        self._network = os.stat(f"/run/netns/{name}").st_ino

    def cable(self, state: str) -> str:
        return f"ip -n {self.name} link set {self.name.removeprefix('lrl-')}t {state}"

    def process(self, part: str) -> psutil.Process:
        """Returns the process there that is this part; raises ValueError if there is none."""
        here = {one: " ".join(words(one)) for one in every_process() if self._has(one)}
        found = [one for one, said in here.items() if ON_SECOND[part] in said]
        if part != "supervisor":  # whose command line has the words of what it starts
            found = [one for one in found if SUPERVISOR not in here[one]]
        # A worker's command line is its parent's until it has named itself; and `ip netns exec` has
        # become its command.
        return min(found, key=lambda one: one.pid)

    def _has(self, process: psutil.Process) -> bool:
        try:
            return os.stat(f"/proc/{process.pid}/ns/net").st_ino == self._network
        except OSError:  # it has ended
            return False


class Command:
    """A command that somebody starts again whenever it has ended, until `close`."""

    def __init__(self, command: Sequence[str], target: Target) -> None:
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._keep, args=(command, target), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        self._thread.join()

    def _keep(self, command: Sequence[str], target: Target) -> None:
        while not self._over.is_set():
            process = start(command, target, "joined.log")
            while process.poll() is None and not self._over.wait(LOOK_S):
                pass
            if process.poll() is None:
                process.terminate()
                process.wait(60)
            self._over.wait(AGAIN_S)


def start(
    command: Sequence[str], target: Target, log: str, **variables: str
) -> subprocess.Popen[bytes]:
    with (target.folder / log).open("ab") as output:
        return subprocess.Popen(
            command,
            env=target.environment | variables,
            stdout=output,
            stderr=output,
            cwd=target.folder,
        )


class Beside:
    """What runs beside the trainer's process; one of each kind below."""

    launcher = "{}"
    """Settings of the run's launcher, as JSON."""
    variables: Mapping[str, str] = {}
    """Of the trainer's environment."""

    def launched(self, target: Target) -> None:
        """Starts what belongs to one launch of the run."""

    def ended(self) -> None:
        """Ends it."""


class Alone(Beside):
    """Nothing: the run has one machine."""


class GivenGenerators(Beside):
    """One generator on each node, each by a command that somebody types again when it has ended."""

    def __init__(self, node: SecondNode, token: str) -> None:
        self.variables = {"LRL_TOKEN": token}
        self._node = node
        self._commands = list[Command]()

    def launched(self, target: Target) -> None:
        program = str(Path(sys.executable).with_name("lrl"))
        own = [program, "join", f"http://{HERE}:{JOIN_PORT}", "--insecure", "--host"]
        for command in ([*own, HERE], [*self._node.prefix, *own, THERE]):
            self._commands.append(Command(command, target))

    def ended(self) -> None:
        while self._commands:
            self._commands.pop().close()


class SecondTrainer(Beside):
    """The other rank, as torchrun would start both."""

    def __init__(self, node: SecondNode) -> None:
        common = {
            "WORLD_SIZE": "2",
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "TORCHELASTIC_RUN_ID": "none",
        }
        common |= {"MASTER_ADDR": HERE, "MASTER_PORT": str(MEETING_PORT)}
        self.variables = common | {"RANK": "0", "GROUP_RANK": "0"}
        self._node = node
        self._process: subprocess.Popen[bytes] | None = None

    def launched(self, target: Target) -> None:
        command = [*self._node.prefix, *target.words]
        log = f"{target.output.stem}.rank-1"
        self._process = start(command, target, log, RANK="1", GROUP_RANK="1")

    def ended(self) -> None:
        if self._process is not None:
            self._process.wait(120)


class RayGenerators(Beside):
    """A Ray cluster with its head here: one generator on each node."""

    launcher = json.dumps({"address": ADDRESS, "placement_group": "STRICT_SPREAD"})

    def __init__(self, cluster: RayCluster) -> None:
        self.cluster = cluster

    def kill(self, lost: str) -> str:
        """Returns the shell command by which the `raylet` of the second node or the `head` is
        lost."""
        nodes = self.cluster.nodes
        found = (
            nodes[-1].processes("raylet/raylet")
            if lost == "raylet"
            else nodes[0].processes("gcs_server")
        )
        return f"kill -9 {' '.join(str(one.pid) for one in found)}"

    def start_again(self, lost: str) -> None:
        nodes = self.cluster.nodes
        if lost == "raylet":
            # Its generators end by themselves and leave nothing; only then is the rest killed.
            there = nodes[-1]
            wait_for(lambda: not there.processes(SUPERVISOR), WAIT_S, "the end of its generators")
            end_machine(there)
        else:
            for node in nodes:
                end_machine(node)
            self.cluster.start_head()
        self.cluster.add_node()


def end_machine(node: RayNode) -> None:
    """Kills all processes of a node, the supervisors too, and removes what they have in shared
    memory: it would be gone with the machine."""
    processes = node.processes()
    for process in processes:
        # One that starts would map more between the look and the end.
        with contextlib.suppress(psutil.NoSuchProcess):
            process.suspend()
    inodes = mapped(one.pid for one in processes)
    names = prefixes(processes)
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    node.close()
    remove_shared(names, inodes)


@contextmanager
def second_node(kind: str, token: str) -> Iterator[tuple[SecondNode, Beside]]:
    with network_namespace() as name:
        node = SecondNode(name)
        if kind != "ray":
            beside = GivenGenerators(node, token) if kind == "given" else SecondTrainer(node)
            try:
                yield node, beside
            finally:
                beside.ended()
            return
        with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
            cluster = RayCluster(name, Path(folder))
            try:
                cluster.add_node()
                yield node, RayGenerators(cluster)
            finally:
                for each in cluster.nodes:
                    each.close()
