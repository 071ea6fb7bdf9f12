"""Costs fitted to a timeline."""

import functools
import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lrl.planning.costs import LinearGenerator, LinearTrainer, fit_generator, fit_trainer
from lrl.planning.simulation import Simulation
from lrl.planning.workload import Lognormal
from lrl.rollouts.timeline import GeneratorRecord, Record, StepRecord, read, write

GENERATOR = LinearGenerator(
    kv_tokens=50_000,
    step_s=0.01,
    response_s=0.0005,
    context_token_s=2e-7,
    prefill_token_s=3e-5,
    sync_pause_s=0.25,
)
TRAINER = LinearTrainer(
    micro_batch_fixed_s=0.05, token_s=1e-4, token_squared_s=4e-8, update_s=0.7, sync_s=1.5
)
OVERLAPS = replace(TRAINER, sync_s=0.1, pause_overlaps=True)


@functools.cache
def timeline(trainer: LinearTrainer = TRAINER, max_lag: int = 0) -> list[Record]:
    """Returns the timeline of a small run."""
    records: list[Record] = []
    scene = Simulation(
        generators=[GENERATOR] * 2,
        trainer=trainer,
        lengths=Lognormal(200, 1.0, 2000),
        steps=6,
        groups_per_step=8,
        rollouts_per_group=4,
        max_num_seqs=16,
        prompt_tokens=50,
        max_lag=max_lag,
    )
    scene.run(records.append)
    return records


@pytest.mark.parametrize(("simulated", "max_lag"), [(TRAINER, 0), (OVERLAPS, 1)])
def test_a_fit_to_a_simulated_run_returns_its_costs(
    tmp_path: Path, simulated: LinearTrainer, max_lag: int
) -> None:
    write(tmp_path / "timeline.jsonl", timeline(simulated, max_lag))
    records = read(tmp_path / "timeline.jsonl")
    generator, trainer = fit_generator(records, kv_tokens=50_000), fit_trainer(records)
    for found, known in ((generator, GENERATOR), (trainer, simulated)):
        for name in known.__slots__:
            # Two busy generators do not pause at the same moment.
            rel = 0.05 if name == "sync_pause_s" else 1e-4
            assert getattr(found, name) == pytest.approx(getattr(known, name), rel=rel), name


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 999), st.floats(0.0, 0.6))
def test_fitted_seconds_add_up_to_measured_seconds_at_any_scatter(
    seed: int, scatter: float
) -> None:
    rng = random.Random(seed)
    work, steps = [], [record for record in timeline() if isinstance(record, StepRecord)]
    for _ in range(60):
        responses, context = rng.uniform(1, 16), rng.uniform(100, 9000)
        seconds = GENERATOR.decode_s(responses, context) * 50  # type: ignore[arg-type]
        seconds *= rng.uniform(1 - scatter, 1 + scatter)
        sizes = {"responses": responses, "context_tokens": context}
        work.append(GeneratorRecord(seconds=seconds, tokens=round(50 * responses), **sizes))
    found = fit_generator([*work, *steps], kv_tokens=1)
    fitted = [
        record.tokens / record.responses * found.decode_s(record.responses, record.context_tokens)
        for record in work
    ]  # type: ignore[arg-type]
    assert sum(fitted) == pytest.approx(sum(record.seconds for record in work), rel=1e-3)


def test_fitted_costs_are_not_negative() -> None:
    sizes = ((n, {"tokens": n, "responses": n, "context_tokens": n * n}) for n in range(1, 9))
    work = [GeneratorRecord(seconds=9.0 - n, **size) for n, size in sizes]
    step = next(record for record in timeline() if isinstance(record, StepRecord))
    found = fit_generator([*work, step], kv_tokens=1)
    others = found.response_s, found.context_token_s, found.prefill_token_s
    assert min(others) == 0 < found.step_s
