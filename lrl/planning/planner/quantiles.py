"""Distributions of lengths and of seconds, as their quantiles.

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
from typing import Any

import numpy as np
from numpy.typing import NDArray

POINTS = 2048
"""Quantiles of a distribution that is given by a formula."""
SIGMA = 1.0
"""Default standard deviation of a length's logarithm."""
COLUMNS = ("length", "response_tokens", "num_tokens", "tokens")
"""Columns of a file of measured lengths; the first one present counts."""
FORMS = (
    "lognormal:mean=2000,max=8000[,sigma=1], fixed:512, or a .jsonl or .csv file with a column "
    "'length'"
)


@dataclass(frozen=True)
class Quantiles:
    """Response lengths in tokens."""

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
        """Largest length."""
        return self.values[-1]

    @property
    def written(self) -> float:
        """Mean tokens of an unfinished response at a random moment of its generation: E[L^2] / 2
        E[L]."""
        return self.mean_square / (2 * self.mean)

    def of(self, responses: int) -> NDArray[np.float64]:
        """Returns the ascending lengths of `responses` responses, float64 [responses]: quantiles (i
        + 1/2) / n."""
        quantiles = (np.arange(responses) + 0.5) / responses
        return np.interp(
            quantiles, (np.arange(len(self.values)) + 0.5) / len(self.values), self.values
        )


def parse_lengths(text: str, setting: str = "--lengths") -> Quantiles:
    """Returns the distribution that `text` names, one of `FORMS`. A lognormal is cut at `max`, as
    responses are; `mean` is the mean after the cut.

    Raises:
        ValueError: The text has another form, or impossible numbers; it names `setting`.
        FileNotFoundError: There is no such file.
    """
    kind, _, rest = text.partition(":")
    if kind == "lognormal":
        return _lognormal(_numbers(rest, setting, text), setting, text)
    if kind == "fixed":
        numbers = _numbers(f"length={rest}", setting, text)
        if len(numbers) > 1 or not 1 <= numbers["length"] < math.inf:
            raise ValueError(
                f"{setting} is {text!r}; after fixed: comes one finite length from 1 on, like "
                "fixed:512."
            )
        return Quantiles((numbers["length"],))
    if Path(text).suffix in {".jsonl", ".csv"}:
        return _measured(Path(text), setting)
    raise ValueError(f"{setting} is {text!r}; give {FORMS}.")


def _numbers(text: str, setting: str, whole: str) -> dict[str, float]:
    numbers: dict[str, float] = {}
    try:
        for part in text.split(","):
            name, value = part.split("=")
            numbers[name.strip()] = float(value)
        return numbers
    except ValueError:
        raise ValueError(f"{setting} is {whole!r}; give {FORMS}.") from None


def _lognormal(numbers: dict[str, float], setting: str, text: str) -> Quantiles:
    if {"mean", "max"} - numbers.keys() or numbers.keys() - {"mean", "max", "sigma"}:
        raise ValueError(
            f"{setting} is {text!r}; a lognormal takes mean, max and, if wanted, sigma."
        )
    mean = numbers["mean"]
    longest = numbers["max"]
    sigma = numbers.get("sigma", SIGMA)
    if not 1 < mean < longest < math.inf or not 0 < sigma < math.inf:
        raise ValueError(
            f"{setting} is {text!r}; mean must lie between 1 and max, sigma above 0, all of them "
            "finite."
        )
    shape = np.exp(
        sigma * np.array([NormalDist().inv_cdf((i + 0.5) / POINTS) for i in range(POINTS)])
    )
    low = 0.0
    high = longest / shape[0]
    for _ in range(60):  # bisection: the mean after the cut grows with the scale
        middle = (low + high) / 2
        if np.clip(middle * shape, 1, longest).mean() < mean:
            low = middle
        else:
            high = middle
    return Quantiles(tuple(np.clip(high * shape, 1, longest).tolist()))


def _measured(path: Path, setting: str) -> Quantiles:
    if not path.is_file():
        raise FileNotFoundError(
            f"{setting} is {str(path)!r}, and there is no such file. Give {FORMS}."
        )
    try:
        rows = _rows(path)
    except ValueError as error:
        raise ValueError(
            f"{setting} is {str(path)!r}, which cannot be read: {error}. Give {FORMS}."
        ) from error
    needed = (
        f"every row must have a column named {' or '.join(COLUMNS)} with a length of at least one "
        "token"
    )
    if not rows:
        raise ValueError(f"{setting} is {str(path)!r}, which has no row; {needed}.")
    column = next((name for name in COLUMNS if isinstance(rows[0], dict) and name in rows[0]), "")
    lengths = []
    for number, row in enumerate(rows, start=1):
        try:
            lengths.append(float(row[column]))
            Quantiles((lengths[-1],))
        except (KeyError, ValueError, TypeError) as error:
            raise ValueError(
                f"{setting} is {str(path)!r}: row {number} is {row!r}; {needed}."
            ) from error
    return Quantiles(tuple(sorted(lengths)))


def _rows(path: Path) -> list[dict[str, Any]]:
    with path.open(newline="") as file:
        if path.suffix == ".csv":
            return list(csv.DictReader(file))
        return [json.loads(line) for line in file if line.strip()]
