"""The printed report: the assumed workload, plans as a table, and the bottleneck of the first one
in words."""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from lrl.planning.planner import memory
from lrl.planning.planner.devices import GB, Cluster
from lrl.planning.planner.episodes import Episodes
from lrl.planning.planner.layouts import Layouts
from lrl.planning.planner.runnable_today import runs_today
from lrl.planning.planner.search import Plan
from lrl.planning.planner.workload import Workload

HOUR = 3600


def assumed(
    settings: Mapping[str, Any], default: Callable[[str], Any], layouts: Layouts, cluster: Cluster
) -> str:
    """Returns the workload and the limits of the plans, with the settings `settings` by name, and
    marks the defaults."""

    def of(name: str) -> str:
        flag = f"--{name.replace('_', '-')}"
        return f"({flag}, by default)" if settings[name] == default(name) else f"({flag})"

    work = layouts.workload
    each = "" if work.episodes is None else " of a turn"
    lengths = f"{work.lengths.mean:,.0f} tokens in the mean and {work.lengths.longest:,.0f} at most"
    played = "" if work.episodes is None else f"\n{_played(work.episodes, settings, of)}"
    return (
        f"Assumed for a step: {work.prompts:,} prompts {of('prompts')} of {work.prompt_tokens:,} "
        f"tokens each {of('prompt_tokens')}, {work.responses} responses to each {of('responses')}, "
        f"of {lengths} (--lengths {settings['lengths']}{each}). That is {work.samples:,} responses and "
        f"{work.tokens:,.0f} tokens to train, with each prompt read "
        f"{_times(work.trees)}.{played}\nPolicy of {layouts.shape.parameters / 1e9:.3g} "
        f"billion parameters on {cluster}, {cluster.devices_per_node} to a node "
        f"{of('devices_per_node')}; lag up to {settings['max_lag']} {of('max_lag')}; precision "
        f"{settings['precision']} {of('precision')}."
    )


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"


def _played(episodes: Episodes, settings: Mapping[str, Any], of: Callable[[str], str]) -> str:
    turns = episodes.turns
    turn = episodes.turn_lengths
    tool = episodes.tool_ms
    answers = "at once" if tool is None else f"after {tool.mean / 1000:.3g} s in the mean"
    source = "--turns" if settings["turns"] else f"data.max_turns of {settings['base']}"
    return (
        f"A response is an episode of {turns.mean:.3g} turns in the mean and {turns.longest:.0f} at "
        f"most ({source}), of {turn.mean:,.0f} tokens a turn (--lengths); its environment answers "
        f"{answers} {of('tool_ms')} with {episodes.observation_tokens:,} tokens "
        f"{of('observation_tokens')}."
    )


def _width(table: Table, console: Console) -> int:
    """Returns the columns of a table with every cell on one line."""
    return Measurement.get(console, console.options.update(width=sys.maxsize), table).maximum


def print_whole(console: Console, table: Table) -> None:
    """Prints a table at its full width; a narrower terminal breaks its lines."""
    # Rich itself would cut and break words to fit a narrow terminal, or a pipe's 80 columns.
    table.width = _width(table, console)
    console.print(table, crop=False, no_wrap=True, overflow="ignore")


def print_plans(
    console: Console,
    plans: Sequence[Plan],
    cluster: Cluster,
    workload: Workload,
    price: float | None,
) -> None:
    """Prints a table of all plans, or several tables if the terminal is too narrow for one."""
    numbered = list(enumerate(plans, start=1))
    # A pipe or a file takes lines of any length.
    room = console.width if console.is_terminal else sys.maxsize
    while numbered:
        some = numbered
        while len(some) > 1 and _width(table(some, cluster, workload, price), console) > room:
            some = some[:-1]
        print_whole(console, table(some, cluster, workload, price))
        numbered = numbered[len(some) :]


def table(
    plans: Sequence[tuple[int, Plan]], cluster: Cluster, workload: Workload, price: float | None
) -> Table:
    """Returns a table with one column a plan, and with prices if a device and hour has one."""

    def devices(plan: Plan) -> str:
        apart = f"{plan.training.devices} + {plan.generation.devices}"
        return f"{plan.devices} in turn" if plan.placement == "shared" else apart

    rows: dict[str, Callable[[Plan], str]] = {
        "today's lrl": lambda plan: "runs it" if runs_today(plan, cluster) else "cannot yet",
        "devices": devices,
        "lag, at most": lambda plan: f"{plan.lag}",
        "trainer": lambda plan: f"TP {plan.training.costs.tp}",
        "  state spread over": lambda plan: f"{plan.training.costs.shards}",
        "  micro-batch": lambda plan: f"{plan.training.micro_batch_tokens:,}",
        "generators": lambda plan: (
            f"{plan.generation.generators}, {plan.generation.costs.precision}"
        ),
        "  each": lambda plan: f"TP {plan.generation.costs.tp}",
        "  responses at once": lambda plan: f"{plan.generation.writing.slots:,}",
        "step (s)": lambda plan: f"{plan.step_s:.3g}",
        "responses a second": lambda plan: f"{workload.samples / plan.step_s:.3g}",
        "trainer waits": lambda plan: f"{plan.trainer_waits:.0%}",
        "generators wait": lambda plan: f"{plan.generators_wait:.0%}",
        "sync": lambda plan: f"{plan.sync_s / plan.step_s:.1%}",
        "GB a device": lambda plan: (
            f"{plan.memory / GB:.0f} of {memory.usable(cluster.device) / GB:.0f}"
        ),
    }
    if price is not None:
        rows["price of a step"] = lambda plan: f"{price * plan.devices * plan.step_s / HOUR:.3g}"
    shown = Table(
        "plan", *(str(number) for number, _ in plans), title="Forecasts; nothing here was measured"
    )
    for name, cell in rows.items():
        shown.add_row(name, *(cell(plan) for _, plan in plans))
    return shown


def in_flight(plan: Plan, workload: Workload) -> str:
    """Explains how many episodes are in flight, and how busy that keeps the generators."""
    busy = min(1.0, plan.generation.writing.busy_s / plan.step_s)
    waiting = f"about {plan.generation.writing.at_tools:,.0f} of them wait for an answer at a time"
    return (
        f"At most {(plan.lag + 1) * workload.samples:,} episodes are in flight (max_lag + 1 = "
        f"{plan.lag + 1} times {workload.prompts:,} prompts times {workload.responses} responses)"
        f"{f', and {waiting}' if plan.lag else ''}. In "
        f"batches as full as that allows, a step's turns take {busy:.0%} of the step; --simulate shows "
        "how long a generator writes at all."
    )


def bottleneck(plan: Plan, workload: Workload) -> str:
    """Explains a plan's step time and how to shorten it."""
    training, writing = plan.training, plan.generation.writing
    longest = f"{workload.longest - workload.prompt_tokens:,} tokens"
    if plan.bound == "training":
        trainers = "1 device" if training.devices == 1 else f"{training.devices} devices"
        return (
            f"Training binds: it takes {training.seconds:.3g} s on {trainers}, and pacing holds "
            "the generators back. A larger cluster or fewer responses would shorten the step; more "
            "lag would not."
        )
    if plan.bound == "writing":
        return (
            f"Writing binds: the generators need {writing.busy_s:.3g} s for a step's responses. A "
            "larger cluster, fewer or shorter responses, or --precision fp8 would shorten the step."
        )
    if plan.bound == "tools":
        return (
            f"Tools bind: an episode waits {workload.tool_s:.3g} s for its environment, and a lag "
            f"of {plan.lag} lets too few be in flight to keep the generators busy meanwhile. More "
            "lag, more prompts or responses, or a faster tool would shorten the step."
        )
    if plan.bound == "longest response":
        return (
            f"The longest response binds: {longest} take {writing.span_s:.3g} s from admission, "
            f"and a lag of {plan.lag} gives them {plan.lag + 1} steps. More lag or a lower limit "
            "on responses would shorten the step."
        )
    return (
        f"Both sides take turns: writing ends with the longest response, {longest}, after "
        f"{writing.span_s:.3g} s, and training takes {training.seconds:.3g} s. Separate devices "
        "for each side would let them overlap."
    )
