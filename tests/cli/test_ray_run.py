"""The nodes of a run of `lrl ray`: which are refused, what they print, how they are led to their end.

The nodes and Ray are played.
"""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray")
from lrl.cli import ray_node, ray_run  # noqa: E402
from lrl.errors import RayRunError  # noqa: E402

INT, TERM, KILL = int(signal.SIGINT), int(signal.SIGTERM), int(signal.SIGKILL)
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
        nodes = [ray_run.Node(number, actor) for number, actor in enumerate(actors)]
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
    monkeypatch.setattr(ray_run, "SILENT_S", SHORT_S)
    assert follow([PlayedNode({TERM: 143}), PlayedNode({})], [TERM, TERM], LONG_S) == 143


def test_a_lost_node_behind_a_signal_does_not_change_the_status(
    follow: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_run, "SILENT_S", SHORT_S)
    assert follow([PlayedNode({INT: 130}), PlayedNode({}, silent=True)], [INT], LONG_S) == 130


def node(number: int, **found: Any) -> ray_run.Node:
    same = ray_node.versions(metadata.version("lrl"))
    place = {"host": f"host{number}", "address": f"10.0.0.{number + 7}", "versions": same}
    return ray_run.Node(number, None, **place | found)


@pytest.mark.parametrize(
    ("second", "reason"),
    [
        (
            node(1, versions="Python 3.9, lrl missing"),
            "On node 1 (host1, 10.0.0.8) Ray has Python 3.9, lrl missing, and here is Python",
        ),
        (
            node(1, address="127.0.0.1"),
            "Ray has 127.0.0.1 as the address of host1, which other nodes do not reach",
        ),
    ],
)
def test_a_node_on_which_the_run_cannot_work_is_named(second: ray_run.Node, reason: str) -> None:
    ray_run.check([node(0), node(1)])
    with pytest.raises(RayRunError, match=re.escape(reason)):
        ray_run.check([node(0), second])


def test_whole_lines_are_printed_as_a_terminal_shows_them_with_the_number_of_their_node(
    capsys: pytest.CaptureFixture[str],
) -> None:
    one = node(1)
    for text in (b"a li", b"ne\n\n", b"step 1\rstep 2", b"\rstep 3   \r", b"\nand the", b" end"):
        one.take(text)
    one.take(b"", last=True)
    assert capsys.readouterr().out.splitlines() == [
        "[node 1] a line",
        "[node 1] step 2",
        "[node 1] step 3",
        "[node 1] and the end",
    ]
    assert one.at == len(b"a line\n\nstep 1\rstep 2\rstep 3   \r\nand the end")
