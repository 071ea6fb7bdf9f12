"""One run that is broken again and again: each fault comes when it is whole and has trained two steps
since the one before, and a run that a fault has ended is resumed."""

from __future__ import annotations

import logging
import secrets
import shutil
import subprocess
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from benchmarks import records
from benchmarks.arguments import Row
from benchmarks.chaos import faults
from benchmarks.chaos.faults import GENERATORS, OF_GENERATORS
from benchmarks.chaos.journal import Line, account, told
from benchmarks.chaos.launch import WAIT_S, Target, TargetSettings
from benchmarks.chaos.second_node import Alone, Beside, RayGenerators, SecondNode, second_node
from tests.network_namespace import HERE

log = logging.getLogger(__name__)

SHORT_S = 5.0
SHORTLY, FOR_GOOD = "cut for 5 s", "cut for good"
STEPS_BETWEEN = 2
OF_GENERATOR = ("join", "supervisor", "API server", "EngineCore")
"""Of the second node."""
OF_RUN = {
    "": (),
    "given": ("trainer",),
    "ray": ("trainer",),
    "trainer": ("trainer", "rank 1", FOR_GOOD),
}
"""Faults that end the run, by what runs on the second node."""
OF_RAY = ("raylet", "head")
"""Only with Ray, and in a step: a lost node, and a lost head, each of which is started again."""


@dataclass(frozen=True)
class Scene:
    """One launch of the run, its second machine, and what runs beside the trainer."""

    target: Target
    node: SecondNode | None
    beside: Beside

    @property
    def kind(self) -> str:
        return self.target.settings.second_node

    def command_of(self, fault: str) -> str:
        """Returns the shell command that makes a fault."""
        trainer = self.target.process.pid
        if fault in OF_GENERATORS:
            return faults.signal_to(fault, trainer)
        if fault == "trainer":
            return f"kill -9 {trainer}"
        if fault == "reward worker":
            return f"kill -9 {faults.children(trainer, 'spawn_main')[0].pid}"
        if isinstance(self.beside, RayGenerators) and fault in OF_RAY:
            return self.beside.kill(fault)
        assert self.node is not None, fault
        if fault == SHORTLY:
            later = f"sleep {SHORT_S:g}; {self.node.cable('up')}"
            return f"{self.node.cable('down')}; ({later}) >/dev/null 2>&1 &"
        if fault == FOR_GOOD:
            return self.node.cable("down")
        return f"kill -9 {self.node.process(fault).pid}"

    def connect(self) -> None:
        if self.node is not None:
            subprocess.run(["sh", "-c", self.node.cable("up")], check=True)

    def losses(self, since: int, fault: str) -> list[Line]:
        """Returns the losses that the fault has made, the first one that takes all it should out
        first."""
        _, _, numbers = OF_GENERATORS.get(fault, ("", "", (0,)))
        members = GENERATORS - len(numbers)
        return [one for one in self.target.lines("lost")[since:] if one["members"] <= members]


def measure(args: Namespace, missing: list[Row]) -> Iterator[Row]:
    for row in missing:
        kind = row["settings"].get("second_node", "")
        folder = str((args.folder / kind).resolve())
        settings = TargetSettings(folder=folder, host=HERE if kind else "", **row["settings"])
        yield row | break_run(settings, row["faults_asked"])


def break_run(settings: TargetSettings, asked: Sequence[Sequence[str]]) -> Row:
    started = time.monotonic()
    shutil.rmtree(settings.folder, ignore_errors=True)
    left, found = list(asked), list[Row]()
    leftovers = dict[str, Any]()
    whole = False
    with ExitStack() as stack:
        node, beside = None, Alone()
        if settings.second_node:
            scene = second_node(settings.second_node, secrets.token_hex(16))
            node, beside = stack.enter_context(scene)
        settings = replace(settings, launcher=beside.launcher)
        while not whole:  # the last launch ends by itself
            with Target(settings, variables=beside.variables) as target:
                beside.launched(target)
                target.wait_for_steps(STEPS_BETWEEN, "its first steps")
                while left and target.process.poll() is None:
                    found.append(measure_fault(Scene(target, node, beside), *left.pop(0)))
                    log.info("%s", found[-1])
                if whole := target.process.poll() is None:
                    (target.folder / "stop").touch()
                    target.wait()
                beside.ended()
                leftovers = target.leftovers()
                if not whole:
                    found[-1] |= {"left": leftovers}
    seconds = round(time.monotonic() - started, 1)
    lines = target.journal.refresh()
    return {"faults": found, "seconds": seconds, "left": leftovers, **account(lines)}


def measure_fault(scene: Scene, fault: str, place: str) -> Row:
    """Has the run break itself at a place, and waits until it is whole again or has ended.

    Returns:
        `ended`: whether the run did, and `ended_s` after the fault. Else `lost_s` until a generator
        was evicted (of both the last one), None if none was; `whole_s` until all serve; `reissued`,
        the responses that continued on another generator.
    """
    target, ends = scene.target, fault in OF_RUN[scene.kind]
    lost, whole = (len(target.lines(event)) for event in ("lost", "whole"))
    before = target.lines("step")[-1]["fleet"]["reissued"]
    faults.give(target.folder, place, scene.command_of(fault))
    while faults.carried_out(target.folder) is None and target.process.poll() is None:
        time.sleep(0.05)
    at = faults.carried_out(target.folder) or time.time()
    found: Row = {"fault": fault, "place": place, "ended": ends}
    if ends:
        status = target.process.wait(WAIT_S)
        ended_s = round(time.time() - at, 1)
        scene.connect()
        return found | {"status": status, "ended_s": ended_s}
    if fault in (*OF_GENERATORS, *OF_GENERATOR, FOR_GOOD):
        target.wait_for(lambda: scene.losses(lost, fault), f"the loss ({fault})")
    if fault == FOR_GOOD:
        scene.connect()
    if isinstance(scene.beside, RayGenerators) and fault in OF_RAY:
        scene.beside.start_again(fault)
    # What a short fault does shows by then.
    quiet = time.time() + SHORT_S + target.settings.heartbeat_s

    def is_whole() -> bool:
        losses, returns = target.lines("lost")[lost:], target.lines("whole")[whole:]
        again = returns and returns[-1]["time"] > losses[-1]["time"] if losses else True
        return bool(again) and time.time() > quiet

    target.wait_for(is_whole, f"the return ({fault})")
    target.wait_for_steps(STEPS_BETWEEN, f"the steps after it ({fault})")
    losses, returns = scene.losses(lost, fault), target.lines("whole")[whole:]
    return found | {
        "lost_s": round(losses[0]["time"] - at, 1) if losses else None,
        "whole_s": round(returns[-1]["time"] - at, 1) if returns else None,
        "reissued": returns[-1]["reissued"] - before if returns else 0,
        "why": losses[0]["why"] if losses else "",
    }


def table(made: Sequence[Row]) -> str:
    return "\n\n".join(map(table_of_run, made))


def table_of_run(record: Row) -> str:
    lines = []
    for one in record["faults"]:
        if one["ended"]:
            outcome = f"the run ended after {one['ended_s']} s; left: {left(one)}; resumed"
        elif one["lost_s"] is None:
            outcome = "no generator lost; the run continued"
        else:
            outcome = (
                f"a generator lost after {one['lost_s']} s, all serve after {one['whole_s']} s; "
                f"{one['reissued']} responses reissued"
            )
        lines.append((one["fault"], one["place"], outcome))
    title = f"second node: {record['settings'].get('second_node', 'none')}"
    accuracy = "" if record["accuracy"] is None else f", accuracy {record['accuracy']:.3f}"
    return (
        f"{records.markdown((f'fault ({title})', 'in', 'outcome'), lines)}\n\n{told(record)}"
        f"{accuracy}, left at the end: {left(record)}, {record['seconds'] / 60:.0f} minutes"
    )


def left(found: Row) -> str:
    return ", ".join(found["left"]["processes"] + found["left"]["shared"]) or "nothing"
