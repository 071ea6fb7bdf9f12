"""The work of one optimizer step: prompts and responses, or episodes, and how long they are; and the
seconds of its generation under continuous batching, drained or in a steady flow.

A step's responses are taken at evenly spread quantiles and not drawn: a plan then has no noise, and
the longest of n responses grows with n as it does in a run.

On-policy, a generator starts with all its responses and ends with the longest: its batch drains,
and the makespan is added up event by event. With lag, the next step's responses follow at once, the
batch stays full, and a steady flow has a closed form; the longest response then only bounds the end
of its own step. An episode that waits for its environment is in no batch. In a steady flow others
that pacing has admitted take its place; in a drain the wait of the longest comes on top.
"""

import csv
import heapq
import json
import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from lrl.planning.costs import GeneratorCosts
from lrl.training.tree_cost import cheapest_trees

POINTS = 2048
"""Quantiles of a distribution that is given by a formula."""
COLUMNS = ("length", "response_tokens", "num_tokens", "tokens")
"""Columns of a file of measured lengths; the first one present counts."""
FORMS = (
    "lognormal:mean=2000,max=8000[,sigma=1], fixed:512, or a .jsonl or .csv file with a column "
    "'length'"
)
REPRESENTATIVES = 96
"""Most responses that are followed one by one in a drain; of more, each stands for several."""
SHARES = 33
"""Points of the curve of complete groups."""
GOLDEN = 0.6180339887498949
"""Golden ratio's fraction: its multiples modulo 1 make an order independent of length."""


@dataclass(frozen=True)
class Quantiles:
    """A distribution, of response lengths in tokens, of turns or of milliseconds."""

    values: tuple[float, ...]
    """At even steps, ascending."""

    def __post_init__(self) -> None:
        if not self.values or not all(1 <= value < math.inf for value in self.values):
            raise ValueError("every value must be finite and at least 1")

    @cached_property
    def mean(self) -> float:
        return float(np.mean(self.values))

    @cached_property
    def mean_square(self) -> float:
        return float(np.mean(np.square(self.values)))

    @property
    def longest(self) -> float:
        return self.values[-1]

    @property
    def written(self) -> float:
        """Mean tokens of an unfinished response at a random moment: E[L^2] / 2 E[L]."""
        return self.mean_square / (2 * self.mean)

    def of(self, responses: int) -> NDArray[np.float64]:
        """Returns ascending lengths, float64 [responses]: the quantiles (i + 1/2) / n."""
        wanted, known = ((np.arange(n) + 0.5) / n for n in (responses, len(self.values)))
        return np.interp(wanted, known, self.values)


def parse_lengths(text: str, setting: str = "--lengths") -> Quantiles:
    """Returns the distribution that `text` names, one of `FORMS`. Raises FileNotFoundError without
    such a file, and ValueError, with `setting`, for another form or impossible numbers."""
    kind, _, rest = text.partition(":")
    try:
        if kind == "lognormal":
            return _lognormal(**{k: float(v) for k, v in (p.split("=") for p in rest.split(","))})
        if kind == "fixed":
            return Quantiles((float(rest),))
        return _measured(Path(text))
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{setting} is {text!r}; give {FORMS} ({error}).") from error


def _lognormal(mean: float, max: float, sigma: float = 1.0) -> Quantiles:
    """Returns a lognormal that is cut at `max`; `mean` is the mean after the cut."""
    if not 1 < mean < max < math.inf or not 0 < sigma < math.inf:
        raise ValueError("mean must lie between 1 and max, and sigma above 0")
    normal = [NormalDist().inv_cdf((i + 0.5) / POINTS) for i in range(POINTS)]
    shape = np.exp(sigma * np.array(normal))
    low, high = 0.0, max / shape[0]
    for _ in range(60):  # bisection: the mean after the cut grows with the scale
        middle = (low + high) / 2
        if np.clip(middle * shape, 1, max).mean() < mean:
            low = middle
        else:
            high = middle
    return Quantiles(tuple(np.clip(high * shape, 1, max).tolist()))


def _measured(path: Path) -> Quantiles:
    if path.suffix not in {".jsonl", ".csv"}:
        raise ValueError("no such form")
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file) if path.suffix == ".csv" else map(json.loads, file))
    column = next((name for name in COLUMNS if rows and name in rows[0]), "length")
    return Quantiles(tuple(sorted(float(row[column]) for row in rows)))


@dataclass(frozen=True, kw_only=True)
class Episodes:
    """Episodes of a step. The lengths of their turns are alike within an episode."""

    turns: Quantiles
    turn_lengths: Quantiles
    observation_tokens: int
    """Of an observation: one between each two turns."""
    tool_ms: Quantiles | None = None
    """Milliseconds of an answer, of which each turn gets one; None for none."""

    @cached_property
    def lengths(self) -> Quantiles:
        """Tokens of whole episodes, observations included. Drawn once, with a fixed seed: the sum
        of a random number of lengths has no closed form."""
        random = np.random.default_rng(0)
        turns = np.maximum(1, np.round(self.turns.of(POINTS))).astype(int)
        ends = np.cumsum(turns)
        # Half of the variance is the episode's (`LengthSampler.prompt_share`).
        normal = np.repeat(random.standard_normal(POINTS), turns)
        normal += random.standard_normal(ends[-1])
        ranks = normal.argsort().argsort()
        tokens = self.turn_lengths.of(int(ends[-1]))[ranks]
        own = np.add.reduceat(tokens, ends - turns)
        return Quantiles(tuple(sorted((own + (turns - 1) * self.observation_tokens).tolist())))

    @property
    def answer_s(self) -> float:
        """Mean seconds of an answer."""
        return 0.0 if self.tool_ms is None else self.tool_ms.mean / 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Prompts and responses of one optimizer step."""

    prompts: int
    responses: int
    """To each prompt."""
    prompt_tokens: int
    """Of every prompt."""
    lengths: Quantiles
    """Tokens of the responses; of whole episodes, if there are `episodes`."""
    episodes: Episodes | None = None
    """None for responses of a single turn."""
    attention_tokens: int = 0
    """See `lrl.training.tree_cost`; 0 if each response carries its own prompt through training."""

    @property
    def samples(self) -> int:
        return self.prompts * self.responses

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence (prompt and response)."""
        return self.prompt_tokens + int(self.lengths.longest)

    @property
    def trees(self) -> int:
        """Trees of a prompt in training, each of which reads the prompt once."""
        if not self.attention_tokens or self.prompt_tokens < 2:
            return self.responses
        shared = self.prompt_tokens - 1
        return cheapest_trees(self.responses, shared, self._branches, self.attention_tokens)

    @property
    def _branches(self) -> float:
        """Tokens of all responses to a prompt, each with the prompt's last token."""
        return self.responses * (1 + self.lengths.mean)

    @property
    def tokens(self) -> float:
        """Tokens to train, prompts included."""
        if self.trees < self.responses:
            return self.prompts * (self.trees * (self.prompt_tokens - 1) + self._branches)
        return self.samples * (self.prompt_tokens + self.lengths.mean)

    @property
    def tokens_squared(self) -> float:
        """Sum of the squared lengths of the rows to train, without padding."""
        prompt = self.prompt_tokens
        if self.trees < self.responses:
            length = prompt - 1 + self._branches / self.trees
            return self.prompts * self.trees * length**2
        squared = prompt**2 + 2 * prompt * self.lengths.mean + self.lengths.mean_square
        return self.samples * squared

    @property
    def live_tokens(self) -> float:
        """Mean context (prompt and response so far) of an unfinished response."""
        return self.prompt_tokens + self.lengths.written

    @property
    def read_tokens(self) -> float:
        """Mean tokens of a response that a generator reads after its prompt: observations."""
        if self.episodes is None:
            return 0.0
        return (self.episodes.turns.mean - 1) * self.episodes.observation_tokens

    @property
    def written_share(self) -> float:
        """Share of a response's tokens that a generator writes."""
        return 1 - self.read_tokens / self.lengths.mean

    @property
    def tool_s(self) -> float:
        """Mean seconds in which a response waits for an environment."""
        return self.episodes.turns.mean * self.episodes.answer_s if self.episodes else 0.0

    @property
    def longest_tool_s(self) -> float:
        """The most such seconds, of the episode with the most turns."""
        return self.episodes.turns.longest * self.episodes.answer_s if self.episodes else 0.0


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
