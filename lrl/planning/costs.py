"""Seconds of work: what a cost model answers, linear costs, and their fit to a timeline."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from statistics import median

import numpy as np

from lrl.planning.roofline import RooflineGenerator, RooflineTrainer
from lrl.rollouts.timeline import GeneratorRecord, MicroBatchRecord, Record, StepRecord

ROUNDS = 20
"""Rounds of a fit; each takes its expected seconds from the round before."""
MIN_EXPECTED_SHARE = 0.01
"""Least share of the measured seconds that counts as expected, and so bounds a record's weight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearGenerator:
    """Linear costs of a generator, in seconds."""

    kv_tokens: int
    """Tokens whose keys and values fit next to the weights."""
    step_s: float = 0.0
    """Of every decode step: reading the weights."""
    response_s: float = 0.0
    """That each response adds to a decode step."""
    context_token_s: float = 0.0
    """That each token of context adds to a decode step: reading its keys and values."""
    prefill_token_s: float = 0.0
    sync_pause_s: float = 0.0
    """Of a sync in which the generator writes no token."""

    def decode_s(self, responses: int, context_tokens: int) -> float:
        """Returns the seconds of a decode step: one token for each of `responses`, whose contexts
        (prompt and response so far) hold `context_tokens` in sum."""
        return self.step_s + self.response_s * responses + self.context_token_s * context_tokens

    def prefill_s(self, tokens: int) -> float:
        """Returns the seconds to prefill `tokens` tokens of prompts and of migrated responses."""
        return self.prefill_token_s * tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearTrainer:
    """Linear costs of a trainer, in seconds."""

    micro_batch_fixed_s: float = 0.0
    """Of every micro-batch."""
    token_s: float = 0.0
    token_squared_s: float = 0.0
    """That each squared token of a sequence adds: attention."""
    update_s: float = 0.0
    """Of the optimizer's update."""
    sync_s: float = 0.0
    """Of a sync: before the generators' pause if `pause_overlaps`, else around it."""
    pause_overlaps: bool = False
    """Whether the generators' pause overlaps the next step (`lrl.weights.transport.Transport.copies`). With
    lag 0 it never does: the trainer has nothing to train then."""

    def micro_batch_s(self, tokens: int, tokens_squared: int) -> float:
        """Returns the seconds of forward and backward for sequences (prompt and response) with
        these sums of lengths and of squared lengths."""
        work_s = self.token_s * tokens + self.token_squared_s * tokens_squared
        return self.micro_batch_fixed_s + work_s


GeneratorCosts = LinearGenerator | RooflineGenerator
"""Costs of one generator, on any number of devices."""
TrainerCosts = LinearTrainer | RooflineTrainer
"""Costs of the whole trainer, on any number of devices."""


def fit_generator(records: Sequence[Record], kv_tokens: int) -> LinearGenerator:
    """Fits the costs of one of a run's generators; `kv_tokens` is given, as no timeline has it. Work
    of which the timeline has no example costs 0."""
    work = [record for record in records if isinstance(record, GeneratorRecord)]
    rows = []
    for record in work:
        steps = record.tokens / record.responses if record.responses else 0.0
        rows.append((steps, record.tokens, steps * record.context_tokens, record.prefill_tokens))
    names = ("step_s", "response_s", "context_token_s", "prefill_token_s")
    found = _fit(rows, [record.seconds for record in work], "generator")
    costs = dict(zip(names, found, strict=True))
    return LinearGenerator(kv_tokens=kv_tokens, sync_pause_s=_median(records, "pause_s"), **costs)


def fit_trainer(records: Sequence[Record]) -> LinearTrainer:
    """Fits the costs of a run's trainer."""
    passes = [record for record in records if isinstance(record, MicroBatchRecord)]
    rows = [(1, record.tokens, record.tokens_squared) for record in passes]
    names = ("micro_batch_fixed_s", "token_s", "token_squared_s")
    found = _fit(rows, [record.seconds for record in passes], "micro_batch")
    sync_s = _median(records, "sync_s")
    return LinearTrainer(
        **dict(zip(names, found, strict=True)),
        update_s=_median(records, "update_s"),
        sync_s=sync_s,
        pause_overlaps=sync_s < _median(records, "pause_s"),
    )


def _median(records: Sequence[Record], part: str) -> float:
    """Returns the median of this part of a step."""
    steps = [record for record in records if isinstance(record, StepRecord)]
    if not steps:
        raise ValueError('The timeline has no record of kind "step".')
    return median(getattr(step, part) for step in steps)


def _fit(rows: Sequence[Sequence[float]], seconds: Sequence[float], kind: str) -> list[float]:
    """Returns the coefficients c >= 0 of least sum((rows c - seconds)^2 / expected), with expected
    = rows c: so the fitted seconds add up to the measured ones at any scatter."""
    used = [index for index, length in enumerate(seconds) if length > 0]
    if not used:
        raise ValueError(f'The timeline has no record of kind "{kind}" that took time.')
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
    """Returns the coefficients c >= 0, float64 [columns], of least |work c - seconds|^2, work being
    float64 [n, columns]: the unbounded solution for some of the columns, 0 for the others."""
    best, least = np.zeros(work.shape[1]), float("inf")
    for used in product([False, True], repeat=work.shape[1]):
        found = np.zeros(work.shape[1])
        found[list(used)] = np.linalg.lstsq(work[:, used], seconds)[0]
        error = float(np.linalg.norm(work @ found - seconds))
        if found.min() >= 0 and error < least:
            best, least = found, error
    return best
