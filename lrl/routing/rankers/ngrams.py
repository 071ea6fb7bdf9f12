"""The interface of a ranker, and ridge regression on hashed n-grams of the prompt's tokens.

Of the models tried on GSM8K it ranked best; stochastic gradient descent, fed once with each step,
did worse than the bare length. scikit-learn has it too, but where that is installed, torchmetrics
and transformers import it in each process: a fifth to a quarter of a start's seconds.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lrl.types import Prompt

MAX_PROMPT_TOKENS = 512
"""Tokens that are read at a prompt's end; those before them are mostly the same in all prompts."""
BUCKETS = 2**13
"""Buckets of the n-gram hash; the last one is the prompt's length."""
LENGTH_FEATURE = BUCKETS - 1
USUAL_LENGTH = np.log(64.0)
PENALTY = 1.0
"""L2 penalty of the regression."""
SMALLEST_RESIDUAL = 1e-2
"""Share of the first residual at which the fit ends; later rounds change no ranks."""
SparseRow = tuple[NDArray[np.int16], NDArray[np.float32]]
"""Columns, int16 [F], and their values, float32 [F]."""


class Ranker(ABC):
    """Guesses a number for a prompt. `guess` never waits for `learn`, which another thread may call
    meanwhile."""

    @abstractmethod
    def learn(self, prompts: Sequence[Prompt], numbers: Sequence[float]) -> None:
        """Learns the numbers of a step's prompts."""

    @abstractmethod
    def guess(self, prompt: Prompt) -> float:
        """Returns the number of a prompt; 0 before anything was learnt."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Returns the state in plain types and tensors, of bounded size."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def look_ahead(self, prompts: Sequence[Prompt]) -> None:  # noqa: B027
        """Announces prompts that will be guessed soon; called by the thread that guesses."""

    def start(self) -> None:  # noqa: B027
        """Starts the ranker's process. Call it on a thread that outlives the run."""

    def close(self) -> None:  # noqa: B027
        """Ends the ranker's process. May be called twice, and without `start`."""


class NgramRanker(Ranker):
    """Guesses from the tokens and token pairs of a prompt.

    Args:
        fitted_prompts: The newest prompts, to which it is fitted after each step.
    """

    def __init__(self, fitted_prompts: int = 2048) -> None:
        self.fitted_prompts = fitted_prompts
        self._rows: list[tuple[SparseRow, float]] = []
        self._weights: tuple[NDArray[np.float64], float] = np.zeros(BUCKETS), 0.0

    def guess(self, prompt: Prompt) -> float:
        columns, values = features(prompt.token_ids)
        weights, intercept = self._weights  # one read: another thread may fit meanwhile
        return float(weights[columns] @ values) + intercept

    def learn(self, prompts: Sequence[Prompt], numbers: Sequence[float]) -> None:
        """Fits the newest prompts anew, these among them."""
        rows = map(features, (prompt.token_ids for prompt in prompts))
        self._fit([*self._rows, *zip(rows, numbers, strict=True)][-self.fitted_prompts :])

    def _fit(self, found: list[tuple[SparseRow, float]]) -> None:
        self._rows = found
        self._weights = np.zeros(BUCKETS), 0.0
        if found:
            rows, numbers = zip(*found, strict=True)
            weights, intercept = fit_ridge(rows, numbers, BUCKETS, PENALTY)
            self._weights = weights.numpy(), intercept

    def state_dict(self) -> dict[str, Any]:
        """Returns the fitted rows: int16 and float32 [sum of F], int64 [rows] and float32 [rows]; 6
        bytes a feature."""
        columns = [np.empty(0, np.int16), *(columns for (columns, _), _ in self._rows)]
        values = [np.empty(0, np.float32), *(values for (_, values), _ in self._rows)]
        return {
            "places": torch.from_numpy(np.concatenate(columns)),
            "values": torch.from_numpy(np.concatenate(values)),
            "sizes": torch.tensor([len(one) for one in columns[1:]], dtype=torch.int64),
            "numbers": torch.tensor([number for _, number in self._rows], dtype=torch.float32),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        sizes = state["sizes"].tolist()
        columns, values = (
            [part.numpy() for part in state[name].split(sizes)] for name in ("places", "values")
        )
        rows = zip(columns, values, strict=True)
        self._fit(list(zip(rows, state["numbers"].tolist(), strict=True)))


def features(token_ids: list[int]) -> SparseRow:
    """Returns a prompt's hashed tokens and pairs of neighbours as a vector of norm 1, and its
    length."""
    ids = np.asarray(token_ids[-MAX_PROMPT_TOKENS:], dtype=np.int64)
    ngrams = np.concatenate([ids * 2654435761, ids[:-1] * 40503 + ids[1:] * 2246822519 + 1])
    columns, counts = np.unique((ngrams ^ (ngrams >> 15)) % LENGTH_FEATURE, return_counts=True)
    values = np.log1p(counts)
    values /= max(float(np.linalg.norm(values)), 1.0)
    length = np.log(1.0 + len(token_ids)) - USUAL_LENGTH
    columns, values = np.append(columns, LENGTH_FEATURE), np.append(values, length)
    return columns.astype(np.int16), values.astype(np.float32)


def fit_ridge(
    rows: Sequence[SparseRow], numbers: Sequence[float], columns: int, penalty: float
) -> tuple[Tensor, float]:
    """Returns weights w, float64 [columns], and intercept b of least sum((rows w + b - numbers)^2)
    + penalty * |w|^2.

    It solves the normal equations by conjugate gradients. The penalty makes them positive definite.
    """
    places, values = zip(*rows, strict=True)
    row = torch.arange(len(rows)).repeat_interleave(torch.tensor(list(map(len, places))))
    column = torch.from_numpy(np.concatenate(places)).long()
    value = torch.from_numpy(np.concatenate(values)).double()
    wanted = torch.tensor(numbers, dtype=torch.float64)

    def times(weights: Tensor) -> Tensor:
        result = torch.zeros(len(rows), dtype=torch.float64)
        return result.index_add_(0, row, value * weights[column])

    def transposed_times(residuals: Tensor) -> Tensor:
        centred = residuals - residuals.mean()  # the intercept takes the mean, and is not penalised
        return torch.zeros(columns, dtype=torch.float64).index_add_(0, column, value * centred[row])

    weights = torch.zeros(columns, dtype=torch.float64)
    residual = direction = transposed_times(wanted)
    square = first = residual @ residual
    while square > SMALLEST_RESIDUAL**2 * first:
        image = transposed_times(times(direction)) + penalty * direction
        step = square / (direction @ image)
        weights = weights + step * direction
        residual = residual - step * image
        before, square = square, residual @ residual
        direction = residual + square / before * direction
    return weights, float((wanted - times(weights)).mean())
