"""The policy as the checks see it: its settings, its folder, its tokenizer. They never touch its weights."""

from __future__ import annotations

from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from lrl.objectives import Objective
from lrl.training.reference import Reference
from lrl.training.schedule import Schedule


class Policy(Protocol):
    """A `PolicyModule` or a subclass of it; its arguments of the same names."""

    model: str
    objective: Objective
    reference: Reference | None
    warmup_steps: int
    schedule: Schedule
    dtype_name: Any
    attention: str | None

    @property
    def policy_folder(self) -> str:
        """Folder or hub name of the first version."""

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer in that folder."""
