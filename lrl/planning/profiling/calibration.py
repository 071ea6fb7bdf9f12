"""Costs fitted to a run's timeline, for forecasts of other runs.

Least squares with non-negative coefficients, in which a record's variance grows with its expected
seconds. A second then has the same weight in short and in long records, and the fitted seconds add
up to the measured ones at any scatter. Errors relative to the measured seconds would favour fast
records, the more so the larger the scatter.

Work of which a log has no example (prefill, for instance) costs 0 in the fit. With a constant
number of responses, the cost of a decode step and the cost of a response cannot be separated: fit
to a log whose batches grow and shrink.
"""

from collections.abc import Sequence
from itertools import product
from statistics import median

import numpy as np

from lrl.planning.costs import LinearGenerator, LinearTrainer
from lrl.planning.profiling.timeline import GeneratorRecord, MicroBatchRecord, Record, StepRecord

ROUNDS = 20
"""Rounds of a fit; each takes its expected seconds from the round before."""
MIN_EXPECTED_SHARE = 0.01
"""Share of the measured seconds below which the expected seconds no longer raise a record's
weight."""


def fit_generator(records: Sequence[Record], kv_tokens: int) -> LinearGenerator:
    """Fits the costs of one of the run's generators; `kv_tokens` is given, as no log has it.

    Raises:
        ValueError: The timeline has no record of a generator's work, or no step.
    """
    work = [record for record in records if isinstance(record, GeneratorRecord)]
    rows = []
    for record in work:
        steps = record.tokens / record.responses if record.responses else 0.0
        rows.append((steps, record.tokens, steps * record.context_tokens, record.prefill_tokens))
    step_s, response_s, context_token_s, prefill_token_s = _fit(
        rows, [record.seconds for record in work], "generator"
    )
    return LinearGenerator(
        kv_tokens=kv_tokens,
        step_s=step_s,
        response_s=response_s,
        context_token_s=context_token_s,
        prefill_token_s=prefill_token_s,
        pause_s=median(record.pause_s for record in _steps(records)),
    )


def fit_trainer(records: Sequence[Record]) -> LinearTrainer:
    """Fits the costs of the run's trainer. The update includes the unnamed rest of a step.

    Raises:
        ValueError: The timeline has no micro-batch, or no step.
    """
    passes = [record for record in records if isinstance(record, MicroBatchRecord)]
    rows = [(1, record.tokens, record.tokens_squared) for record in passes]
    fixed_s, token_s, token_squared_s = _fit(
        rows, [record.seconds for record in passes], "micro_batch"
    )
    steps = _steps(records)
    weights_s = median(record.sync_s for record in steps)
    return LinearTrainer(
        micro_batch_fixed_s=fixed_s,
        token_s=token_s,
        token_squared_s=token_squared_s,
        optimizer_s=median(record.update_s + record.other_s for record in steps),
        weights_s=weights_s,
        pause_overlaps=weights_s < median(record.pause_s for record in steps),
    )


def _steps(records: Sequence[Record]) -> list[StepRecord]:
    found = [record for record in records if isinstance(record, StepRecord)]
    if not found:
        raise ValueError(
            'The timeline has no record of kind "step". Give that of a run that has trained.'
        )
    return found


def _fit(rows: Sequence[Sequence[float]], seconds: Sequence[float], kind: str) -> list[float]:
    """Returns the coefficients c >= 0 of least sum((rows c - seconds)^2 / expected), with expected
    = rows c."""
    used = [index for index, length in enumerate(seconds) if length > 0]
    if not used:
        raise ValueError(
            f'The timeline has no record of kind "{kind}" that took time. Give that of a longer run.'
        )
    work = np.array([rows[index] for index in used], dtype=float)
    measured = np.array([seconds[index] for index in used])
    scale = work.max(axis=0)  # tokens squared are 1e9, a micro-batch is 1
    scale[scale == 0] = 1.0
    work = work / scale
    expected = measured
    for _ in range(ROUNDS):
        spread = np.sqrt(np.maximum(expected, MIN_EXPECTED_SHARE * measured))
        found = _non_negative(work / spread[:, None], measured / spread)
        expected = work @ found
    return (found / scale).tolist()


def _non_negative(work: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Returns the coefficients c >= 0, float64 [columns], of least |work c - seconds|^2; work is
    float64 [n, columns].

    They are the unbounded solution for some of the columns, and 0 for the others. There are at most
    16 choices.
    """
    best, least = np.zeros(work.shape[1]), float("inf")
    for used in product([False, True], repeat=work.shape[1]):
        found = np.zeros(work.shape[1])
        found[list(used)] = np.linalg.lstsq(work[:, used], seconds)[0]
        error = float(np.linalg.norm(work @ found - seconds))
        if found.min() >= 0 and error < least:
            best, least = found, error
    return best
