"""Breaks a run on two machines: each kind of process killed, the cable cut for five seconds and for
good.

    python -m benchmarks.chaos nodes --second given                      needs root, for a network namespace
    python -m benchmarks.chaos nodes --second ray trainer --places step  one phase alone

The second machine is a network namespace. With `given` and `ray` each machine has a generator of
that launcher; with `trainer` it has a second rank with a generator of its own. Each fault comes in
the middle of a step, of a sync, and of a checkpoint (`benchmarks/chaos/orders.py`), in one run
after another fault is over: when all generators serve again and two steps have been trained. A
fault that ends the run has it resumed from its checkpoint. "For good" is until the generator is
out, or the run has ended; then the cable is connected again.
"""

from __future__ import annotations

import argparse
import logging
import secrets
import shutil
import subprocess
import time
from dataclasses import dataclass
from typing import Any

from benchmarks import records
from benchmarks.chaos import orders
from benchmarks.chaos.faults import SUPERVISOR, reward_workers_of
from benchmarks.chaos.journal import accounted_for, surviving, told
from benchmarks.chaos.launch import WAIT_S, Target, TargetSettings, add_settings, settings_of
from benchmarks.chaos.second_node import (
    Beside,
    RayGenerators,
    SecondNode,
    kill_all,
    second_node,
    settings_words,
    suspend_all,
)
from lrl.generators.supervisor import mapped, remove_shared
from tests.leftovers import prefixes, wait_for
from tests.network_namespace import HERE
from tests.ray_cluster import RayNode

log = logging.getLogger(__name__)

SECONDS = ("given", "ray", "trainer")
SHORT_S = 5.0
STEPS_BETWEEN = 2
OF_GENERATOR = ("join", "supervisor", "API server", "EngineCore")
OF_RUN = {
    "given": ("trainer",),
    "ray": ("trainer",),
    "trainer": ("trainer", "rank 1", "cut for good"),
}
"""Faults that end the run."""
OF_RAY = ("raylet", "head")
"""Only with Ray, and in a step: a lost node, and a lost head, each of which is started again."""


@dataclass(frozen=True)
class Scene:
    """One launch of the run and its second machine."""

    kind: str
    target: Target
    node: SecondNode
    beside: Beside

    def words_of(self, fault: str) -> str:
        """Returns the shell command that makes a fault.

        Raises:
            RuntimeError: There is no such process.
        """
        if fault == "cut for 5 s":
            return (
                f"{self.node.cable('down')}; (sleep {SHORT_S:g}; {self.node.cable('up')}) "
                ">/dev/null 2>&1 &"
            )
        if fault == "cut for good":
            return self.node.cable("down")
        if fault == "trainer":
            return f"kill -9 {self.target.process.pid}"
        if fault == "reward worker":
            return f"kill -9 {reward_workers_of(self.target.process.pid)[0].pid}"
        if isinstance(self.beside, RayGenerators) and fault in OF_RAY:
            nodes = self.beside.cluster.nodes
            lost = (
                nodes[-1].processes("raylet/raylet")
                if fault == "raylet"
                else nodes[0].processes("gcs_server")
            )
            return f"kill -9 {' '.join(str(one.pid) for one in lost)}"
        if (process := self.node.process(fault)) is None:
            raise RuntimeError(f"the second node has no {fault}")
        return f"kill -9 {process.pid}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--second", nargs="+", choices=SECONDS, default=SECONDS, help="one run for each (all)"
    )
    parser.add_argument(
        "--places", nargs="+", choices=orders.PLACES, default=list(orders.PLACES), help="(all)"
    )
    parser.add_argument("--faults", nargs="+", help="(all)")
    add_settings(parser, groups=4, responses=8, capacity=16, lr=5e-5)
    parser.set_defaults(heartbeat_s=10.0, sync_deadline_s=30.0)


def run(args: argparse.Namespace) -> int:
    for kind in args.second:
        settings = settings_of(
            args,
            folder=str((args.folder / kind).resolve()),
            steps=-1,
            steps_per_epoch=0,
            schedule="constant",
            evaluate=False,
            second_node=kind,
            host=HERE,
        )
        faults = plan(kind, args.places, args.faults)
        described = {"faults_asked": [list(one) for one in faults], "settings": settings.described}
        record = records.measured(
            args.out,
            described,
            lambda s=settings, f=faults: measure(s, f) | {"command": args.command},
        )
        print(table(record), flush=True)
    return 0


def plan(kind: str, places: list[str], faults: list[str] | None) -> list[tuple[str, str]]:
    common = [*OF_GENERATOR, "reward worker", "cut for 5 s", "cut for good", "trainer"]
    common += ["rank 1"] if kind == "trainer" else []
    found = [(fault, place) for place in places for fault in common]
    found += [(fault, "step") for fault in OF_RAY if kind == "ray"]
    return [one for one in found if faults is None or one[0] in faults]


def measure(settings: TargetSettings, faults: list[tuple[str, str]]) -> dict[str, Any]:
    started = time.monotonic()
    token = secrets.token_hex(16)
    kind = settings.second_node
    shutil.rmtree(settings.folder, ignore_errors=True)
    found = []
    leftovers = dict[str, Any]()
    whole = False
    with second_node(kind, token) as (node, beside):
        settings = TargetSettings(**vars(settings) | {"launcher": settings_words(beside)})
        while not whole:  # the last launch ends by itself
            with Target(settings, variables=beside.variables) as target:
                beside.launched(target)
                scene = Scene(kind, target, node, beside)
                target.wait_for(
                    lambda: len(target.lines("step")) >= STEPS_BETWEEN, WAIT_S, "its first steps"
                )
                while faults and target.process.poll() is None:
                    found.append(measure_fault(scene, *faults.pop(0)))
                    log.info("%s", found[-1])
                if whole := target.process.poll() is None:
                    (target.folder / "stop").touch()
                    target.wait(WAIT_S)
                beside.ended()
                leftovers = target.leftovers()
                if not whole:
                    found[-1] |= {"left": leftovers}
    lines = target.journal.refresh()
    lineage = surviving([line for line in lines if line["event"] == "step"])
    end = next(line for line in reversed(lines) if line["event"] == "end")
    return {
        "faults": found,
        "seconds": round(time.monotonic() - started, 1),
        "left": leftovers,
        "launches": sum(line["event"] == "launch" for line in lines),
        "steps_done": len(lineage),
        "trained": accounted_for(lineage, end),
        "given_up": end["given_up"],
        "lag_max": max(line["lag_max"] for line in lineage),
    }


def measure_fault(scene: Scene, fault: str, place: str) -> dict[str, Any]:
    """Has the run break itself at a place, and waits until it is whole again or has ended.

    Returns:
        `ended`: whether the run did, and `ended_s` after the fault; else `lost_s` until a generator
            was evicted, None
        if none was, and `whole_s` until all serve.
    """
    target, ends = scene.target, fault in OF_RUN[scene.kind]
    lost, whole = (len(target.lines(event)) for event in ("lost", "whole"))
    orders.give(target.folder, place, scene.words_of(fault))
    while orders.carried_out(target.folder) is None:
        time.sleep(0.05)
        if target.process.poll() is not None:
            break
    at = orders.carried_out(target.folder) or time.time()
    found: dict[str, Any] = {"fault": fault, "place": place, "ended": ends}
    if ends:
        status = target.process.wait(WAIT_S)
        ended_s = round(time.time() - at, 1)
        subprocess.run(["sh", "-c", scene.node.cable("up")], check=True)
        return found | {"status": status, "ended_s": ended_s}
    if fault in OF_GENERATOR or fault == "cut for good":
        target.wait_for(lambda: len(target.lines("lost")) > lost, WAIT_S, f"the loss ({fault})")
    subprocess.run(
        ["sh", "-c", scene.node.cable("up")], check=True
    ) if fault == "cut for good" else None
    if isinstance(scene.beside, RayGenerators) and fault in OF_RAY:
        start_again(scene.beside, fault)
    # What a short fault does shows by then.
    quiet = time.time() + SHORT_S + target_heartbeat(target)
    target.wait_for(
        lambda: time.time() > quiet and is_whole(target, lost, whole),
        WAIT_S,
        f"the return ({fault})",
    )
    last = len(target.lines("step")) + STEPS_BETWEEN
    target.wait_for(
        lambda: len(target.lines("step")) >= last, WAIT_S, f"the steps after it ({fault})"
    )
    losses = target.lines("lost")[lost:]
    returns = target.lines("whole")[whole:]
    return found | {
        "lost_s": round(losses[0]["time"] - at, 1) if losses else None,
        "whole_s": round(returns[-1]["time"] - at, 1) if returns else None,
        "why": losses[0]["why"] if losses else "",
    }


def is_whole(target: Target, lost: int, whole: int) -> bool:
    losses = target.lines("lost")[lost:]
    returns = target.lines("whole")[whole:]
    return not losses or bool(returns and returns[-1]["time"] > losses[-1]["time"])


def target_heartbeat(target: Target) -> float:
    word = next(word for word in target.words if word.startswith("--heartbeat_s="))
    return float(word.partition("=")[2])


def start_again(beside: RayGenerators, fault: str) -> None:
    cluster = beside.cluster
    if fault == "raylet":
        # Its generators end by themselves and leave nothing; only then is the rest killed.
        wait_for(
            lambda: not cluster.nodes[-1].processes(SUPERVISOR), WAIT_S, "the end of its generators"
        )
        end_machine(cluster.nodes[-1])
        cluster.add_node()
        return
    for node in cluster.nodes:
        end_machine(node)
    cluster.start_head()
    cluster.add_node()


def end_machine(node: RayNode) -> None:
    """Kills all processes of a node, the supervisors too, and removes what they have in shared
    memory: it would be gone with the machine."""
    processes = node.processes()
    suspend_all(processes)  # a generator that starts would map more between the look and the end
    inodes = mapped(one.pid for one in processes)
    names = prefixes(processes)
    kill_all(processes)
    node.close()
    remove_shared(names, inodes)


def table(record: dict[str, Any]) -> str:
    lines = []
    for one in record["faults"]:
        if one["ended"]:
            outcome = f"the run ended after {one['ended_s']} s; left: {left(one)}; resumed"
        elif one["lost_s"] is None:
            outcome = "no generator lost; the run went on"
        else:
            outcome = (
                f"a generator lost after {one['lost_s']} s, all serve after {one['whole_s']} s"
            )
        kind = record["settings"]["second_node"]
        lines.append((kind, one["fault"], one["place"], outcome))
    return (
        f"{records.markdown(('second node', 'fault', 'in', 'outcome'), lines)}\n\n"
        f"{record['launches']} launches, {record['steps_done']} steps, {told(record['trained'])}, "
        f"{len(record['given_up'])} given up, largest lag {record['lag_max']}, left at the end: "
        f"{left(record)}, {record['seconds'] / 60:.0f} minutes"
    )


def left(found: dict[str, Any]) -> str:
    return ", ".join(found["left"]["processes"] + found["left"]["shared"]) or "nothing"
