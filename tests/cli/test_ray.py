"""`lrl ray` without Ray: its words, how its nodes are led to their end, what they print; the manifest
for Kubernetes; and its guard: whoever owned a command and however that one ends, the command may save
and nothing is left."""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import yaml

import lrl
from lrl.cli.main import main
from tests.leftovers import living, nothing_left, wait_for, words

pytest.importorskip("ray")
from lrl.cli import ray as cli  # noqa: E402

MANIFEST = Path(lrl.__file__).parent / "recipes" / "cluster" / "rayjob.yaml"
KILL, TERM, QUIT = int(signal.SIGKILL), int(signal.SIGTERM), int(signal.SIGQUIT)
SHORT_S = 0.3


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], cli.Request]]:
    """What would have gone to Ray."""
    found: list[tuple[list[str], cli.Request]] = []

    def run(words: Sequence[str], asked: cli.Request) -> int:
        found.append(([*words], asked))
        return 0

    monkeypatch.setattr(cli, "run", run)
    return found


def test_the_number_of_nodes_need_not_be_said_twice_and_a_member_has_its_own_words(
    asked: list[Any],
) -> None:
    own = ["--nodes", "3", "--gpus", "8", "--cpus", "4", "--resources", '{"h100": 1}']
    assert main(["ray", *own, "fit", "--config", "own"]) == 0
    assert main(["ray", "--gpus", "0", "lrl", "join", "http://far:7000"]) == 0
    (fit, three), (member, one) = asked
    assert fit == ["fit", "--config", "own", "--trainer.num_nodes", "3"]
    assert three.bundles == [{"CPU": 4.0, "GPU": 8.0, "h100": 1.0}] * 3
    assert member == ["join", "http://far:7000"] and one.bundles == [{"CPU": 1.0}]


def test_the_manifest_for_kubernetes_asks_for_what_its_command_asks_for(asked: list[Any]) -> None:
    manifest = yaml.safe_load(MANIFEST.read_text())
    assert (manifest["apiVersion"], manifest["kind"]) == ("ray.io/v1", "RayJob")
    program, *words = shlex.split(manifest["spec"]["entrypoint"])
    assert program == "lrl" and main(words) == 0
    (own, found), cluster = asked[0], manifest["spec"]["rayClusterSpec"]
    assert own[own.index("--trainer.devices") + 1] == str(found.gpus)
    (group,) = cluster["workerGroupSpecs"]
    assert {group["replicas"], group["minReplicas"], group["maxReplicas"]} == {found.nodes}
    (container,) = group["template"]["spec"]["containers"]
    assert int(container["resources"]["limits"]["nvidia.com/gpu"]) == found.gpus
    assert float(container["resources"]["limits"]["cpu"]) >= found.cpus
    head = cluster["headGroupSpec"]
    assert head["rayStartParams"]["num-cpus"] == "0"
    (stop,) = (one["value"] for one in head["template"]["spec"]["containers"][0]["env"])
    for spec in (head["template"]["spec"], group["template"]["spec"]):
        assert {one["name"] for one in spec["containers"][0]["volumeMounts"]} == {
            one["name"] for one in spec["volumes"]
        }
        assert min(int(stop), spec["terminationGracePeriodSeconds"]) > found.grace_s


class PlayedNode:
    """An actor whose process ends with `ends[signal]` at a signal, or by itself with the status that
    a read gives."""

    def __init__(self, ends: dict[int, int], *reads: int | None) -> None:
        self.ends = ends
        self.reads = iter(reads)
        self.signals: list[int] = []
        self.status: int | None = None
        self.read = SimpleNamespace(remote=lambda at: partial(self.look))  # not two are equal
        self.send = SimpleNamespace(remote=self._send)

    def look(self) -> tuple[bytes, int | None]:
        self.status = next(self.reads, self.status)
        return b"", self.status

    def _send(self, signum: int) -> None:
        self.signals.append(signum)
        self.status = self.ends.get(signum, self.status)


@pytest.fixture
def follow(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Follows played nodes; gives the exit status."""

    def wait(calls: list[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        time.sleep(0.01)
        return calls, []

    def run(actors: list[PlayedNode], received: list[int]) -> int:
        nodes = [
            cli.Node(f"node {number}", actor, prefix="") for number, actor in enumerate(actors)
        ]
        return cli.follow(nodes, received)

    played = SimpleNamespace(wait=wait, get=lambda call: call())
    monkeypatch.setattr(cli, "ray", played)
    monkeypatch.setattr(cli, "FAILED_S", SHORT_S)
    return run


@pytest.mark.parametrize(
    ("received", "signals", "status"), [([TERM], [TERM], 143), ([TERM, TERM], [TERM, QUIT], 137)]
)
def test_a_signal_reaches_all_nodes_once_and_rank_0s_status_is_the_runs(
    follow: Callable[..., int], received: list[int], signals: list[int], status: int
) -> None:
    last = received[-1] if len(received) == 1 else QUIT
    nodes = [PlayedNode({last: status}), PlayedNode({last: 1})]
    assert follow(nodes, received) == status
    assert [node.signals for node in nodes] == [signals, signals]


@pytest.mark.parametrize(("first", "status"), [(0, 1), (1, 2), (0, 0)])
def test_what_waits_for_a_node_that_has_ended_is_asked_to_end(
    follow: Callable[..., int], first: int, status: int
) -> None:
    """Rank 0 waited ten minutes for a node that did not find the prompts."""
    nodes = [PlayedNode({TERM: 0}), PlayedNode({TERM: 0})]
    nodes[first] = PlayedNode({}, None, None, status)
    assert follow(nodes, []) == status, "and not that of its own signal"
    assert nodes[1 - first].signals == [TERM]


def test_rank_0_may_write_for_as_long_as_it_likes_when_the_others_are_done(
    follow: Callable[..., int],
) -> None:
    nodes = [PlayedNode({}, *[None] * 50, 0), PlayedNode({}, 0)]
    assert follow(nodes, []) == 0
    assert nodes[0].signals == []


def test_lines_are_printed_whole_as_a_terminal_shows_them_with_the_number_of_their_node(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    node = cli.Node("node 1", None, prefix="[node 1] ")
    monkeypatch.setattr(cli, "ray", SimpleNamespace(get=lambda answer: answer))
    texts = [b"a li", b"ne\n", b"step 1\rstep 2\rstep 3   \r", b"\nand the", b" end"]
    assert all(node.take((text, None)) for text in texts)
    assert not node.take((b"", 0))
    assert capsys.readouterr().out.splitlines() == [
        "[node 1] a line",
        "[node 1] step 3   ",
        "[node 1] and the end",
    ]
    assert node.at == len(b"".join(texts))


# ---- the guard of a command

DEADLINE_S = 60.0
RUNS = "import signal, subprocess, sys, time; from lrl.system.processes import unbind_from_parent\n"
SAVES = """
import os
def save(signum, frame):
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    print("saving", flush=True)
    while not os.path.exists("{may_end}"):
        time.sleep(0.01)
    print("saved", flush=True)
    sys.exit(128 + signum)
signal.signal(signal.SIGTERM, save)
print("runs", flush=True)
while True:
    time.sleep(0.1)
"""
LEAVES = "subprocess.Popen(['sleep', '600'], start_new_session=True); print('runs', flush=True)"
HANGS = f"signal.signal(signal.SIGTERM, signal.SIG_IGN); {LEAVES}; time.sleep(600)"
LIVES_ON = "unbind_from_parent(); print('runs', flush=True); time.sleep(600)"

mark = pytest.fixture(nothing_left)
Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def start(tmp_path: Path, mark: str) -> Iterator[Start]:
    """Starts a guard of some code."""
    started = []

    def run(
        code: str, grace_s: float = DEADLINE_S, program: str = cli.__file__
    ) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-P", program, str(grace_s), sys.executable, "-c", RUNS + code]
        with (tmp_path / "output").open("wb") as file:
            started.append(subprocess.Popen(command, stdout=file, stderr=file))
        wait_for(lambda: "runs" in output(tmp_path), DEADLINE_S, "the command")
        return started[-1]

    yield run
    for one in started:
        one.kill()
        one.wait()


@pytest.fixture
def impatient(tmp_path: Path) -> str:
    """A guard that does not wait for what its command leaves."""
    program = tmp_path / "impatient.py"
    program.write_text(Path(cli.__file__).read_text().replace("BEHIND_S = 40.0", "BEHIND_S = 0.5"))
    return str(program)


def output(folder: Path) -> str:
    return (folder / "output").read_text()


@pytest.mark.parametrize(("signals", "status"), [([TERM], 143), ([KILL], -9), ([TERM, KILL], -9)])
def test_a_command_may_save_and_is_asked_once_though_its_owner_is_killed(
    start: Start, tmp_path: Path, signals: list[int], status: int
) -> None:
    guard = start(SAVES.format(may_end=tmp_path / "may end"))
    for signum in signals:
        guard.send_signal(signum)
        wait_for(lambda: "saving" in output(tmp_path), DEADLINE_S, "the first signal")
    (tmp_path / "may end").touch()
    assert guard.wait(DEADLINE_S) == status
    wait_for(lambda: "saved" in output(tmp_path), DEADLINE_S, "what it saves")
    assert output(tmp_path).split() == ["runs", "saving", "saved"]


@pytest.mark.parametrize(
    ("signals", "grace_s", "status"), [([KILL], 0.5, -9), ([TERM, QUIT], DEADLINE_S, 137)]
)
def test_a_command_that_does_not_end_is_killed_after_its_grace_or_by_a_second_request(
    start: Start, impatient: str, mark: str, signals: list[int], grace_s: float, status: int
) -> None:
    guard = start(HANGS, grace_s=grace_s, program=impatient)
    assert living(mark)
    for signum in signals:
        guard.send_signal(signum)
    assert guard.wait(DEADLINE_S) == status
    wait_for(lambda: not living(mark), DEADLINE_S, "its end")


def test_what_a_command_leaves_is_killed(start: Start, impatient: str) -> None:
    assert start(LEAVES, program=impatient).wait(DEADLINE_S) == 0


def test_a_rank_that_has_met_the_others_still_dies_with_its_guard(start: Start, mark: str) -> None:
    outer = start(LIVES_ON)
    (guard,) = psutil.Process(outer.pid).children()
    assert cli.__file__ in words(guard)
    guard.kill()
    wait_for(lambda: not living(mark), DEADLINE_S, "the command's end")
