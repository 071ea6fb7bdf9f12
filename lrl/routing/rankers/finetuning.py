"""Fine-tuning of a small language model with a scalar head on prompts and their numbers.

It runs in a separate process, which `lrl.routing.rankers.language_model` starts.
"""

import os
import random
import signal
from collections import deque
from collections.abc import Iterator, Sequence

import torch
import transformers
from torch import Tensor
from torch.nn.functional import mse_loss
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BatchEncoding

from lrl.system.processes import die_with

BATCH = 16
"""Prompts of an optimizer step."""
MAX_PROMPT_TOKENS = 512
"""Tokens read at a prompt's end; the tokens before them are mostly the same in all prompts."""
MAX_GRAD_NORM = 1.0
BYTES_A_PARAMETER = 16
"""float32 weights, their gradients and AdamW's two moments."""

Row = tuple[str, float]
"""A prompt's text and its number."""

_model: "FineTuned"
"""The model of this process."""


class FineTuned:
    """Fine-tuned model that learns the numbers of texts and guesses the numbers of others; its
    arguments are those of `LanguageModelRanker`.

    Weights, gradients and moments are float32 (`BYTES_A_PARAMETER`); on CUDA it computes in
    bfloat16.
    """

    def __init__(
        self, model: str, device: str, lr: float, passes: int, fitted_prompts: int
    ) -> None:
        self._device = torch.device(device)
        self._passes = passes
        self._tokenizer = AutoTokenizer.from_pretrained(
            model, padding_side="right", truncation_side="left"
        )
        if self._tokenizer.pad_token is None:
            self._tokenizer.pad_token = self._tokenizer.eos_token
        self._network = AutoModelForSequenceClassification.from_pretrained(
            model, num_labels=1, pad_token_id=self._tokenizer.pad_token_id, dtype=torch.float32
        ).to(self._device)
        self._optimizer = torch.optim.AdamW(self._network.parameters(), lr=lr, weight_decay=0.0)
        self._older = deque[Row](maxlen=fitted_prompts)
        self._draw = random.Random(0)

    def learn(self, rows: Sequence[Row]) -> None:
        """Trains on `rows`, and in each pass on as many older rows, so that the model does not
        forget them."""
        self._network.train()
        for _ in range(self._passes):
            older = self._draw.sample(self._older, min(len(rows), len(self._older)))
            for batch in self._shuffled([*rows, *older]):
                self._step(batch)
        self._older.extend(rows)

    @torch.no_grad()
    def guess(self, texts: Sequence[str]) -> list[float]:
        """Returns the number of each text."""
        self._network.eval()
        by_length = sorted(range(len(texts)), key=lambda index: len(texts[index]))
        found: dict[int, float] = {}
        for start in range(0, len(texts), BATCH):
            batch = by_length[start : start + BATCH]
            numbers = self._numbers([texts[index] for index in batch]).tolist()
            found |= zip(batch, numbers, strict=True)
        return [found[index] for index in range(len(texts))]

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
        """Returns float32 [texts]."""
        read: BatchEncoding = self._tokenizer(
            list(texts),
            padding=True,
            truncation=True,
            max_length=MAX_PROMPT_TOKENS,
            return_tensors="pt",
        )
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._device.type == "cuda"):
            return self._network(**read.to(self._device)).logits[:, 0].float()


def begin(owner: int, settings: tuple[str, str, float, int, int]) -> None:
    """Sets up the new process, which dies with `owner`, and opens its model."""
    global _model
    die_with(owner)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; rank 0 decides
    transformers.logging.set_verbosity_error()  # it would warn of the new head at its end
    transformers.logging.disable_progress_bar()
    if settings[1] == "cpu":  # trainer and generators need the same cores
        os.nice(19)
        torch.set_num_threads(1)
    _model = FineTuned(*settings)


def learn(rows: Sequence[Row]) -> None:
    """See `FineTuned.learn`."""
    _model.learn(rows)


def guess(texts: Sequence[str]) -> list[float]:
    """See `FineTuned.guess`."""
    return _model.guess(texts)
