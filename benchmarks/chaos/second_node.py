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

from benchmarks.chaos.faults import PARTS, SUPERVISOR, words
from benchmarks.chaos.launch import JOIN_PORT, LOOK_S, Target
from tests.network_namespace import HERE, THERE, network_namespace
from tests.ray_cluster import ADDRESS, RayCluster

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

    def process(self, part: str) -> psutil.Process | None:
        here = {one: " ".join(words(one)) for one in psutil.process_iter() if self._has(one)}
        found = [one for one, said in here.items() if ON_SECOND[part] in said]
        if part != "supervisor":  # whose command line has the words of what it starts
            found = [one for one in found if SUPERVISOR not in here[one]]
        # A worker's command line is its parent's until it has named itself; and `ip netns exec` has
        # become its command.
        return min(found, key=lambda one: one.pid, default=None)

    def _has(self, process: psutil.Process) -> bool:
        try:
            return os.stat(f"/proc/{process.pid}/ns/net").st_ino == self._network
        except OSError:  # it has ended
            return False


class Command:
    """A command that somebody starts again whenever it has ended, until `close`."""

    def __init__(self, words: Sequence[str], environment: Mapping[str, str], folder: Path) -> None:
        self._words = words
        self._environment = environment
        self._folder = folder
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._keep, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        self._thread.join()

    def _keep(self) -> None:
        while not self._over.is_set():
            with (self._folder / "joined.log").open("ab") as output:
                process = subprocess.Popen(
                    self._words,
                    env=self._environment,
                    stdout=output,
                    stderr=output,
                    cwd=self._folder,
                )
            while process.poll() is None and not self._over.wait(LOOK_S):
                pass
            if process.poll() is None:
                process.terminate()
                process.wait(60)
            self._over.wait(AGAIN_S)


class Beside:
    """What runs beside the trainer's process; one of each kind below."""

    launcher: Mapping[str, object] = {}
    """Settings of the run's launcher."""
    variables: Mapping[str, str] = {}
    """Of the trainer's environment."""

    def launched(self, target: Target) -> None:
        pass

    def ended(self) -> None:
        pass


class GivenGenerators(Beside):
    """One generator on each node, each by a command that somebody types again when it has ended."""

    def __init__(self, node: SecondNode, token: str) -> None:
        self.variables = {"LRL_TOKEN": token}
        self._node = node
        self._commands = list[Command]()

    def launched(self, target: Target) -> None:
        program = str(Path(sys.executable).with_name("lrl"))
        own = [program, "join", f"http://{HERE}:{JOIN_PORT}", "--insecure", "--host"]
        for words_ in ([*own, HERE], [*self._node.prefix, *own, THERE]):
            self._commands.append(Command(words_, target.environment, target.folder))

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
        self._common = common | {"MASTER_ADDR": HERE, "MASTER_PORT": str(MEETING_PORT)}
        self.variables = self._common | {"RANK": "0", "GROUP_RANK": "0"}
        self._node = node
        self._process = None

    def launched(self, target: Target) -> None:
        environment = target.environment | {"RANK": "1", "GROUP_RANK": "1"}
        with target.output.with_suffix(".rank-1").open("wb") as output:
            self._process = subprocess.Popen(
                [*self._node.prefix, *target.words],
                env=environment,
                stdout=output,
                stderr=output,
                cwd=target.folder,
            )

    def ended(self) -> None:
        if self._process is not None:
            self._process.wait(120)


class RayGenerators(Beside):
    """A Ray cluster with its head here: one generator on each node."""

    launcher = {"address": ADDRESS}  # a node has one core

    def __init__(self, cluster: RayCluster) -> None:
        self.cluster = cluster


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


def settings_words(beside: Beside) -> str:
    return json.dumps(beside.launcher)


def suspend_all(processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.suspend()


def kill_all(processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
