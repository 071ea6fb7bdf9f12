"""Two guesses at one number, each believed as far as it was right lately."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

NEWEST = 512
"""Numbers to which the worth of both guesses is fitted."""
LEAST = 64
"""With fewer the second guess is not believed."""


class Blend:
    """Mixes a guess that is always there with a second one."""

    def __init__(self) -> None:
        self._judged = deque[tuple[float, float, float]](maxlen=NEWEST)  # both guesses, and what was found
        self._worth: NDArray[np.float64] | None = None  # what both are multiplied with, and what is added

    def __call__(self, first: float, second: float | None) -> float:
        """The number that both make likely; the first where there is no second, or nothing is known of its worth."""
        worth = self._worth  # one read: another thread may judge meanwhile
        return first if second is None or worth is None else float(worth @ (first, second, 1.0))

    def judge(self, judged: Sequence[tuple[float, float, float]]) -> None:
        """Take in both guesses and what was found, and fit by least squares to the newest."""
        self._judged.extend(judged)
        if len(self._judged) >= LEAST:
            *guesses, found = np.array(self._judged).T
            self._worth = np.linalg.lstsq(np.stack([*guesses, np.ones(len(found))], axis=1), found)[0]

    def correlations(self) -> tuple[float, float] | None:
        """Pearson's, of each guess with what was found; None while the second is not believed."""
        if self._worth is None:
            return None
        first, second, found = np.array(self._judged).T
        return correlation(first, found), correlation(second, found)

    def state_dict(self) -> Tensor:
        """What was judged: float32 [judged, 3]."""
        return torch.tensor(self._judged, dtype=torch.float32).reshape(-1, 3)

    def load_state_dict(self, state: Tensor) -> None:
        """Go on where `state_dict` was taken."""
        self._judged.clear()
        self.judge(list(map(tuple, state.tolist())))


def correlation(guesses: NDArray[np.float64], found: NDArray[np.float64]) -> float:
    """Pearson's; 0 where all guesses are the same."""
    return float(np.corrcoef(guesses, found)[0, 1]) if np.ptp(guesses) and np.ptp(found) else 0.0
