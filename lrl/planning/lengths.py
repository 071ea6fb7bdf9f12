"""Lengths of responses: a distribution, held as its quantiles.

A step's responses are taken at evenly spread quantiles and not drawn: a plan then has no noise, and the longest of n
responses grows with n as it does in a run.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

POINTS = 2048
"""Quantiles that stand for a distribution given by its formula."""
SIGMA = 1.0
"""Standard deviation of the logarithm of a length where none is given."""
COLUMNS = ("length", "response_tokens", "num_tokens", "tokens")
"""Columns of a file of measured lengths; the first that is there counts."""
FORMS = "lognormal:mean=2000,max=8000[,sigma=1], fixed:512, or a .jsonl or .csv file with a column 'length'"


@dataclass(frozen=True)
class Quantiles:
    """How long responses are, in tokens."""

    values: tuple[float, ...]
    """At even steps, ascending."""

    def __post_init__(self) -> None:
        if not self.values or not all(1 <= value < math.inf for value in self.values):
            raise ValueError("a response has at least one token, and an end.")

    @cached_property
    def mean(self) -> float:
        """Mean length."""
        return float(np.mean(self.values))

    @cached_property
    def mean_square(self) -> float:
        """Mean of the squared length."""
        return float(np.mean(np.square(self.values)))

    @property
    def longest(self) -> float:
        """The largest length there is."""
        return self.values[-1]

    @property
    def written(self) -> float:
        """Tokens that a response has on average at a random moment while it is being written: E[L^2] / 2 E[L]."""
        return self.mean_square / (2 * self.mean)

    def of(self, responses: int) -> NDArray[np.float64]:
        """Ascending lengths of `responses` answers, float64 [responses]: quantiles (i + 1/2) / responses."""
        places = (np.arange(responses) + 0.5) / responses
        return np.interp(places, (np.arange(len(self.values)) + 0.5) / len(self.values), self.values)


def parse_lengths(text: str, setting: str = "--lengths") -> Quantiles:
    """The distribution that a text names.

    Args:
        text: One of `FORMS`. A lognormal is cut at `max`, as responses are; `mean` is the mean after the cut.
        setting: What an error calls it.

    Raises:
        ValueError: The text has another form, or numbers that no distribution has.
        FileNotFoundError: The file is not there.
    """
    kind, _, rest = text.partition(":")
    if kind == "lognormal":
        return _lognormal(_numbers(rest, setting, text), setting, text)
    if kind == "fixed":
        numbers = _numbers(f"length={rest}", setting, text)
        if len(numbers) > 1:
            raise ValueError(f"{setting} is {text!r}; after fixed: comes one length and nothing else, like fixed:512.")
        if not 1 <= numbers["length"] < math.inf:
            raise ValueError(f"{setting} is {text!r}; a response has at least one token, and an end.")
        return Quantiles((numbers["length"],))
    if Path(text).suffix in READERS:
        return _measured(Path(text), setting)
    raise ValueError(f"{setting} is {text!r}; give {FORMS}.")


def _numbers(text: str, setting: str, whole: str) -> dict[str, float]:
    try:
        return {name.strip(): float(value) for name, value in (part.split("=") for part in text.split(","))}
    except ValueError:
        raise ValueError(f"{setting} is {whole!r}; give {FORMS}.") from None


def _lognormal(numbers: dict[str, float], setting: str, text: str) -> Quantiles:
    if {"mean", "max"} - numbers.keys() or numbers.keys() - {"mean", "max", "sigma"}:
        raise ValueError(f"{setting} is {text!r}; a lognormal takes mean, max and, if wanted, sigma.")
    mean, longest, sigma = numbers["mean"], numbers["max"], numbers.get("sigma", SIGMA)
    if not 1 < mean < longest < math.inf or not 0 < sigma < math.inf:
        raise ValueError(f"{setting} is {text!r}; mean must lie between 1 and max, sigma above 0, all of them finite.")
    shape = np.exp(sigma * np.array([NormalDist().inv_cdf((i + 0.5) / POINTS) for i in range(POINTS)]))

    def cut(scale: float) -> NDArray[np.float64]:
        return np.clip(scale * shape, 1, longest)

    scale = _solve(lambda scale: float(cut(scale).mean()), mean, high=longest / shape[0])
    return Quantiles(tuple(cut(scale).tolist()))


def _solve(grows: Callable[[float], float], wanted: float, high: float) -> float:
    """Where a growing function has a value, by halving [0, high]."""
    low = 0.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if grows(middle) < wanted else (low, middle)
    return high


def _measured(path: Path, setting: str) -> Quantiles:
    if not path.is_file():
        raise FileNotFoundError(f"{setting} is {str(path)!r}, and there is no such file. Give {FORMS}.")
    try:
        rows = READERS[path.suffix](path)
    except ValueError as error:
        raise ValueError(f"{setting} is {str(path)!r}, which cannot be read: {error}. Give {FORMS}.") from error
    needed = f"every row must have a column named {' or '.join(COLUMNS)} with a length of at least one token"
    if not rows:
        raise ValueError(f"{setting} is {str(path)!r}, which has no row; {needed}.")
    column = next((name for name in COLUMNS if isinstance(rows[0], dict) and name in rows[0]), "")
    lengths = []
    for number, row in enumerate(rows, start=1):
        try:
            lengths.append(float(row[column]))
            Quantiles((lengths[-1],))
        except (KeyError, ValueError, TypeError) as error:
            raise ValueError(f"{setting} is {str(path)!r}: row {number} is {row!r}; {needed}.") from error
    return Quantiles(tuple(sorted(lengths)))


def _read_jsonl(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


def _read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


READERS: dict[str, Callable[[Path], list[dict[str, str]]]] = {".jsonl": _read_jsonl, ".csv": _read_csv}
"""How a file of lengths is read, by its ending."""
