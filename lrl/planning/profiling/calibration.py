"""Costs that a measured run's own log is explained by, so that other runs can be forecast from it.

Least squares in which the variance of a stretch grows with its expected length, and no coefficient is negative. So a
second is worth as much in a short stretch as in a long one, the fitted seconds add up to the measured ones however much
they scatter, and nothing costs less than nothing. (Errors relative to the measured seconds would favour fast stretches,
and the more so the more a log scatters.)

What a log has no example of (prefill in none of its stretches, say) costs nothing in the fit; and from responses that
were always as many, the cost of a step and that of a response cannot be told apart. So fit to a log whose batches grow
and shrink.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import numpy as np
from scipy.optimize import nnls

from lrl.planning.profiling.linear_costs import LinearGenerator, LinearTrainer
from lrl.planning.profiling.timeline import GeneratorRecord, MicroBatchRecord, Record, StepRecord

ROUNDS = 20
"""Of a fit, each with the expected seconds of the one before."""
LEAST = 0.01
"""Share of the measured seconds below which what is expected does not gain weight."""


def fit_generator(records: Sequence[Record], kv_tokens: int) -> LinearGenerator:
    """Costs of one of the run's generators.

    Args:
        records: The run's timeline.
        kv_tokens: Tokens whose keys and values fit, which no log says.

    Raises:
        ValueError: The timeline has no stretch of a generator's work, or no step.
    """
    work = [record for record in records if isinstance(record, GeneratorRecord)]
    steps = [record.tokens / record.responses if record.responses else 0.0 for record in work]
    rows = [
        (count, record.tokens, count * record.context_tokens, record.prefill_tokens)
        for count, record in zip(steps, work, strict=True)
    ]
    step_s, response_s, context_token_s, prefill_token_s = _fit(rows, [record.seconds for record in work], "generator")
    return LinearGenerator(
        kv_tokens=kv_tokens,
        step_s=step_s,
        response_s=response_s,
        context_token_s=context_token_s,
        prefill_token_s=prefill_token_s,
        pause_s=median(record.pause_s for record in _steps(records)),
    )


def fit_trainer(records: Sequence[Record]) -> LinearTrainer:
    """Costs of the run's trainer; what a step takes beside all that has a name counts as update.

    Raises:
        ValueError: The timeline has no micro-batch, or no step.
    """
    passes = [record for record in records if isinstance(record, MicroBatchRecord)]
    rows = [(1, record.tokens, record.tokens_squared) for record in passes]
    fixed_s, token_s, token_squared_s = _fit(rows, [record.seconds for record in passes], "micro_batch")
    weights_s = median(record.sync_s for record in _steps(records))
    return LinearTrainer(
        micro_batch_fixed_s=fixed_s,
        token_s=token_s,
        token_squared_s=token_squared_s,
        optimizer_s=median(record.update_s + record.other_s for record in _steps(records)),
        weights_s=weights_s,
        goes_on=weights_s < median(record.pause_s for record in _steps(records)),
    )


def _steps(records: Sequence[Record]) -> list[StepRecord]:
    found = [record for record in records if isinstance(record, StepRecord)]
    if not found:
        raise ValueError('The timeline has no record of kind "step". Give that of a run that has trained.')
    return found


def _fit(rows: Sequence[Sequence[float]], seconds: Sequence[float], kind: str) -> list[float]:
    """Coefficients c >= 0 of least sum((rows c - seconds)^2 / expected), where expected is rows c itself."""
    used = [place for place, length in enumerate(seconds) if length > 0]
    if not used:
        raise ValueError(f'The timeline has no record of kind "{kind}" that took time. Give that of a longer run.')
    work, measured = np.array([rows[place] for place in used], dtype=float), np.array([seconds[p] for p in used])
    scale = work.max(axis=0)  # tokens squared are 1e9 where a micro-batch is 1
    scale[scale == 0] = 1.0
    work, expected = work / scale, measured
    for _ in range(ROUNDS):
        spread = np.sqrt(np.maximum(expected, LEAST * measured))
        found, _ = nnls(work / spread[:, None], measured / spread)
        expected = work @ found
    return (found / scale).tolist()
