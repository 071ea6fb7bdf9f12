"""Plans in the simulator: a step's time and waits under each dispatch policy.

The search has one bound for each side. Here the real controller, pacing, dispatch and packing run a
few steps of a plan with the same roofline costs, and so order, whole micro-batches and full memories
show. A policy that asks for lengths gets the median for the prompt, which explains half of the
variance of their logarithm: the best that a length predictor can learn.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

from rich.table import Table

from lrl.planning.responses import DrawnEpisodes, EpisodeShapes, ObservedLengths
from lrl.planning.search import Plan
from lrl.planning.simulation import Simulation
from lrl.planning.workload import Workload
from lrl.rollouts.timeline import GeneratorRecord, Record, StepRecord
from lrl.routing.dispatch import (
    DecodeLatency,
    DispatchPolicy,
    LeastLoaded,
    LeastTokens,
    RoundRobin,
    SkewnessAware,
)

COUNTED_STEPS = 4
"""Steps that count, once the pipeline is full and the burst at a run's start has ended."""
DEFAULT_DISPATCH = "LeastLoaded"
"""Dispatch policy of a recipe that names none."""
MAX_SHARE_OF_DEFAULT = 0.99
"""Largest share of the default's time with which a policy is written into a recipe."""
CAUSES = {"first": "wait_first_s", "more": "wait_more_s", "last": "wait_last_s", "sync": "sync_s"}
"""Waits of the trainer, and the fields with their seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A simulated plan under one dispatch policy; shares are of the step."""

    policy: str
    make: Callable[[], DispatchPolicy]
    """Makes the policy."""
    step_s: float
    waits: dict[str, float]
    """Share by cause (`CAUSES`) in which the trainer does not train."""
    write: float
    """Share in which a generator prefills or decodes, mean over all."""


@cache
def outcomes(plan: Plan, workload: Workload) -> tuple[Outcome, ...]:
    """Simulates the plan under each policy; for a single generator under those that differ."""
    costs = plan.generation.costs
    slots = max(2, plan.generation.writing.slots)
    # The line through one response and all slots: SkewnessAware gets the simulated generators' own
    # latency.
    one_ms = 1e3 * costs.decode_s(1, workload.live_tokens)
    all_ms = 1e3 * costs.decode_s(slots, slots * workload.live_tokens)
    decode_latency = DecodeLatency(step_ms=one_ms, response_ms=(all_ms - one_ms) / (slots - 1))
    policies: dict[str, Callable[[], DispatchPolicy]] = {
        DEFAULT_DISPATCH: LeastLoaded,
        "RoundRobin": RoundRobin,
        "LeastTokens": LeastTokens,
        "SkewnessAware": lambda: SkewnessAware(decode_latency=decode_latency),
    }
    names = policies if plan.generation.generators > 1 else (DEFAULT_DISPATCH, "LeastTokens")
    return tuple(_outcome(name, policies[name], plan, workload) for name in names)


def _outcome(
    policy: str, make: Callable[[], DispatchPolicy], plan: Plan, workload: Workload
) -> Outcome:
    lengths = ObservedLengths(workload.lengths.values)
    shapes: EpisodeShapes | None = None
    if (episodes := workload.episodes) is not None:
        lengths = ObservedLengths(episodes.turn_lengths.values)
        tool_ms = None if episodes.tool_ms is None else ObservedLengths(episodes.tool_ms.values)
        turns = ObservedLengths(episodes.turns.values)
        shapes = DrawnEpisodes(turns, episodes.observation_tokens, tool_ms)

    def informed() -> DispatchPolicy:
        made = make()
        made.lengths = lengths
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

    training, generation = plan.training, plan.generation
    ranks = training.costs.devices // training.costs.tp
    filled = 2 * (plan.lag + 1)
    simulation = Simulation(
        generators=[generation.costs] * generation.generators,
        trainer=training.costs,
        lengths=lengths,
        steps=filled + COUNTED_STEPS + plan.lag,  # during the last ones nothing more is written
        groups_per_step=workload.prompts,
        rollouts_per_group=workload.responses,
        max_lag=plan.lag,
        micro_batch_tokens=training.micro_batch_tokens * ranks,
        max_num_seqs=generation.writing.slots,
        prompt_tokens=workload.prompt_tokens,
        dispatch=informed,
        placement="shared" if plan.placement == "shared" else "split",
        episodes=shapes,
        attention_tokens=workload.attention_tokens,
    )
    simulation.run(take)
    counted = steps[filled:][:COUNTED_STEPS]
    seconds = sum(step.seconds for step, _ in counted)

    def share(part: str) -> float:
        return sum(getattr(step, part) for step, _ in counted) / seconds

    return Outcome(
        policy=policy,
        make=make,
        step_s=seconds / len(counted),
        waits={cause: share(part) for cause, part in CAUSES.items()},
        write=sum(busy for _, busy in counted) / (seconds * generation.generators),
    )


def best_dispatch(found: Sequence[Outcome]) -> dict[str, Any] | None:
    """Returns a recipe's `data.dispatch` of the fastest policy; None for the default."""
    default = next(one for one in found if one.policy == DEFAULT_DISPATCH)
    best = min(found, key=lambda one: one.step_s)
    if best.step_s > MAX_SHARE_OF_DEFAULT * default.step_s:
        return None
    dispatch = best.make()
    settings: dict[str, Any] = {"class_path": f"lrl.routing.dispatch.{best.policy}"}
    if isinstance(dispatch, SkewnessAware):
        latency = asdict(dispatch.decode_latency)
        numbers = {name: float(f"{value:.4g}") for name, value in latency.items()}
        settings["init_args"] = {"decode_latency": numbers}
    return settings


def table(plans: Sequence[Sequence[Outcome]]) -> Table:
    """Returns a table with a row for each plan and dispatch policy."""
    shown = Table(
        *("plan", "dispatch", "step (s)", *CAUSES, "write"),
        title="Simulated; nothing here was measured",
        caption=(
            "The trainer waits for a step's first group, for more, for the last, for the sync; "
            "generators write."
        ),
    )
    for number, found in enumerate(plans, start=1):
        for one in found:
            shares = (f"{share:.0%}" for share in (*one.waits.values(), one.write))
            shown.add_row(f"{number}", one.policy, f"{one.step_s:.3g}", *shares)
    return shown
