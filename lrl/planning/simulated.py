"""What the simulator says for `lrl plan`: a plan's time and waits under each dispatch policy
(`--simulate`), and the forecast of a run that has ended, next to the fact (`--compare`).

**Plans.** The search has one bound for each side. Here the real controller, pacing, dispatch and
packing run a few steps of a plan with the same roofline costs, and so order, whole micro-batches and
full memories show. A policy that asks for lengths gets the median for the prompt, which explains
half of the variance of their logarithm: the best that a length predictor can learn.

**Runs.** `timeline.jsonl` has costs and lengths of responses, `config.yaml` the settings. The costs
are fitted to the run itself. Differences then do not come from a machine that is faster or slower
than its data sheet, but from the simulator's gaps and errors: waits, order, contention, other load
on the machine.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import yaml
from rich.table import Table

from lrl.generators.settings import ServerSettings
from lrl.planning.costs import fit_generator, fit_trainer
from lrl.planning.report import TIMELINE
from lrl.planning.responses import (
    Answer,
    DrawnEpisodes,
    EpisodeShapes,
    ObservedLengths,
    ReplayedEpisodes,
    ReplayedLengths,
)
from lrl.planning.search import Plan
from lrl.planning.simulation import Simulation
from lrl.planning.workload import Workload
from lrl.rollouts.timeline import GeneratorRecord, GroupRecord, Record, StepRecord, read
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
SETTINGS = ("groups_per_step", "rollouts_per_group", "max_lag", "stragglers", "micro_batch_tokens")
"""Settings of the data module that a simulation has by the same names."""
UNKNOWN = ("replay", "max_skipped_per_step", "dispatch", "migration")
"""Settings that a simulation does not have."""
PARTS = {
    "waits for the first group": "wait_first_s",
    "waits for more": "wait_more_s",
    "waits for the last": "wait_last_s",
    "waits for rewards": "wait_reward_s",
    "trains": "train_s",
    "updates": "update_s",
    "packs, and the rest": "other_s",
    "syncs": "sync_s",
    "  generators pause": "pause_s",
    "step": "seconds",
    "generation of a step": "generation_s",
}
"""The names of a step's fields in the table of a run."""


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
        placement=plan.placement,
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


def outcome_table(plans: Sequence[Sequence[Outcome]]) -> Table:
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


# ---- a run that has ended


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A run's steps after its first fifth, and their forecast."""

    steps: Sequence[StepRecord]
    forecast: Sequence[StepRecord]
    responses_per_step: int
    planned_step_s: float | None
    """Seconds a step of the run's plan, if it has one."""
    left_out: Sequence[str]
    """Settings that the simulator does not know."""


def read_run(folder: Path, tool_ms: Sequence[float] | None = None) -> Comparison:
    """Reads a run's folder and forecasts the run.

    Args:
        folder: With `timeline.jsonl`, which the callback `Timeline` writes, and `config.yaml`, which
            `lrl fit` writes.
        tool_ms: Milliseconds of answers of its environment, which no timeline has; None for none.

    Raises:
        ValueError: One of them has the wrong content.
    """
    timeline = read(folder / "timeline.jsonl")
    config = yaml.safe_load((folder / "config.yaml").read_text())
    data, trainer = config["data"]["init_args"], config["trainer"]
    simulation = _simulation(timeline, data, trainer, tool_ms)
    steps = [record for record in timeline if isinstance(record, StepRecord)]
    start = len(steps) // 5
    callbacks = trainer.get("callbacks") or []
    timelines = [one.get("init_args") or {} for one in callbacks if one["class_path"] == TIMELINE]
    return Comparison(
        steps=steps[start:],
        forecast=simulation.run().steps[start:],
        responses_per_step=simulation.groups_per_step * simulation.rollouts_per_group,
        planned_step_s=timelines[0].get("planned_step_s") if timelines else None,
        left_out=[name for name in UNKNOWN if data.get(name)],
    )


def _simulation(
    timeline: Sequence[Record],
    data: Mapping[str, Any],
    trainer: Mapping[str, Any],
    tool_ms: Sequence[float] | None,
) -> Simulation:
    groups = [record for record in timeline if isinstance(record, GroupRecord)]
    groups.sort(key=lambda group: group.index)
    of_trainer = fit_trainer(timeline)  # raises the error of an empty timeline
    steps = [record for record in timeline if isinstance(record, StepRecord)]
    ranks, writing = _division(trainer)
    strategy = trainer["strategy"]["init_args"]
    server = {"max_num_seqs": ServerSettings.max_num_seqs, "tensor_parallel_size": 1}
    server |= strategy.get("server") or {}
    generators = max(1, writing // server["tensor_parallel_size"])
    longest = max(group.prompt_tokens + max(group.lengths) for group in groups)
    costs = fit_generator(timeline, kv_tokens=server["max_num_seqs"] * longest + longest)
    return Simulation(
        generators=[costs] * (generators - strategy.get("evaluation_generators", 0)),
        trainer=of_trainer,
        lengths=ReplayedLengths([_first_turns(group) for group in groups]),
        steps=len(steps),
        max_num_seqs=server["max_num_seqs"],
        ranks=ranks,
        prompt_tokens=round(sum(group.prompt_tokens for group in groups) / len(groups)),
        placement=strategy.get("placement", "split"),
        episodes=_episodes(groups, tool_ms),
        # A timeline counts the whole prompt of a turn as read, so its fitted costs are for that.
        prefix_cache=False,
        attention_tokens=max(step.attention_tokens for step in steps),
        **{name: data[name] for name in SETTINGS if name in data},
    )


def _division(trainer: Mapping[str, Any]) -> tuple[int, int]:
    """Returns the ranks that train, and the devices of the generators."""
    strategy = trainer["strategy"]
    kept = strategy["init_args"].get("generator_devices")
    several = strategy["class_path"].endswith((".AsyncDDP", ".AsyncFSDP"))
    if kept is not None and not several:
        return 1, int(kept)
    devices = str(trainer.get("devices"))
    if not devices.isdecimal():
        raise ValueError(f"trainer.devices is {devices} in config.yaml: write how many there were.")
    if not several:
        return 1, int(devices) - 1
    kept = 1 if kept is None else int(kept)
    return int(devices) - kept, kept


def _first_turns(group: GroupRecord) -> list[int]:
    """Returns the tokens of each response, or of each first turn; 1 of one that failed in it."""
    if not group.turns:
        return group.lengths
    return [turns[0][1] if turns else 1 for turns in group.turns]


def _episodes(
    groups: Sequence[GroupRecord], tool_ms: Sequence[float] | None
) -> ReplayedEpisodes | None:
    if not any(group.turns for group in groups):
        return None
    played = [
        [Answer(max(1, observation), tokens) for observation, tokens in turns[1:]]
        for group in groups
        for turns in group.turns
    ]
    return ReplayedEpisodes(played, ObservedLengths(tool_ms) if tool_ms else None)


def comparison_table(run: Comparison) -> Table:
    """Returns the medians of the steps: fact, forecast, and the relative error."""
    shown = Table(
        *("seconds a step, medians", "fact", "forecast", "off by"),
        title="Forecast with the run's own costs",
    )

    def add(name: str, fact: float, forecast: float) -> None:
        off_by = f"{forecast / fact - 1:+.0%}" if fact > 0 else ""
        shown.add_row(name, f"{fact:.3g}", f"{forecast:.3g}", off_by)

    both = run.steps, run.forecast
    for name, part in PARTS.items():
        add(name, *(median(getattr(step, part) for step in steps) for steps in both))
    seconds = (sum(step.seconds for step in steps) / len(steps) for steps in both)
    add("responses a second", *(run.responses_per_step / mean for mean in seconds))
    if run.planned_step_s is not None:
        fact = median(step.seconds for step in run.steps)
        add("step, as planned from data sheets", fact, run.planned_step_s)
    if run.left_out:
        shown.caption = f"Not in the forecast: data.{', data.'.join(run.left_out)}."
    return shown
