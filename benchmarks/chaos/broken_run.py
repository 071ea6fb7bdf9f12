"""One run that is broken again and again: a fault comes when it is whole and has trained two steps
since the one before, and a run that a fault has ended is resumed.

    python -m benchmarks.chaos generators                     12 kills, 4 freezes, both at once
    python -m benchmarks.chaos generators --kills 1 --freezes 1     a rehearsal
    python -m benchmarks.chaos trainer                        20 kills
    python -m benchmarks.chaos trainer --kills 6 --environment lrl.quickstart.calculator.Calculator
    python -m benchmarks.chaos nodes                          needs root, for a network namespace
    python -m benchmarks.chaos nodes --places step --faults supervisor trainer

A fault comes in the middle of a step, of a sync, or of a checkpoint (`benchmarks/chaos/faults.py`);
of `trainer` the seed draws which. The second machine of `nodes` is a network namespace. Each has a
generator that somebody starts; on the second each kind of process is killed, and its cable is cut
for five seconds and until the generator is out.
"""

from __future__ import annotations

import logging
import random
import shutil
import subprocess
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from benchmarks import arguments, records
from benchmarks.arguments import Row
from benchmarks.chaos import faults
from benchmarks.chaos.faults import GENERATORS, OF_GENERATORS, PLACES
from benchmarks.chaos.journal import Line, account
from benchmarks.chaos.launch import WAIT_S, Target, TargetSettings
from benchmarks.chaos.second_node import SecondNode, second_node
from tests.network_namespace import HERE

log = logging.getLogger(__name__)

SHORT_S = 5.0
SHORTLY, FOR_GOOD = "cut for 5 s", "cut for good"
STEPS_BETWEEN = 2
OF_GENERATOR = ("join", "supervisor", "API server", "EngineCore")
"""Of the second node."""
OF_NODES = [*OF_GENERATOR, "reward worker", SHORTLY, FOR_GOOD, "trainer"]


def settings_of(
    groups: int, responses: int, capacity: int, slack: float = 1.0, **own: Any
) -> dict[str, Any]:
    """Returns an experiment's `own` settings, and those of its target; a machine with other work to
    do needs longer deadlines."""
    return {
        **own,
        "groups": (groups, "problems a step"),
        "responses": (responses, "to each"),
        "capacity": (capacity, "responses a generator writes at once"),
        "seed": (0, "of the run"),
        "lr": (5e-5, "learning rate"),
        "heartbeat_s": (5.0 * slack, "between two heartbeats"),
        "sync_deadline_s": (10.0 * slack, "of a phase of a sync"),
    }


def described(args: Namespace, **fixed: Any) -> Row:
    """Returns the settings of a target as a record has them."""
    names = ("groups", "responses", "capacity", "seed", "lr", "heartbeat_s", "sync_deadline_s")
    return arguments.chosen(args, *names) | fixed


def of_generators(args: Namespace) -> Iterator[Row]:
    asked = [[fault, "step"] for fault in faults.in_turn(args.kills, args.freezes)]
    yield {"faults_asked": asked, "settings": described(args)}


def of_trainer(args: Namespace) -> Iterator[Row]:
    draw = random.Random(args.seed)
    asked = [["trainer", draw.choice(list(PLACES))] for _ in range(args.kills)]
    own = arguments.chosen(args, "steps_per_epoch", "environment")
    yield {"faults_asked": asked, "settings": described(args, **own)}


def of_nodes(args: Namespace) -> Iterator[Row]:
    asked = [[fault, place] for place in args.places for fault in args.faults]
    yield {"faults_asked": asked, "settings": described(args, second_node=True)}


@dataclass(frozen=True)
class Scene:
    """One launch of the run, and its second machine."""

    target: Target
    node: SecondNode | None

    def command_of(self, fault: str) -> str:
        """Returns the shell command that makes a fault."""
        trainer = self.target.process.pid
        if fault in OF_GENERATORS:
            return faults.signal_to(fault, trainer)
        if fault == "trainer":
            return f"kill -9 {trainer}"
        if fault == "reward worker":
            return f"kill -9 {faults.children(trainer, 'spawn_main')[0].pid}"
        assert self.node is not None, fault
        if fault == SHORTLY:
            later = f"sleep {SHORT_S:g}; {self.node.cable('up')}"
            return f"{self.node.cable('down')}; ({later}) >/dev/null 2>&1 &"
        if fault == FOR_GOOD:
            return self.node.cable("down")
        return f"kill -9 {self.node.process(fault).pid}"

    def losses(self, since: int, fault: str) -> list[Line]:
        """Returns the losses that the fault has made, the first one that takes all it should out
        first."""
        _, _, numbers = OF_GENERATORS.get(fault, ("", "", (0,)))
        members = GENERATORS - len(numbers)
        return [one for one in self.target.lines("lost")[since:] if one["members"] <= members]


def measure(args: Namespace, missing: list[Row]) -> Iterator[Row]:
    for row in missing:
        host = HERE if "second_node" in row["settings"] else ""
        settings = TargetSettings(folder=str(args.folder.resolve()), host=host, **row["settings"])
        made = row | break_run(settings, row["faults_asked"])
        yield made
        ends = [made["left"], *(one["left"] for one in made["faults"] if one["ended"])]
        if left := [name for one in ends for name in (*one["processes"], *one["shared"])]:
            raise SystemExit(f"The run has left {', '.join(left)}.")


def break_run(settings: TargetSettings, asked: Sequence[Sequence[str]]) -> Row:
    started = time.monotonic()
    shutil.rmtree(settings.folder, ignore_errors=True)
    left, found = list(asked), list[Row]()
    leftovers = dict[str, Any]()
    whole = False
    with ExitStack() as stack:
        node = generators = None
        if settings.second_node:
            node, generators = stack.enter_context(second_node())
        while not whole:  # the last launch ends by itself
            with Target(settings) as target:
                if generators:
                    generators.launched(target)
                target.wait_for_steps(STEPS_BETWEEN, "its first steps")
                while left and target.runs:
                    found.append(measure_fault(Scene(target, node), *left.pop(0)))
                    log.info("%s", found[-1])
                if whole := target.runs:
                    target.stop()
                if generators:
                    generators.ended()
                leftovers = target.leftovers()
                if not whole:
                    found[-1] |= {"left": leftovers}
    seconds = round(time.monotonic() - started, 1)
    of_run = account(target.journal.refresh(), settings.steps_per_epoch * settings.groups)
    return {"faults": found, "seconds": seconds, "left": leftovers, **of_run}


def measure_fault(scene: Scene, fault: str, place: str) -> Row:
    """Has the run break itself at a place, and waits until it is whole again or has ended.

    Returns:
        `ended`: whether the run did, and `ended_s` after the fault. Else `lost_s` until a generator
        was evicted (of both the last one), None if none was; `whole_s` until all serve; `reissued`,
        the responses that continued on another generator.
    """
    target = scene.target
    lost, whole = (len(target.lines(event)) for event in ("lost", "whole"))
    before = target.lines("step")[-1]["reissued"]
    faults.give(target.folder, place, scene.command_of(fault))
    while faults.carried_out(target.folder) is None and target.runs:
        time.sleep(0.05)
    at = faults.carried_out(target.folder) or time.time()
    found: Row = {"fault": fault, "place": place, "ended": fault == "trainer"}
    if found["ended"]:
        status = target.process.wait(WAIT_S)
        return found | {"status": status, "ended_s": round(time.time() - at, 1)}
    if fault in (*OF_GENERATORS, *OF_GENERATOR, FOR_GOOD):
        target.wait_for(lambda: scene.losses(lost, fault), f"the loss ({fault})")
    if fault == FOR_GOOD and scene.node:
        subprocess.run(["sh", "-c", scene.node.cable("up")], check=True)
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


NOT_TOLD = {"faults", "faults_asked", "settings", "command", "versions"}


def table(made: Sequence[Row]) -> str:
    """Returns the outcome of each fault, and what became of each run's prompts."""
    found = []
    for record in made:
        lines = [(one["fault"], one["place"], outcome(one)) for one in record["faults"]]
        told = records.listed({name: record[name] for name in record.keys() - NOT_TOLD})
        found.append(f"{records.markdown(('fault', 'in', 'outcome'), lines)}\n\n{told}")
    return "\n\n".join(found)


def outcome(fault: Row) -> str:
    if fault["ended"]:
        left = [*fault["left"]["processes"], *fault["left"]["shared"]]
        return f"the run ended after {fault['ended_s']} s; left: {left or 'nothing'}; resumed"
    if fault["lost_s"] is None:
        return "no generator lost; the run continued"
    return (
        f"a generator lost after {fault['lost_s']} s, all serve after {fault['whole_s']} s; "
        f"{fault['reissued']} responses reissued"
    )


EXPERIMENTS = {
    "generators": (
        settings_of(
            *(4, 8, 16),
            kills=(12, "API server, EngineCore, Worker in turn; at last both EngineCores at once"),
            freezes=(4, "likewise, between the kills"),
        ),
        of_generators,
        measure,
    ),
    "trainer": (
        settings_of(
            *(16, 4, 4),
            kills=(20, "of the trainer"),
            steps_per_epoch=(30, "of the data set"),
            environment=("", "class path of what plays the episodes"),
        ),
        of_trainer,
        measure,
    ),
    "nodes": (
        settings_of(
            *(4, 8, 16),
            slack=2.0,
            places=(list(PLACES), "of the faults", PLACES),
            faults=(OF_NODES, "that are made", OF_NODES),
        ),
        of_nodes,
        measure,
    ),
}
