"""Plans in the simulator: what a step takes under each rule of dispatch, and who waits for what.

The search has one bound for each side. Here the real controller, pacing, dispatch and cuts go through a few steps of a
plan, with the same roofline for their costs, and so order, whole micro-batches and full memories show. A rule that asks
for lengths is told what a prompt itself says of its responses' (half of the variance of their logarithm): what a ranker
knows at best, when every prompt was answered before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from rich.table import Table

from lrl.planning.planner.devices import Cluster
from lrl.planning.planner.layouts import Sides
from lrl.planning.planner.memory import usable
from lrl.planning.planner.roofline import RooflineGenerator, RooflineTrainer
from lrl.planning.planner.search import Plan
from lrl.planning.profiling.timeline import GeneratorRecord, Record, StepRecord
from lrl.planning.simulator.length_sampling import LengthSampler, ObservedLengths
from lrl.planning.simulator.simulate import Simulation
from lrl.routing.dispatch import DispatchPolicy, LeastLoaded, LeastTokens, RoundRobin, SkewnessAware
from lrl.routing.dispatch.decode_latency import DecodeLatency
from lrl.types import Prompt

COUNTED = 4
"""Steps of a simulation that count. Before them the pipeline fills, and the burst that a run begins with ends."""
DEFAULT = "LeastLoaded"
"""What a recipe without `data.dispatch` does."""
WORTH_IT = 0.99
"""A rule that takes more than this share of the default's time is not worth writing into a recipe."""
CAUSES = {"first": "wait_first_s", "more": "wait_more_s", "last": "wait_last_s", "sync": "sync_s"}
"""What the trainer waits for (a step's first group, the last, others, the sync), and the field with its seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What the simulator says of a plan under one rule; shares are of the step."""

    rule: str
    make: Callable[[], DispatchPolicy]
    """Makes the rule."""
    step_s: float
    waits: dict[str, float]
    """Share by cause (`CAUSES`) in which the trainer does not train."""
    write: float
    """Share in which a generator reads or writes, mean over all."""


class ByPrompt:
    """Expects of a prompt's responses what the prompt says of their length (`lrl.routing.dispatch.ExpectedLengths`).

    Args:
        lengths: Of the responses.
    """

    def __init__(self, lengths: LengthSampler) -> None:
        self.lengths = lengths

    def expected(self, prompt: Prompt, written: float = 0.0) -> float:
        """Tokens in the middle of the prompt's responses; more than `written`."""
        return max(self.lengths.middle(prompt.id), written + 1.0)

    def quantile(self, share: float) -> float:
        """The length, in tokens, that this share of all responses does not exceed."""
        return self.lengths.quantile(share)


def rules(costs: RooflineGenerator, slots: int, context_tokens: float) -> dict[str, Callable[[], DispatchPolicy]]:
    """Makes of each rule, by its name; those that look at times are told the generators' own.

    Args:
        costs: Of a generator.
        slots: Responses it writes at once.
        context_tokens: Of a response and its prompt, on average.
    """
    one, all_ms = (1e3 * costs.decode_s(responses, responses * context_tokens) for responses in (1, max(2, slots)))
    decode_latency = DecodeLatency(step_ms=one, response_ms=(all_ms - one) / (max(2, slots) - 1))
    return {
        DEFAULT: LeastLoaded,
        "RoundRobin": RoundRobin,
        "LeastTokens": LeastTokens,
        "SkewnessAware": lambda: SkewnessAware(decode_latency=decode_latency),
    }


@cache
def outcomes(plan: Plan, sides: Sides, cluster: Cluster) -> tuple[Outcome, ...]:
    """The plan under each rule; with a single generator only those that differ there."""
    costs, workload = generator_costs(plan, sides, cluster), sides.workload
    made = rules(costs, plan.generation.writing.slots, workload.live_tokens)
    names = made if plan.generation.generators > 1 else (DEFAULT, "LeastTokens")
    return tuple(outcome(name, made[name], plan, sides, cluster) for name in names)


def outcome(rule: str, make: Callable[[], DispatchPolicy], plan: Plan, sides: Sides, cluster: Cluster) -> Outcome:
    """The plan under one rule."""
    lengths = ObservedLengths([round(tokens) for tokens in sides.workload.lengths.values])

    def informed() -> DispatchPolicy:
        made = make()
        made.lengths = ByPrompt(lengths)
        return made

    steps = list[tuple[StepRecord, float]]()
    busy_s = 0.0

    def take(record: Record) -> None:
        nonlocal busy_s
        if isinstance(record, GeneratorRecord):
            busy_s += record.seconds
        elif isinstance(record, StepRecord):
            steps.append((record, busy_s))
            busy_s = 0.0

    simulation(plan, sides, cluster, lengths, informed).run(take)
    counted = steps[2 * (plan.lag + 1) :][:COUNTED]
    seconds = sum(step.seconds for step, _ in counted)
    return Outcome(
        rule=rule,
        make=make,
        step_s=seconds / len(counted),
        waits={cause: sum(getattr(step, field) for step, _ in counted) / seconds for cause, field in CAUSES.items()},
        write=sum(busy for _, busy in counted) / (seconds * plan.generation.generators),
    )


def simulation(
    plan: Plan, sides: Sides, cluster: Cluster, lengths: LengthSampler, dispatch: Callable[[], DispatchPolicy]
) -> Simulation:
    """The plan as a simulation; one of its micro-batches is what all ranks train at the same time."""
    training, workload = plan.training, sides.workload
    used = training.devices // training.tp * training.tp
    trainer = RooflineTrainer(
        shape=sides.shape,
        cluster=cluster,
        devices=used,
        tp=training.tp,
        shards=training.shards,
        constants=sides.constants,
    )
    return Simulation(
        generators=[generator_costs(plan, sides, cluster)] * plan.generation.generators,
        trainer=trainer,
        lengths=lengths,
        steps=2 * (plan.lag + 1) + COUNTED + plan.lag,  # for the last ones nothing more is written
        groups_per_step=workload.prompts,
        rollouts_per_group=workload.responses,
        max_lag=plan.lag,
        micro_batch_tokens=training.micro_batch_tokens * (used // training.tp),
        max_num_seqs=plan.generation.writing.slots,
        prompt_tokens=workload.prompt_tokens,
        dispatch=dispatch,
        placement="shared" if plan.placement == "shared" else "split",
    )


def generator_costs(plan: Plan, sides: Sides, cluster: Cluster) -> RooflineGenerator:
    """Of one generator of the plan; on devices that train in turn it has the room that training leaves."""
    room = usable(cluster.device) - (plan.training.memory if plan.placement == "shared" else 0.0)
    return RooflineGenerator(
        shape=sides.shape,
        cluster=cluster,
        tp=plan.generation.tp,
        precision=plan.generation.precision,
        room=room,
        constants=sides.constants,
    )


def best_dispatch(found: Sequence[Outcome]) -> dict[str, Any] | None:
    """`data.dispatch` of the fastest rule, as a recipe has it; None if the default is as good."""
    default = next(one for one in found if one.rule == DEFAULT)
    best = min(found, key=lambda one: one.step_s)
    if best.step_s > WORTH_IT * default.step_s:
        return None
    dispatch = best.make()
    settings: dict[str, Any] = {"class_path": f"lrl.routing.dispatch.{best.rule}"}
    if isinstance(dispatch, SkewnessAware):
        time = dispatch.decode_latency
        numbers = {"step_ms": float(f"{time.step_ms:.4g}"), "response_ms": float(f"{time.response_ms:.4g}")}
        settings["init_args"] = {"decode_latency": numbers}
    return settings


def table(found: Sequence[tuple[int, Outcome]]) -> Table:
    """A row for each plan, by its number, and rule."""
    shown = Table(
        *("plan", "dispatch", "step (s)", *CAUSES, "write"),
        title="Simulated; nothing here was measured",
        caption="The trainer waits for a step's first group, for more, for the last, for the sync; generators write.",
    )
    for number, one in found:
        waits = (f"{share:.0%}" for share in one.waits.values())
        shown.add_row(f"{number}", one.rule, f"{one.step_s:.3g}", *waits, f"{one.write:.0%}")
    return shown
