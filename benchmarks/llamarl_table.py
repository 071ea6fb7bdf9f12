"""LlamaRL's table of step times beside the planner's: 8B and 70B on 256 H100, 405B on 1,024.
Nothing is measured.

    python -m benchmarks.llamarl_table

The paper's batch, lengths, layouts and number formats are not known to us
(docs/results/planning.md), so one workload serves all rows: 2,048 responses a step, 4 to a prompt
of 200 tokens, lognormal with a mean of 600 tokens and at most 4,096. These are guesses at a run on
MATH; mean and longest length were chosen with the paper's asynchronous column in view. All other
constants are `lrl.planning`'s.

Each row has four designs: in turn with one layout for both sides (the baseline of the paper's
theory), in turn with weights laid out anew in between, apart in bfloat16, and apart with float8
generators allowed.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import arguments, records
from lrl.planning.planner.devices import Cluster, parse_cluster
from lrl.planning.planner.layouts import Layouts
from lrl.planning.planner.llamarl_bounds import llamarl_problem
from lrl.planning.planner.model_shape import read_shape
from lrl.planning.planner.quantiles import parse_lengths
from lrl.planning.planner.search import Plan, asynchronous, synchronous
from lrl.planning.planner.workload import Workload

LLAMA = {"model_type": "llama", "vocab_size": 128256, "num_key_value_heads": 8}


def llama(layers: int, hidden: int, heads: int, ffn: int) -> dict[str, Any]:
    """Returns the config of a Llama 3.1 (2407.21783, table 3)."""
    sizes = {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "intermediate_size": ffn,
    }
    return LLAMA | sizes


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the paper's table, from second-hand sources."""

    model: str
    config: dict[str, Any]
    devices: int
    synchronous_s: float
    asynchronous_s: float


ROWS = (
    Row("8B", llama(32, 4096, 32, 14336), 256, 22.45, 8.90),
    Row("70B", llama(80, 8192, 64, 28672), 256, 82.32, 20.67),
    Row("405B", llama(126, 16384, 128, 53248), 1024, 635.8, 59.5),
)
"""The number of devices for 70B is not stated; 256 is assumed."""
CHOSEN = {"responses": 2048, "mean": 600, "max": 4096, "prompt": 200}
CHANGES: tuple[dict[str, int], ...] = (
    {},
    {"max": 2048},
    {"max": 8192},
    {"mean": 300},
    {"mean": 1200},
    {"responses": 1024},
    {"responses": 4096},
    {"prompt": 1000},
)
"""The chosen workload, and the other ones."""
DESIGNS = ("one layout, in turn", "in turn", "apart", "apart, fp8")
OFF = 0.25
"""A row that is further off is explained on the page."""


def workload(responses: int, mean: int, max: int, prompt: int) -> Workload:
    """Returns the workload, with groups of four."""
    lengths = parse_lengths(f"lognormal:mean={mean},max={max}")
    return Workload(prompts=responses // 4, responses=4, prompt_tokens=prompt, lengths=lengths)


def forecasts(row: Row, work: Workload) -> dict[str, Plan]:
    """Returns the fastest plan of each design."""
    cluster = parse_cluster(f"{row.devices}xH100")
    shape = read_shape(row.config)
    plain = Layouts(shape, work)
    eight_bits = Layouts(shape, work, ("bf16", "fp8"))
    found = (
        _one_layout(plain, cluster),
        synchronous(plain, cluster),
        asynchronous(plain, cluster, max_lag=1),
        asynchronous(eight_bits, cluster, max_lag=1),
    )
    return {
        name: min(plans, key=lambda plan: plan.step_s)
        for name, plans in zip(DESIGNS, found, strict=True)
    }


def _one_layout(layouts: Layouts, cluster: Cluster) -> Iterator[Plan]:
    for m in layouts.divisions(cluster.count):
        yield from synchronous(layouts, cluster, m)


def record(row: Row, change: dict[str, int]) -> dict[str, Any]:
    """Returns one row under one workload."""
    settings = CHOSEN | change
    work = workload(**settings)
    plans = forecasts(row, work)
    ideal = llamarl_problem(
        Layouts(read_shape(row.config), work), parse_cluster(f"{row.devices}xH100")
    )
    return {
        "model": row.model,
        "workload": settings,
        "step_s": {name: records.rounded(plan.step_s) for name, plan in plans.items()},
        "training_s": {
            name: records.rounded(plan.training.seconds) for name, plan in plans.items()
        },
        "writing_s": {
            name: records.rounded(plan.generation.writing.span_s) for name, plan in plans.items()
        },
        "plan": {name: told(plan) for name, plan in plans.items()},
        "bound": {name: plan.bound for name, plan in plans.items()},
        "problems_s": [
            records.rounded(ideal.synchronous_s()),
            records.rounded(ideal.asynchronous_s()),
        ],
    }


def told(plan: Plan) -> str:
    """Describes a plan in a few words."""
    training, generation = plan.training, plan.generation
    devices = (
        f"{training.devices} + {generation.devices}"
        if plan.placement == "split"
        else f"{training.devices}"
    )
    layouts = (
        f"trainer TP {training.costs.tp}, {generation.generators} generators of TP "
        f"{generation.costs.tp}"
    )
    return f"{devices} devices; {layouts} {generation.costs.precision}"


def tables(found: list[dict[str, Any]]) -> str:
    """Returns the tables in Markdown: the paper's step times beside ours, the baseline's implied
    times, other workloads."""
    chosen = [records.find(found, {"model": row.model, "workload": CHOSEN}) for row in ROWS]
    paired = [(row, one) for row, one in zip(ROWS, chosen, strict=True) if one is not None]
    return "\n\n".join([main_table(paired), implied_table(paired), sensitivity_table(found)])


def main_table(paired: list[tuple[Row, dict[str, Any]]]) -> str:
    """Returns step times and ratios."""
    heads = (
        "paper, synchronous",
        DESIGNS[0],
        DESIGNS[1],
        "paper, asynchronous",
        DESIGNS[2],
        DESIGNS[3],
    )
    lines = [f"| model, devices | {' | '.join(heads)} | ratio: paper | ours |", "|---" * 9 + "|"]
    for row, one in paired:
        ours = one["step_s"]
        cells = [
            f"{row.synchronous_s:g}",
            *(off(ours[name], row.synchronous_s) for name in DESIGNS[:2]),
        ]
        cells += [
            f"{row.asynchronous_s:g}",
            *(off(ours[name], row.asynchronous_s) for name in DESIGNS[2:]),
        ]
        ratios = (
            f"{row.synchronous_s / row.asynchronous_s:.2f} | "
            f"{ours[DESIGNS[0]] / ours[DESIGNS[2]]:.2f}"
        )
        lines.append(f"| {row.model}, {row.devices} | {' | '.join(cells)} | {ratios} |")
    return "\n".join(lines)


def off(ours: float, paper: float) -> str:
    """Returns seconds, and the deviation from the paper's; bold beyond `OFF`."""
    share = ours / paper - 1
    text = f"{ours:.3g} ({share:+.0%})"
    return f"**{text}**" if abs(share) > OFF else text


def implied_table(paired: list[tuple[Row, dict[str, Any]]]) -> str:
    """Returns the time of a token in the baseline's generation if the rest of its step were as
    forecast."""
    lines = [
        "| model | baseline's generation, s | ms a token of the longest response | ours, ms |",
        "|---" * 4 + "|",
    ]
    for row, one in paired:
        rest = row.synchronous_s - one["training_s"][DESIGNS[0]]
        longest = one["workload"]["max"]
        ours = one["writing_s"][DESIGNS[0]]
        lines.append(
            f"| {row.model} | {rest:.1f} | {1e3 * rest / longest:.1f} | {1e3 * ours / longest:.1f} "
            "|"
        )
    return "\n".join(lines)


def sensitivity_table(found: list[dict[str, Any]]) -> str:
    """Returns turns with one layout, and apart, under other workloads."""
    lines = [
        "| workload | " + " | ".join(f"{row.model}: in turn / apart" for row in ROWS) + " |",
        "|---" * 4 + "|",
    ]
    for change in CHANGES:
        name = ", ".join(f"{what} {value:,}" for what, value in change.items()) or "as above"
        cells = []
        for row in ROWS:
            one = records.find(found, {"model": row.model, "workload": CHOSEN | change})
            cells.append(
                f"{one['step_s'][DESIGNS[0]]:.3g} / {one['step_s'][DESIGNS[2]]:.3g}" if one else ""
            )
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(found: list[dict[str, Any]], path: Path) -> None:
    """Draws step times of paper and planner as bars, one panel a design."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    chosen = [records.find(found, {"model": row.model, "workload": CHOSEN}) for row in ROWS]
    sides = (
        ("synchronous", DESIGNS[:2], "synchronous_s"),
        ("asynchronous", DESIGNS[2:], "asynchronous_s"),
    )
    for axes, (title, designs, column) in zip(panels, sides, strict=True):
        bars = {"LlamaRL (second hand)": [getattr(row, column) for row in ROWS]}
        bars |= {
            f"forecast: {name}": [one["step_s"][name] if one else 0 for one in chosen]
            for name in designs
        }
        for number, (label, seconds) in enumerate(bars.items()):
            places = [place + 0.27 * (number - 1) for place in range(len(ROWS))]
            drawn = axes.bar(
                places, seconds, width=0.25, label=label, color=("0.4", "C0", "C1")[number]
            )
            axes.bar_label(drawn, fmt="%.3g", fontsize="x-small")
        axes.set(title=title, yscale="log", xticks=range(len(ROWS)))
        axes.set_xticklabels([f"{row.model}\n{row.devices} H100" for row in ROWS])
        axes.legend(fontsize="x-small", loc="upper left")
    panels[0].set_ylabel("seconds a step")
    panels[0].set_ylim(1, 3000)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main() -> None:
    """Forecasts what is missing, then draws and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_out(parser, "llamarl_table")
    parser.add_argument(
        "--plot", type=Path, default=Path("docs/llamarl_table.png"), help="(%(default)s)"
    )
    asked = parser.parse_args()
    for change in CHANGES:
        for row in ROWS:
            if not records.find(
                records.read(asked.out), {"model": row.model, "workload": CHOSEN | change}
            ):
                records.append(asked.out, record(row, change))
    found = records.read(asked.out)
    draw(found, asked.plot)
    print(tables(found))


if __name__ == "__main__":
    main()
