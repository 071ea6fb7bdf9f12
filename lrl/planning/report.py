"""Plans as a table, and in words what the best one's time is and what would change it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.table import Table

from lrl.planning import memory
from lrl.planning.devices import GB, Cluster
from lrl.planning.recipe import runs_today
from lrl.planning.search import Plan
from lrl.planning.workload import Workload

HOUR = 3600


def table(plans: Sequence[Plan], cluster: Cluster, workload: Workload, price: float | None) -> Table:
    """One column a plan, the fastest first.

    Args:
        plans: Ranked.
        cluster: Where the trainer runs.
        workload: What a step has to do.
        price: Of a device and hour; None leaves the row out.
    """
    rows: dict[str, Callable[[Plan], str]] = {
        "devices": _devices,
        "lag, at most": lambda plan: f"{plan.lag}",
        "trainer": lambda plan: f"TP {plan.training.tp}",
        "  micro-batch": lambda plan: f"{plan.training.micro_batch_tokens:,}",
        "generators": lambda plan: f"{plan.generation.generators}, {plan.generation.precision}",
        "  each": lambda plan: f"TP {plan.generation.tp}",
        "  answers at once": lambda plan: f"{plan.generation.writing.slots:,}",
        "step (s)": lambda plan: f"{plan.step_s:.3g}",
        "answers a second": lambda plan: f"{workload.samples / plan.step_s:.3g}",
        "trainer waits": lambda plan: f"{plan.trainer_waits:.0%}",
        "generators wait": lambda plan: f"{plan.generators_wait:.0%}",
        "sync": lambda plan: f"{plan.sync_share:.1%}",
        "GB a device": lambda plan: f"{plan.memory / GB:.0f} of {memory.usable(cluster.device) / GB:.0f}",
    }
    if price is not None:
        rows["price of a step"] = lambda plan: f"{price * plan.devices * plan.step_s / HOUR:.3g}"
    rows["today's lrl"] = lambda plan: "runs it" if runs_today(plan, cluster) else "cannot yet"
    names = ("plan", *(str(number) for number, _ in enumerate(plans, start=1)))
    shown = Table(*names, title="Forecasts, fastest first; nothing here was measured")
    for name, cell in rows.items():
        shown.add_row(name, *map(cell, plans))
    return shown


def _devices(plan: Plan) -> str:
    if plan.placement == "shared":
        return f"{plan.devices} in turn"
    return f"{plan.training.devices} + {plan.generation.devices}"


def what_binds(plan: Plan, workload: Workload) -> str:
    """What the fastest plan's time is, and what would shorten it."""
    training, writing = plan.training, plan.generation.writing
    longest = f"{workload.longest - workload.prompt_tokens:,} tokens"
    if plan.bound == "training":
        return (
            f"Training binds: it takes {training.seconds:.3g} s on {training.devices} devices, and pacing holds the "
            "generators back. A larger cluster or fewer answers would shorten the step; more lag would not."
        )
    if plan.bound == "writing":
        return (
            f"Writing binds: the generators need {writing.busy_s:.3g} s for a step's answers. A larger cluster, fewer "
            "or shorter answers, or --precision fp8 would shorten the step."
        )
    if plan.bound == "longest answer":
        return (
            f"The longest answer binds: {longest} take {writing.span_s:.3g} s from admission, and a lag of {plan.lag} "
            f"gives them {plan.lag + 1} steps. More lag or a lower limit on answers would shorten the step."
        )
    return (
        f"Both sides take turns: writing ends with the longest answer, {longest}, after {writing.span_s:.3g} s, and "
        f"training takes {training.seconds:.3g} s. Devices of its own for each side would let them overlap."
    )
