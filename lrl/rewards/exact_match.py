"""Exact match with the text of a column."""

from collections.abc import Collection
from typing import Any

from lrl.rewards.base import Reward


class ExactMatch(Reward):
    """1 if the response equals a column of the row, apart from white space around both, else 0.

    Args:
        column: The column with the right answer.
        weight: Factor of this reward in the sum that is trained on; 0 only logs it.
        name: Name in logs and metrics.
    """

    def __init__(self, column: str = "answer", weight: float = 1.0, name: str = "exact_match") -> None:
        super().__init__(weight, name)
        self.column = column

    def missing_column(self, columns: Collection[str]) -> str:
        return "" if self.column in columns else repr(self.column)

    def __call__(self, prompt: str, response: str, **columns: Any) -> float:
        """Returns 1.0 or 0.0.

        Raises:
            ValueError: The row has no such column.
        """
        if self.column not in columns:
            raise ValueError(f"ExactMatch(column={self.column!r}): the row has only {sorted(columns)}")
        return float(response.strip() == str(columns[self.column]).strip())
