"""The second machine of a run, a network namespace: its processes, its cable, and what runs on
it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

from benchmarks.chaos.faults import PARTS, SUPERVISOR
from benchmarks.chaos.launch import JOIN_PORT, LOOK_S, Target
from tests.leftovers import every_process, words
from tests.network_namespace import HERE, THERE, network_namespace

ON_SECOND = {"join": "lrl join", "supervisor": SUPERVISOR, **PARTS}
"""The processes there, and a word of their command lines."""
AGAIN_S = 2.0
"""Seconds after which somebody starts an ended command again."""


class SecondNode:
    """A machine behind a cable: a network namespace of this name."""

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


class GivenGenerators:
    """One generator on each node, each by a command that somebody types again when it has ended."""

    def __init__(self, node: SecondNode) -> None:
        self._node = node
        self._over = threading.Event()
        self._threads: list[threading.Thread] = []

    def launched(self, target: Target) -> None:
        """Starts both, for one launch of the run."""
        program = str(Path(sys.executable).with_name("lrl"))
        own = [program, "join", f"http://{HERE}:{JOIN_PORT}", "--insecure", "--host"]
        self._over.clear()
        for command in ([*own, HERE], [*self._node.prefix, *own, THERE]):
            keeps = threading.Thread(target=self._keep, args=(command, target), daemon=True)
            keeps.start()
            self._threads.append(keeps)

    def ended(self) -> None:
        self._over.set()
        while self._threads:
            self._threads.pop().join()

    def _keep(self, command: Sequence[str], target: Target) -> None:
        while not self._over.is_set():
            with (target.folder / "joined.log").open("ab") as output:
                process = subprocess.Popen(
                    command,
                    env=target.environment,
                    stdout=output,
                    stderr=output,
                    cwd=target.folder,
                )
            while process.poll() is None and not self._over.wait(LOOK_S):
                pass
            if process.poll() is None:
                process.terminate()
                process.wait(60)
            self._over.wait(AGAIN_S)


@contextmanager
def second_node() -> Iterator[tuple[SecondNode, GivenGenerators]]:
    with network_namespace() as name:
        node = SecondNode(name)
        generators = GivenGenerators(node)
        try:
            yield node, generators
        finally:
            generators.ended()
