"""How the nodes of a run of `lrl ray` are led to their end. The nodes and Ray are played."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest

pytest.importorskip("ray")
from lrl.cli import ray_run  # noqa: E402

TERM, KILL = int(signal.SIGTERM), int(signal.SIGKILL)
SHORT_S, LONG_S = 0.3, 60.0


class PlayedNode:
    """An actor whose process ends with `ends[signal]` at a signal, or by itself with `status` after
    some reads."""

    def __init__(
        self, ends: dict[int, int], status: int | None = None, reads: int = 3, silent: bool = False
    ) -> None:
        self.ends = ends
        self.status_then = status
        self.reads = reads
        self.silent = silent
        self.signals: list[int] = []
        self.status: int | None = None
        self.read = SimpleNamespace(remote=self._read)
        self.send = SimpleNamespace(remote=self._send)

    def _read(self, at: int) -> Call:
        self.reads -= 1
        if self.reads == 0 and self.status_then is not None:
            self.status = self.status_then
        return Call(self)

    def _send(self, signum: int) -> None:
        self.signals.append(signum)
        self.status = self.ends.get(signum, self.status)


class Call:
    """A call of `read`; not two of them are equal."""

    def __init__(self, node: PlayedNode) -> None:
        self.node = node


@pytest.fixture
def follow(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Follows played nodes; gives the exit status."""

    def wait(calls: list[Call], timeout: float) -> tuple[list[Call], list[Call]]:
        time.sleep(0.01)
        return [call for call in calls if not call.node.silent], []

    def run(actors: list[PlayedNode], received: list[int], grace_s: float) -> int:
        nodes = [ray_run.Node(number, actor, True) for number, actor in enumerate(actors)]
        return ray_run.RunMonitor(nodes, received, grace_s).follow()

    monkeypatch.setattr(
        ray_run, "ray", SimpleNamespace(wait=wait, get=lambda call: (b"", call.node.status))
    )
    return run


def test_a_signal_reaches_all_nodes_once_and_rank_0s_status_is_the_runs(
    follow: Callable[..., int],
) -> None:
    nodes = [PlayedNode({TERM: 143}), PlayedNode({TERM: 1})]
    assert follow(nodes, [TERM], LONG_S) == 143
    assert [node.signals for node in nodes] == [[TERM], [TERM]]


def test_a_second_signal_kills(follow: Callable[..., int]) -> None:
    nodes = [PlayedNode({KILL: 137}), PlayedNode({KILL: 137})]
    assert follow(nodes, [TERM, TERM], LONG_S) == 137
    assert [node.signals for node in nodes] == [[TERM, KILL], [TERM, KILL]]


@pytest.mark.parametrize("first", [0, 1])
def test_what_hangs_after_the_end_of_another_is_killed_after_its_grace(
    follow: Callable[..., int], first: int
) -> None:
    nodes = [PlayedNode({KILL: 137}), PlayedNode({KILL: 137})]
    nodes[first] = PlayedNode({}, status=1)
    assert follow(nodes, [], SHORT_S) == (1 if first == 0 else 137)
    assert nodes[1 - first].signals == [KILL]


def test_what_waits_for_a_node_that_has_failed_is_asked_to_end(
    follow: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 waited ten minutes for a node that did not find the prompts."""
    monkeypatch.setattr(ray_run, "FAILED_S", SHORT_S)
    nodes = [PlayedNode({TERM: 143}), PlayedNode({}, status=2)]
    assert follow(nodes, [], LONG_S) == 2, "and not rank 0's 143"
    assert nodes[0].signals == [TERM]


def test_rank_0_may_write_for_as_long_as_it_likes_when_the_others_are_done(
    follow: Callable[..., int],
) -> None:
    nodes = [PlayedNode({KILL: 137}, status=0, reads=100), PlayedNode({}, status=0)]
    assert follow(nodes, [], SHORT_S) == 0
    assert nodes[0].signals == []


def test_a_node_that_does_not_answer_is_lost_and_the_others_are_asked_to_end(
    follow: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ray_run, "SILENT_S", SHORT_S)
    nodes = [PlayedNode({TERM: 143}, reads=10_000), PlayedNode({}, silent=True)]
    assert follow(nodes, [], LONG_S) == 1
    assert nodes[0].signals == [TERM]
    assert (
        "is lost: it has not answered for 0 s. The run ends; start it again"
        in capsys.readouterr().err
    )


def test_what_outlasts_sigkill_is_given_up(
    follow: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_run, "KILLED_S", SHORT_S)
    assert follow([PlayedNode({TERM: 143}), PlayedNode({})], [TERM, TERM], LONG_S) == 143
