"""Exact match with the text of a column."""

from collections.abc import Collection, Mapping
from typing import Any

from lrl.rewards.base import Reward
from lrl.rewards.reference import reference_of


class ExactMatch(Reward):
    """1 if the response equals a column of the row, apart from white space around both, else 0.

    A number in the column is written without an exponent; a whole one may have `.0` after it or
    not.

    Args:
        column: The column with the right answer.
        weight: Factor of this reward in the sum that is trained on; 0 only logs it.
        name: Name in logs and metrics.
    """

    binary = True

    def __init__(
        self, column: str = "answer", weight: float = 1.0, name: str = "exact_match"
    ) -> None:
        super().__init__(weight, name)
        self.column = column

    def missing_column(self, columns: Collection[str]) -> str:
        return "" if self.column in columns else repr(self.column)

    def check_row(self, columns: Mapping[str, Any]) -> None:
        reference_of(columns, self.column)

    def __call__(self, prompt: str, response: str, **columns: Any) -> float:
        """Returns 1.0 or 0.0.

        Raises:
            ValueError: The row has no such column, or no text and no number in it.
        """
        right = reference_of(columns, self.column).strip()
        response = response.strip()
        is_number = not isinstance(columns[self.column], str)
        return float(response == right or (is_number and response == right.removesuffix(".0")))
