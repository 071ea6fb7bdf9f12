"""How long responses are; the work of one optimizer step; and the seconds of its generation under
continuous batching, drained or in a steady flow.

A step's responses are taken at evenly spread quantiles and not drawn: a plan then has no noise, and
the longest of n responses grows with n as it does in a run.

On-policy, a generator starts with all its responses and ends with the longest: its batch drains.
With lag, the next step's responses follow at once, the batch stays full, and the longest response
only bounds the end of its own step.
"""

import csv
import json
import math
from bisect import bisect_left
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from lrl.planning.costs import GeneratorCosts
from lrl.training.prefix_tree import cheapest_trees

POINTS = 2048
"""Quantiles of a distribution that is given by a formula."""
FORMS = (
    "lognormal:mean=2000,max=8000[,sigma=1], fixed:512, or a .jsonl or .csv file with a column "
    "'length'"
)
REPRESENTATIVES = 96
"""Most responses that are followed one by one; of more, each stands for several."""
SHARES = 33
"""Points of the curve of complete groups."""


@dataclass(frozen=True)
class Quantiles:
    """A distribution of response lengths in tokens."""

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


def parse_lengths(text: str) -> Quantiles:
    """Returns the distribution that `text` names, one of `FORMS`; raises ValueError for another one,
    impossible numbers, or a missing file."""
    kind, _, rest = text.partition(":")
    try:
        if kind == "lognormal":
            return _lognormal(**{k: float(v) for k, v in (p.split("=") for p in rest.split(","))})
        if kind == "fixed":
            return Quantiles((float(rest),))
        with Path(text).open(newline="") as file:
            rows = list(csv.DictReader(file) if text.endswith(".csv") else map(json.loads, file))
        return Quantiles(tuple(sorted(float(row["length"]) for row in rows)))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ValueError(f"--lengths is {text!r}; give {FORMS} ({error}).") from error


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


@dataclass
class Lognormal:
    """Lengths in tokens: exp of a normal number (mean log(`median`), deviation `sigma`), cut at
    `longest`. They are drawn as a function of seed, prompt and group: the same under every dispatch.

    Responses to one prompt are alike, for length is largely a matter of the prompt's difficulty
    (StreamRL, 2504.15930, ranks prompts by it), so a part of the normal number is the prompt's.
    """

    median: float
    sigma: float
    longest: int
    prompt_share: float = field(default=0.5, kw_only=True)
    """Share of the variance between prompts, in [0, 1]: at 1 a prompt's responses are equally long."""
    seed: int = field(default=0, kw_only=True)

    def of(self, prompt: int, index: int, responses: int) -> list[int]:
        """Returns the tokens of each response of a group: `prompt` is `Prompt.id`, and `index` is
        `Group.index`, as another epoch has other responses to the same prompt."""
        of_prompt = np.random.default_rng([self.seed, 0, prompt]).standard_normal()
        of_responses = np.random.default_rng([self.seed, 1, index]).standard_normal(responses)
        own = math.sqrt(1 - self.prompt_share) * of_responses
        normal = math.sqrt(self.prompt_share) * of_prompt + own
        tokens = self.median * np.exp(self.sigma * normal)
        return tokens.clip(1, self.longest).astype(np.int64).tolist()


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Prompts and responses of one optimizer step."""

    prompts: int
    responses: int
    """To each prompt."""
    prompt_tokens: int
    """Of every prompt."""
    lengths: Quantiles
    """Tokens of the responses."""
    attention_tokens: int = 0
    """See `lrl.training.prefix_tree`; 0 if each response carries its own prompt through training."""

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
        return self.prompts * (self.trees * (self.prompt_tokens - 1) + self._branches)

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


@dataclass(frozen=True, slots=True)
class GenerationPhase:
    """A step's responses on one generator."""

    busy_s: float
    """Seconds of generation for a step without waits."""
    span_s: float
    """Seconds from the admission of the step's responses to the end of the last one."""
    slots: int
    """Most responses at the same time."""
    group_ends_s: tuple[float, ...] = ()
    """Seconds from admission until even shares of the groups are complete; empty if steady."""

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
    longest response: a full batch until no response waits any more, and then its end."""
    responses = -(-workload.samples // generators)
    slots = min(slots_of(costs, workload), responses)
    followed = min(slots, REPRESENTATIVES)
    weight = slots / followed
    lengths = workload.lengths.of(followed)
    lengths[-1] = workload.lengths.of(workload.samples)[-1]
    prompts_s = costs.prefill_s(int(responses * workload.prompt_tokens / workload.responses))
    full_s = costs.decode_s(slots, round(slots * workload.live_tokens))
    clock = prompts_s + (responses - slots) / slots * workload.lengths.mean * full_s
    ended, ends_s, before = [0.0, 1 - slots / responses], [prompts_s, clock], 0.0
    for number, length in enumerate(lengths.tolist()):
        alive = slots - number * weight
        context = alive * (workload.prompt_tokens + (before + length) / 2)
        clock += (length - before) * costs.decode_s(math.ceil(alive), round(context))
        before = length
        ended.append(1 - (alive - weight) / responses)
        ends_s.append(clock)
    # Of n responses that end independently, all have ended with the n-th power of one's
    # probability.
    shares = np.linspace(0, 1, SHARES) ** (1 / workload.responses)
    groups = tuple(np.interp(shares, ended, ends_s).tolist())
    return GenerationPhase(busy_s=clock, span_s=clock, slots=slots, group_ends_s=groups)


def steady(costs: GeneratorCosts, workload: Workload, generators: int, lag: int) -> GenerationPhase:
    """Returns the phase of a step in a steady flow: the next step's responses start at once. `lag`
    is at least 1.

    Pacing lets `lag + 1/2` steps' responses be in flight on average, or as many as fit. If the longest
    response becomes too slow for the bound on lag, fewer are in flight: the more responses share
    the generator, the sooner a step's worth is written, and the later each of them ends.
    """
    responses = workload.samples / generators
    longest = float(workload.lengths.of(workload.samples)[-1])
    prompts_s = costs.prefill_s(int(responses * workload.prompt_tokens / workload.responses))

    def token_s(batch: int) -> float:
        return costs.decode_s(batch, round(batch * workload.live_tokens))

    def step_s(batch: int) -> float:
        return responses * workload.lengths.mean * token_s(batch) / batch + prompts_s

    def too_slow(batch: int) -> bool:
        return longest * token_s(batch) > (lag + 1) * step_s(batch)

    fitting = slots_of(costs, workload)
    most = max(1, min(fitting, math.ceil((lag + 0.5) * responses)))
    batch = max(1, bisect_left(range(1, most + 1), True, key=too_slow))
    slots = min(fitting, math.ceil((lag + 1) * responses))
    return GenerationPhase(busy_s=step_s(most), span_s=longest * token_s(batch), slots=slots)
