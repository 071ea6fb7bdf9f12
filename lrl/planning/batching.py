"""Seconds of a step's generation under continuous batching, drained or in a steady flow.

On-policy, a generator starts with all its responses and ends with the longest: its batch drains,
and the makespan is added up event by event. With lag, the next step's responses follow at once, the
batch stays full, and a steady flow has a closed form; the longest response then only bounds the end
of its own step.

An episode that waits for its environment is in no batch. In a steady flow others that pacing has
admitted take its place; in a drain the wait of the longest comes on top.
"""

import heapq
import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from lrl.planning.costs import GeneratorCosts
from lrl.planning.workload import Workload

REPRESENTATIVES = 96
"""Most responses that are followed one by one in a drain; of more, each stands for several."""
SHARES = 33
"""Points of the curve of complete groups."""
GOLDEN = 0.6180339887498949
"""Golden ratio's fraction: its multiples modulo 1 make an order independent of length."""


@dataclass(frozen=True, slots=True)
class GenerationPhase:
    """A step's responses on one generator."""

    busy_s: float
    """Seconds of generation for a step without waits."""
    span_s: float
    """Seconds from the admission of the step's responses to the end of the last one."""
    slots: int
    """Most responses at the same time."""
    flow_s: float = 0.0
    """Seconds of a step whose episodes are always as many as pacing allows; above `busy_s` where
    they are too few to keep a generator busy while they wait for tools."""
    at_tools: float = 0.0
    """Episodes that wait for a tool at a time, mean over a step."""
    group_ends_s: tuple[float, ...] = ()
    """Seconds from admission until even shares of the groups are complete; empty if steady."""

    def shortest_step_s(self, lag: int) -> float:
        """Returns P_gen of StreamRL's Algorithm 1: the shortest step that it allows."""
        return max(self.busy_s, self.flow_s, self.span_s / (lag + 1))

    def trained_s(self, training_s: float, last_s: float) -> float:
        """Returns the seconds from admission to the end of a training that takes groups as they
        become complete: `training_s`, of which `last_s` for the last micro-batch come after the
        last group."""
        shares = np.linspace(1, 0, len(self.group_ends_s))
        fed = np.array(self.group_ends_s) + shares * training_s
        return max(float(fed.max()), self.span_s + last_s)


def slots_of(costs: GeneratorCosts, workload: Workload) -> int:
    """Returns the responses that fit on average at once; 0 if the longest alone does not."""
    if costs.kv_tokens < workload.longest:
        return 0
    return max(1, int(costs.kv_tokens / workload.live_tokens))


def drained(costs: GeneratorCosts, workload: Workload, generators: int) -> GenerationPhase:
    """Returns the phase of a step that starts with nothing in flight, on the generator with the
    longest response. Responses start in an order independent of their lengths."""
    responses = -(-workload.samples // generators)
    slots = min(slots_of(costs, workload), responses)
    followed = min(responses, REPRESENTATIVES)
    lengths = workload.lengths.of(followed)
    lengths[-1] = workload.lengths.of(workload.samples)[-1]
    order = np.argsort((np.arange(followed) * GOLDEN) % 1.0)
    weight = responses / followed
    ends = _drain(costs, workload, lengths=lengths[order].tolist(), weight=weight, slots=slots)
    # Of n responses that end independently, all have ended with the n-th power of one's
    # probability.
    shares = np.linspace(0, 1, SHARES) ** (1 / workload.responses)
    group_ends = np.interp(shares, (np.arange(len(ends)) + 1) / len(ends), ends)
    return GenerationPhase(
        busy_s=ends[-1],
        span_s=ends[-1] + workload.longest_tool_s,
        slots=slots,
        group_ends_s=tuple((group_ends + workload.tool_s).tolist()),
    )


def _drain(
    costs: GeneratorCosts, workload: Workload, lengths: list[float], weight: float, slots: int
) -> list[float]:
    """Returns the seconds until each of `lengths` ends, ascending; each stands for `weight`
    responses. All prompts are prefilled first, and all running responses advance together, so one
    token count orders all ends."""
    share = workload.written_share
    ends: list[tuple[float, float]] = []  # (count at the end, count at the start), a heap
    over: list[float] = []
    count = starts = 0.0
    clock = _prefill_s(costs, workload, len(lengths) * weight)
    waiting = deque(lengths)
    while waiting or ends:
        while waiting and (not ends or (len(ends) + 1) * weight <= slots):
            heapq.heappush(ends, (count + waiting.popleft(), count))
            starts += count
        end, start = heapq.heappop(ends)
        alive = (len(ends) + 1) * weight
        middle = (count + end) / 2
        context = alive * (workload.prompt_tokens + middle) - starts * weight
        clock += share * (end - count) * costs.decode_s(math.ceil(alive), round(context))
        count, starts = end, starts - start
        over.append(clock)
    return over


def _prefill_s(costs: GeneratorCosts, workload: Workload, responses: float) -> float:
    """Returns the seconds of prefill; a group shares its prompt, a later turn reads what is new."""
    each = workload.prompt_tokens / workload.responses + workload.read_tokens
    return costs.prefill_s(int(responses * each))


def steady(costs: GeneratorCosts, workload: Workload, generators: int, lag: int) -> GenerationPhase:
    """Returns the phase of a step in a steady flow: the next step's responses start at once. `lag`
    is at least 1.

    Pacing lets between `lag` and `lag + 1` steps' responses be in flight, half of them between on
    average, or as many as fit; the generator is then at its fastest. If the longest response
    becomes too slow for the bound on lag, steps take longer and fewer responses are in flight,
    until both agree: the more responses share the generator, the sooner a step's worth is written,
    and the later each of them ends.

    With tools, those in flight are in the batch or wait. By Little's law as many wait as end in the
    time of an episode's tools.
    """
    responses = workload.samples / generators
    in_flight = math.ceil((lag + 0.5) * responses)
    longest = float(workload.lengths.of(workload.samples)[-1]) * workload.written_share
    written = workload.lengths.mean * workload.written_share
    prompts_s = _prefill_s(costs, workload, responses)

    def token_s(batch: int) -> float:
        return costs.decode_s(batch, round(batch * workload.live_tokens))

    def step_s(batch: int) -> float:
        return responses * written * token_s(batch) / batch + prompts_s

    def at_tools(step_s: float) -> float:
        return responses / step_s * workload.tool_s

    def span_s(batch: int) -> float:
        return longest * token_s(batch) + workload.longest_tool_s

    def has_room(batch: int) -> bool:
        return batch + at_tools(step_s(batch)) <= in_flight

    fitting = slots_of(costs, workload)
    most = _most(min(fitting, in_flight), has_room)
    batch = _most(most, lambda batch: span_s(batch) <= (lag + 1) * step_s(batch))
    flow_s = max(step_s(most), (responses * workload.tool_s + step_s(1)) / in_flight)
    return GenerationPhase(
        busy_s=step_s(most),
        span_s=span_s(batch),
        slots=min(fitting, math.ceil((lag + 1) * responses)),
        flow_s=flow_s,
        at_tools=generators * at_tools(flow_s),
    )


def _most(limit: int, holds: Callable[[int], bool]) -> int:
    """Returns the largest number up to `limit` that `holds`, as all smaller do; at least 1."""
    return max(1, bisect_left(range(1, limit + 1), True, key=lambda number: not holds(number)))
