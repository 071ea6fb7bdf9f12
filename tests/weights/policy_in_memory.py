"""A policy as far as a sync asks for it: weights, and log-probs for the proof."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from lrl.training.rounding import Rounded, rounded_weights, rounding_errors


class PolicyInMemory:
    """The model in a folder, in float32."""

    def __init__(self, folder: Path) -> None:
        self.network: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    @torch.no_grad()
    def prompt_logprobs(
        self,
        tokens: list[int],
        rounded_as: Rounded | None = None,
        weights_as: Rounded | None = None,
    ) -> list[float]:
        with ExitStack() as rounding:
            if rounded_as is not None:
                rounding.enter_context(rounding_errors(self.network, rounded_as))
            if weights_as is not None:
                rounding.enter_context(rounded_weights(self.network, weights_as))
            logits = self.network(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
        return logits.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].tolist()

    @torch.no_grad()
    def step(self, size: float) -> None:
        """Moves every weight by `size`, up or down."""
        for weight in self.network.parameters():
            weight += size * torch.randn_like(weight).sign()
