"""How long generators take for a step's answers: continuous batching, drained or in a steady flow.

On-policy a generator starts with all its answers and ends with the longest: its batch drains, and the makespan is added
up event by event. With lag the next step's answers follow at once, the batch stays full, and the mean of a steady flow
is a closed form; the longest answer then only bounds how soon its own step can end.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass

import numpy as np

from lrl.planning.costs import GeneratorCosts
from lrl.planning.workload import Workload

REPRESENTATIVES = 96
"""Most answers that are followed one by one in a drain; of more, each stands for several."""
GOLDEN = 0.6180339887498949
"""Its multiples modulo 1 spread evenly: an order of arrival that knows nothing of lengths, and has no seed."""


@dataclass(frozen=True, slots=True)
class Writing:
    """A step's answers on one generator."""

    busy_s: float
    """Seconds a step that the generator needs if nothing holds it up."""
    span_s: float
    """Seconds from the admission of the step's answers to the end of the last one."""
    slots: int
    """Answers it writes at the same time."""


def slots_of(costs: GeneratorCosts, workload: Workload) -> int:
    """Answers whose keys and values fit on average at the same time; 0 if the longest alone does not fit."""
    if costs.kv_tokens < workload.longest:
        return 0
    return max(1, int(costs.kv_tokens / workload.live_tokens))


def drained(costs: GeneratorCosts, workload: Workload, generators: int) -> Writing:
    """A step that starts with nothing in flight: the makespan of the generator that has the longest answer.

    Answers start in an order that knows nothing of their lengths, as soon as one before has ended.

    Args:
        costs: Of one generator.
        workload: The step's, spread evenly over the fleet.
        generators: How many there are.
    """
    answers = -(-workload.samples // generators)
    slots = min(slots_of(costs, workload), answers)
    followed = min(answers, REPRESENTATIVES)
    lengths = workload.lengths.of(followed)
    lengths[-1] = workload.lengths.of(workload.samples)[-1]
    order = np.argsort((np.arange(followed) * GOLDEN) % 1.0)
    makespan = _drain(costs, workload, lengths[order].tolist(), answers / followed, slots)
    return Writing(makespan, makespan, slots)


def _drain(costs: GeneratorCosts, workload: Workload, lengths: list[float], weight: float, slots: int) -> float:
    """Seconds until the last of `lengths` ends, each standing for `weight` answers.

    All prompts are read first. What is being written advances together, so one count of tokens orders all ends.
    """
    ends: list[tuple[float, float]] = []  # (count at the end, count at the start), a heap
    count = starts = 0.0
    clock = _prefill_s(costs, workload, len(lengths) * weight)
    waiting = iter(lengths)
    upcoming = next(waiting, None)
    while upcoming is not None or ends:
        while upcoming is not None and (not ends or (len(ends) + 1) * weight <= slots):
            heapq.heappush(ends, (count + upcoming, count))
            starts += count
            upcoming = next(waiting, None)
        end, start = heapq.heappop(ends)
        alive = (len(ends) + 1) * weight
        middle = (count + end) / 2
        context = alive * (workload.prompt_tokens + middle) - starts * weight
        clock += (end - count) * costs.decode_s(math.ceil(alive), round(context))
        count, starts = end, starts - start
    return clock


def _prefill_s(costs: GeneratorCosts, workload: Workload, answers: float) -> float:
    """Seconds to read the prompts of `answers` answers; a group's answers share theirs."""
    return costs.prefill_s(int(answers * workload.prompt_tokens / workload.answers))


def steady(costs: GeneratorCosts, workload: Workload, generators: int, lag: int) -> Writing:
    """A step of a flow in which the next answers start at once: `lag` at least 1.

    In flight are between `lag` and `lag + 1` steps' answers (pacing admits a step's worth at each sync), half of them
    between on average, or as many as fit. What does not fit waits for those before it.

    Args:
        costs: Of one generator.
        workload: The step's, spread evenly over the fleet.
        generators: How many there are.
        lag: Most versions between writing and training.
    """
    answers = workload.samples / generators
    wanted = (lag + 0.5) * answers
    slots = min(slots_of(costs, workload), math.ceil(wanted))
    token_s = costs.decode_s(slots, round(slots * workload.live_tokens))
    busy = answers * workload.lengths.mean * token_s / slots + _prefill_s(costs, workload, answers)
    queued = max(0.0, wanted - slots) / answers * busy
    longest = float(workload.lengths.of(workload.samples)[-1])
    return Writing(busy, queued + longest * token_s, slots)
