"""Ridge regression on hashed n-grams of the prompt's tokens.

It costs a tenth of a millisecond a prompt, and some 20 ms for a fit on the newest prompts. Of the
models tried on GSM8K it also ranked best; stochastic gradient descent, fed once with each step,
did worse than the bare length.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lrl.routing.rankers.base import Ranker
from lrl.routing.rankers.ridge import SparseRow, fit
from lrl.system.config_errors import above, at_least
from lrl.types import Prompt

BUCKETS = 2**13
"""Buckets of the n-gram hash; the last one is the prompt's length."""
LENGTH_FEATURE = BUCKETS - 1
MAX_PROMPT_TOKENS = 512
"""Tokens at a prompt's end whose n-grams count; the tokens before them are mostly the same in all
prompts."""
USUAL_LENGTH = np.log(64.0)


class NgramRanker(Ranker):
    """Guesses from the tokens and token pairs of a prompt.

    Args:
        fitted_prompts: The newest prompts, to which it is fitted after each step.
        penalty: L2 penalty of the regression.

    Raises:
        ValueError: A setting is outside its range.
    """

    def __init__(self, fitted_prompts: int = 2048, penalty: float = 1.0) -> None:
        at_least(1, "data.length_predictor.ranker", fitted_prompts=fitted_prompts)
        above(0, "data.length_predictor.ranker", penalty=penalty)
        self.fitted_prompts = fitted_prompts
        self.penalty = penalty
        self._rows: list[tuple[SparseRow, float]] = []
        self._weights: tuple[NDArray[np.float64], float] = np.zeros(BUCKETS), 0.0

    def guess(self, prompt: Prompt) -> float:
        """See `Ranker`."""
        columns, values = features(prompt.token_ids)
        weights, intercept = self._weights  # one read: another thread may fit meanwhile
        return float(weights[columns] @ values) + intercept

    def learn(self, prompts: Sequence[Prompt], numbers: Sequence[float]) -> None:
        """Fits the newest prompts anew, these among them."""
        rows = [
            (features(prompt.token_ids), number)
            for prompt, number in zip(prompts, numbers, strict=True)
        ]
        self._rows = (self._rows + rows)[-self.fitted_prompts :]
        self._refit()

    def _refit(self) -> None:
        if self._rows:
            rows, numbers = zip(*self._rows, strict=True)
            weights, intercept = fit(rows, numbers, BUCKETS, self.penalty)
            self._weights = weights.numpy(), intercept

    def state_dict(self) -> dict[str, Any]:
        """Returns the fitted rows: int16 and float32 [sum of F], int64 [rows] and float32 [rows]; 6
        bytes a feature."""
        rows = [row for row, _ in self._rows]
        empty: SparseRow = np.empty(0, np.int16), np.empty(0, np.float32)
        return {
            "places": torch.from_numpy(
                np.concatenate([empty[0], *(columns for columns, _ in rows)])
            ),
            "values": torch.from_numpy(np.concatenate([empty[1], *(values for _, values in rows)])),
            "sizes": torch.tensor([len(columns) for columns, _ in rows], dtype=torch.int64),
            "numbers": torch.tensor([number for _, number in self._rows], dtype=torch.float32),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the fitted rows and fits them."""
        sizes = state["sizes"].tolist()
        rows = zip(
            state["places"].split(sizes),
            state["values"].split(sizes),
            state["numbers"].tolist(),
            strict=True,
        )
        self._rows = [
            ((columns.numpy(), values.numpy()), number) for columns, values, number in rows
        ]
        self._refit()


def features(token_ids: list[int]) -> SparseRow:
    """Returns a prompt's hashed tokens and pairs of neighbours as a vector of norm 1, and its
    length."""
    ids = np.asarray(token_ids[-MAX_PROMPT_TOKENS:], dtype=np.int64)
    ngrams = np.concatenate([ids * 2654435761, ids[:-1] * 40503 + ids[1:] * 2246822519 + 1])
    columns, counts = np.unique((ngrams ^ (ngrams >> 15)) % LENGTH_FEATURE, return_counts=True)
    values = np.log1p(counts)
    values /= max(float(np.linalg.norm(values)), 1.0)
    length = np.log(1.0 + len(token_ids)) - USUAL_LENGTH
    return np.append(columns, LENGTH_FEATURE).astype(np.int16), np.append(values, length).astype(
        np.float32
    )
