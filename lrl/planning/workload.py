"""The work of one optimizer step: prompts and responses, or episodes, and how long they are.

A step's responses are taken at evenly spread quantiles and not drawn: a plan then has no noise, and
the longest of n responses grows with n as it does in a run.
"""

import csv
import json
import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from lrl.training.tree_cost import cheapest_trees

POINTS = 2048
"""Quantiles of a distribution that is given by a formula."""
COLUMNS = ("length", "response_tokens", "num_tokens", "tokens")
"""Columns of a file of measured lengths; the first one present counts."""
FORMS = (
    "lognormal:mean=2000,max=8000[,sigma=1], fixed:512, or a .jsonl or .csv file with a column "
    "'length'"
)


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
    """Returns the distribution that `text` names, one of `FORMS`.

    Raises:
        ValueError: The text has another form, or impossible numbers; it names `setting`.
        FileNotFoundError: There is no such file.
    """
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
