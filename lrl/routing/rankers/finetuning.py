"""A small language model with one number at its end, fine-tuned on prompts and what was found of them.

This runs in a process of its own (`lrl.routing.rankers.language_model`).
"""

from __future__ import annotations

import os
import random
import signal
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import torch
import transformers
from torch import Tensor
from torch.nn.functional import mse_loss
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BatchEncoding, PreTrainedModel

from lrl.runtime.parent_death import die_with

BATCH = 16
"""Prompts of an optimizer step."""
NEWEST = 512
"""Tokens at a prompt's end that are read; what is before them is mostly the same in all prompts."""
MAX_GRAD_NORM = 1.0
BYTES_A_PARAMETER = 16
"""float32 weights, their gradients and AdamW's two moments."""

Row = tuple[str, float]
"""A prompt's text and its number."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """What is fine-tuned, and how; the arguments of `LanguageModelRanker` of the same names."""

    model: str
    device: str
    lr: float
    passes: int
    fitted_prompts: int


class FineTuned:
    """Learns numbers of texts, and guesses those of others.

    Everything that stays is float32 (`BYTES_A_PARAMETER`); on CUDA it computes in bfloat16.
    """

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._device = torch.device(recipe.device)
        self._tokenizer = AutoTokenizer.from_pretrained(recipe.model, padding_side="right", truncation_side="left")
        if self._tokenizer.pad_token is None:
            self._tokenizer.pad_token = self._tokenizer.eos_token
        self._network = open_with_a_number(recipe.model, self._tokenizer.pad_token_id).to(self._device)
        self._optimizer = torch.optim.AdamW(self._network.parameters(), lr=recipe.lr, weight_decay=0.0)
        self._older = deque[Row](maxlen=recipe.fitted_prompts)
        self._draw = random.Random(0)

    def learn(self, rows: Sequence[Row]) -> None:
        """Take in `rows`: in each pass all of them and as many of the older ones, so that those are not forgotten."""
        self._network.train()
        for _ in range(self._recipe.passes):
            older = self._draw.sample(self._older, min(len(rows), len(self._older)))
            for batch in self._shuffled([*rows, *older]):
                self._step(batch)
        self._older.extend(rows)

    @torch.no_grad()
    def guess(self, texts: Sequence[str]) -> list[float]:
        """The number of each text."""
        self._network.eval()
        by_length = sorted(range(len(texts)), key=lambda place: len(texts[place]))
        found: dict[int, float] = {}
        for start in range(0, len(texts), BATCH):
            places = by_length[start : start + BATCH]
            found |= zip(places, self._numbers([texts[place] for place in places]).tolist(), strict=True)
        return [found[place] for place in range(len(texts))]

    def _shuffled(self, rows: list[Row]) -> Iterator[list[Row]]:
        self._draw.shuffle(rows)
        yield from (rows[start : start + BATCH] for start in range(0, len(rows), BATCH))

    def _step(self, batch: list[Row]) -> None:
        texts, numbers = zip(*batch, strict=True)
        mse_loss(self._numbers(texts), torch.tensor(numbers, device=self._device)).backward()
        torch.nn.utils.clip_grad_norm_(self._network.parameters(), MAX_GRAD_NORM)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _numbers(self, texts: Sequence[str]) -> Tensor:
        """float32 [texts]."""
        read: BatchEncoding = self._tokenizer(
            list(texts), padding=True, truncation=True, max_length=NEWEST, return_tensors="pt"
        )
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._device.type == "cuda"):
            return self._network(**read.to(self._device)).logits[:, 0].float()


def open_with_a_number(model: str, pad_token_id: int) -> PreTrainedModel:
    """A causal language model whose head over the vocabulary is replaced by a new one with one number.

    Raises:
        RuntimeError: Other weights than the head's would be new, too.
    """
    network, report = AutoModelForSequenceClassification.from_pretrained(
        model, num_labels=1, pad_token_id=pad_token_id, dtype=torch.float32, output_loading_info=True
    )
    head = [name for name, _ in network.named_parameters() if not name.startswith(network.base_model_prefix + ".")]
    if new := sorted(set(report["missing_keys"]) - set(head)):
        raise RuntimeError(f"{model} lacks {len(new)} weights, the first {new[0]}: they would be random")
    return network


fine_tuned = cache(FineTuned)
"""The model of this process, opened by its first job: what is wrong with it is then that job's error."""


def begin(owner: int, on_cpu: bool) -> None:
    """Set a new process up. On a CPU it has what trainer and generators leave."""
    die_with(owner)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    transformers.logging.set_verbosity_error()  # it would warn of the new head at its end
    transformers.logging.disable_progress_bar()
    if on_cpu:
        os.nice(19)
        torch.set_num_threads(1)


def learn(recipe: Recipe, rows: Sequence[Row]) -> None:
    """See `FineTuned.learn`."""
    fine_tuned(recipe).learn(rows)


def guess(recipe: Recipe, texts: Sequence[str]) -> list[float]:
    """See `FineTuned.guess`."""
    return fine_tuned(recipe).guess(texts)
