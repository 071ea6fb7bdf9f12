"""The Ray driver of a launcher: a separate program next to the trainer.

Ray ends the process of a driver when the head of its cluster is gone for a minute, and takes
SIGTERM from it. Neither may happen to a trainer. So this program, and not the trainer, knows Ray;
it ends with its standard input.

    trainer  -- {"start": N, "words": [...], "variables": {...}} or {"stop": N} -->  driver  -->  a task on some node
    trainer  <-- {"nodes": 2}, {"waits": "..."} or {"ended": N, "said": "..."} ----  driver

N is the name of a job.

Imports nothing of lrl on this machine: it starts in the time that Ray needs. What runs in the
cluster is sent along (by value), so the nodes need lrl's package and nothing of this file.
"""

import argparse
import json
import logging
import queue
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

POLL_S = 0.2
END_S = 20.0
"""Seconds that a task has to end after each request."""
PLACING = ("QUEUED", "SCHEDULING_STARTED")
"""Ray's states of a placement group while it asks nodes to reserve its bundles, which takes
milliseconds."""
PLACING_S = 20.0
"""Longest wait for the end of that, in seconds."""


def serve(words: Sequence[str], variables: dict[str, str]) -> str:
    """Runs `lrl` with these arguments on a node; returns the end of its output.

    It ends with the task's process, whatever ends that: the kernel kills it, and its own supervisor
    then ends vLLM. After the loss of a raylet Ray kills the children of its tasks, but nothing below
    them: a supervisor in this place was killed, and the generator served on.
    """
    import os
    import subprocess
    import sys
    import tempfile
    from pathlib import Path

    program = Path(sys.executable).with_name("lrl")
    if not program.exists():
        return (
            f"there is no lrl next to {sys.executable} on node {os.uname().nodename}: install it "
            "there"
        )
    from lrl.system.processes import bound_to_this_process

    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            bound_to_this_process([str(program), *words]),
            env=os.environ | variables,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            process.wait()
        finally:  # Ray cancels a task by an exception
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        output.seek(0)
        lines = output.read().decode(errors="replace").splitlines()[-20:]
    return "\n".join([f"on node {os.uname().nodename}:", *lines])


class Driver:
    """The tasks, one in each bundle of a placement group."""

    def __init__(self, bundles: list[dict[str, float]], strategy: str) -> None:
        self.bundles = bundles
        self.strategy = strategy
        self.group: PlacementGroup = placement_group(bundles, strategy=strategy)
        self._tasks: dict[str, tuple[int, Any]] = {}  # name -> bundle and its future
        self._ends: dict[str, float] = {}  # of those to stop: when it is forced
        self._waits = ""

    def obey(self, order: dict[str, Any]) -> None:
        """Starts or stops a task."""
        if "start" in order:
            used = {bundle for bundle, _ in self._tasks.values()}
            bundle = next(each for each in range(len(self.bundles)) if each not in used)
            self._tasks[order["start"]] = (bundle, self._start(bundle, order))
        elif (name := order["stop"]) in self._tasks:
            ray.cancel(self._tasks[name][1])
            self._ends.setdefault(name, time.monotonic() + END_S)

    def poll(self) -> None:
        """Reports the ended tasks, and the resources that the others wait for."""
        for name, (_, future) in list(self._tasks.items()):
            if ray.wait([future], timeout=0)[0]:
                self._ended(name, task_output(future))
            elif time.monotonic() > self._ends.get(name, float("inf")) + END_S:
                self._ended(name, "Ray has not ended it; its node does not answer")
            elif time.monotonic() > self._ends.get(name, float("inf")):
                ray.cancel(future, force=True)
        if (waits := what_is_missing(self.group, self.bundles, self.strategy)) != self._waits:
            self._waits = waits
            report(waits=waits)

    def close(self) -> None:
        """Ends all tasks."""
        for name in self._tasks:
            self.obey({"stop": name})
        while self._tasks:
            self.poll()
            time.sleep(POLL_S)
        remove(self.group)

    def _start(self, bundle: int, order: dict[str, Any]) -> Any:
        where = in_bundle(self.group, bundle, self.bundles[bundle])
        task = ray.remote(serve).options(name=f"lrl-{order['start']}", max_retries=0, **where)
        return task.remote(order["words"], order["variables"])

    def _ended(self, name: str, text: str) -> None:
        del self._tasks[name]
        self._ends.pop(name, None)
        report(ended=name, said=text)


def in_bundle(group: PlacementGroup, number: int, bundle: dict[str, float]) -> dict[str, Any]:
    """Returns Ray's options for a task or an actor that has all of a bundle of a placement
    group."""
    resources = dict(bundle)
    return {
        "num_cpus": resources.pop("CPU", 0),
        "num_gpus": resources.pop("GPU", 0),
        "resources": resources,
        "scheduling_strategy": PlacementGroupSchedulingStrategy(
            group, placement_group_bundle_index=number
        ),
    }


def remove(group: PlacementGroup) -> None:
    """Removes a placement group, but not while Ray places it.

    What a node has reserved by then may stay reserved for ever, also after the end of its driver:
    so two cores were lost in twenty removals, and later runs waited for a place in vain (Ray 2.60;
    ray-project/ray, issue 64693).
    """
    end = time.monotonic() + PLACING_S
    while (
        placement_group_table(group)["stats"]["scheduling_state"] in PLACING
        and time.monotonic() < end
    ):
        time.sleep(0.01)
    remove_placement_group(group)


def what_is_missing(group: PlacementGroup, bundles: list[dict[str, float]], strategy: str) -> str:
    """Returns why the placement group does not exist; empty if it does."""
    state = placement_group_table(group)["state"]
    if state == "CREATED":
        return ""
    nodes = "; ".join(named(node["Resources"]) for node in ray.nodes() if node["Alive"])
    wanted = f"{len(bundles)} times {named(bundles[0])}, {strategy}"
    return (
        f"Ray has no place for {wanted} ({state.lower()}). Its nodes have {nodes}, less what others "
        "use."
    )


def named(resources: dict[str, float]) -> str:
    """Returns resources in words, without those that Ray makes up for a node itself."""
    return ", ".join(
        f"{name}: {amount:g}" for name, amount in sorted(resources.items()) if ":" not in name
    )


def task_output(future: Any) -> str:
    """Returns the output of a task, or the reason of its end."""
    try:
        return str(ray.get(future))
    except (ray.exceptions.RayError, KeyboardInterrupt) as error:
        return f"Ray: {error}"


def report(**fields: Any) -> None:
    """Writes a line for the trainer."""
    sys.stdout.write("\n" + json.dumps(fields) + "\n")  # behind half a line of Ray's
    sys.stdout.flush()


def read_orders(orders: "queue.Queue[dict[str, Any] | None]") -> None:
    """Puts each order into the queue, and None at the end."""
    for line in sys.stdin:
        orders.put(json.loads(line))
    orders.put(None)


def main() -> None:
    """Runs the program."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--address", required=True, help="of the cluster, or auto")
    parser.add_argument(
        "--bundles", required=True, type=json.loads, help="resources of each job, in JSON"
    )
    parser.add_argument("--strategy", required=True, help="of the placement group")
    arguments = parser.parse_args()
    orders: queue.Queue[dict[str, Any] | None] = queue.Queue()
    threading.Thread(target=read_orders, args=(orders,), daemon=True).start()
    try:
        ray.init(address=arguments.address, log_to_driver=False, logging_level=logging.ERROR)
    except ConnectionError as error:
        raise SystemExit(str(error)) from None
    report(nodes=sum(node["Alive"] for node in ray.nodes()))
    driver = Driver(arguments.bundles, arguments.strategy)
    while True:
        try:
            if (order := orders.get(timeout=POLL_S)) is None:
                break
            driver.obey(order)
        except queue.Empty:
            driver.poll()
    driver.close()


if __name__ == "__main__":
    main()
