"""StreamRL's ranker: a small language model, fine-tuned on prompts and the lengths of their
responses (2504.15930, section 5), in its own process.

No call waits for it. It learns in the background, and it guesses prompts before they start; the
n-grams guess the others.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import random
import signal
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import mse_loss

from lrl.routing.rankers.ngrams import MAX_PROMPT_TOKENS, NgramRanker, Ranker
from lrl.system.processes import die_with
from lrl.types import Prompt

log = logging.getLogger(__name__)

BATCH = 16
"""Prompts of an optimizer step of the language model."""
MAX_GRAD_NORM = 1.0
MIN_LEARNT = 128
"""Prompts that the language model learns before it guesses one: its head begins at random."""
Row = tuple[str, float]
"""A prompt's text and its number."""


class LanguageModelRanker(Ranker):
    """A language model with a scalar head, fine-tuned during the run.

    Args:
        model: Hub name or folder of a causal language model; it need not be of the policy's family.
        device: Its device: `cuda:0`, `cpu`, ...; null takes the first CUDA device, else the CPU. It
            needs 16 bytes a parameter there, and activations for 16 prompts of at most 512 tokens.
        lr: Learning rate of AdamW, constant.
        passes: Passes over the prompts of a step, each with as many older prompts.
        fitted_prompts: The newest prompts, from which the older ones are drawn. A resumed run
            begins with the original model and trains it on these again.
    """

    def __init__(
        self,
        model: str,
        device: str | None = None,
        lr: float = 2e-5,
        passes: int = 2,
        fitted_prompts: int = 2048,
    ) -> None:
        self.model = model
        self.device = device or ("cuda:0" if torch.cuda.is_available() else "cpu")
        self._settings = (model, self.device, lr, passes, fitted_prompts)
        self._ngrams = NgramRanker(fitted_prompts)
        self._guesses: dict[int, float] = {}  # prompt id -> guess, of those looked ahead to
        self._learnt = deque[Row](maxlen=fitted_prompts)
        self._to_learn = deque[Row](maxlen=fitted_prompts)
        self._pool: ProcessPoolExecutor | None = None  # of one process
        self._jobs: dict[str, Future[Any]] = {}  # the last one of each kind

    def guess(self, prompt: Prompt) -> float:
        """Returns the model's guess, or the n-grams' if it has none yet."""
        guess = self._guesses.get(prompt.id)
        return self._ngrams.guess(prompt) if guess is None else guess

    def learn(self, prompts: Sequence[Prompt], numbers: Sequence[float]) -> None:
        """Trains both models; the language model as soon as it is free."""
        self._ngrams.learn(prompts, numbers)
        self._teach([(prompt.text, one) for prompt, one in zip(prompts, numbers, strict=True)])

    def _teach(self, rows: Sequence[Row]) -> None:
        """Gives the process these rows and those that still wait, if it is free."""
        self._learnt.extend(rows)
        self._to_learn.extend(rows)
        if self._to_learn and self._submit("learn", list(self._to_learn)):
            self._to_learn.clear()

    def look_ahead(self, prompts: Sequence[Prompt]) -> None:
        """Has the process guess `prompts`, unless it still guesses the ones before."""
        if len(self._learnt) >= min(MIN_LEARNT, self._learnt.maxlen or 0):
            ids = [prompt.id for prompt in prompts]

            def keep(guesses: list[float]) -> None:
                self._guesses = dict(zip(ids, guesses, strict=True))

            self._submit("guess", [prompt.text for prompt in prompts], keep)

    def _submit(self, job: str, rows: Sequence[Any], then: Callable[[Any], object] = bool) -> bool:
        """Gives the process a job unless it still has one of this kind; returns whether it did.
        `then` gets the result, on the pool's thread."""
        pool, before = self._pool, self._jobs.get(job)
        if pool is None or not (before is None or before.done()):
            return False
        try:
            given = self._jobs[job] = pool.submit(_do, job, rows)
        except RuntimeError:  # it has just ended; `_done` or `close` does the rest
            return False
        given.add_done_callback(partial(self._done, then))
        return True

    def _done(self, then: Callable[[Any], object], job: Future[Any]) -> None:
        """Ends the process if a job has failed, and says so; runs on the pool's thread."""
        pool = self._pool  # None: `close` has ended it
        if pool is None or job.cancelled():
            return
        if (error := job.exception()) is None:
            then(job.result())
            return
        self._pool = None
        _kill(pool)
        log.warning(
            "data.length_predictor.ranker: the process with %s is lost (%s: %s). Lengths are "
            "guessed from n-grams alone until this run ends; a resumed one begins with it again.",
            *(self.model, type(error).__name__, error),
        )

    def start(self) -> None:
        """Starts the process, which opens the model while the generators start."""
        # A fork would inherit open pipes.
        context = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(
            1, context, initializer=_begin, initargs=(os.getpid(), self._settings)
        )
        self._submit("guess", [])  # a pool starts its process with the first job
        self._to_learn.clear()
        self._to_learn.extend(self._learnt)  # a new process has the original model
        self._teach([])

    def close(self) -> None:
        """Ends the process at once."""
        pool, self._pool = self._pool, None
        self._jobs.clear()
        if pool is not None:
            _kill(pool)
            pool.shutdown(cancel_futures=True)

    def state_dict(self) -> dict[str, Any]:
        """Returns the learnt texts with their numbers; no weights of the model."""
        return {
            "ngrams": self._ngrams.state_dict(),
            "texts": [text for text, _ in self._learnt],
            "numbers": torch.tensor([number for _, number in self._learnt], dtype=torch.float32),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Trains the original model on the texts of the state."""
        self._ngrams.load_state_dict(state["ngrams"])
        self._guesses.clear()
        self._learnt.clear()
        self._to_learn.clear()
        self._teach(list(zip(state["texts"], state["numbers"].tolist(), strict=True)))


def _kill(pool: ProcessPoolExecutor) -> None:
    for process in list((pool._processes or {}).values()):  # `kill_workers` since Python 3.14
        process.kill()


# ---- in the process

_model: FineTuned


class FineTuned:
    """The model in the ranker's process: float32 weights, gradients and moments, and bfloat16
    passes on CUDA. Its arguments are those of `LanguageModelRanker`."""

    def __init__(
        self, model: str, device: str, lr: float, passes: int, fitted_prompts: int
    ) -> None:
        # Here: no other process needs it.
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

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
            mixed = [*rows, *older]
            self._draw.shuffle(mixed)
            for start in range(0, len(mixed), BATCH):
                self._step(mixed[start : start + BATCH])
        self._older.extend(rows)

    @torch.no_grad()
    def guess(self, texts: Sequence[str]) -> list[float]:
        """Returns the number of each text."""
        self._network.eval()
        batches = (texts[start : start + BATCH] for start in range(0, len(texts), BATCH))
        return [number for batch in batches for number in self._numbers(batch).tolist()]

    def _step(self, batch: list[Row]) -> None:
        texts, numbers = zip(*batch, strict=True)
        mse_loss(self._numbers(texts), torch.tensor(numbers, device=self._device)).backward()
        torch.nn.utils.clip_grad_norm_(self._network.parameters(), MAX_GRAD_NORM)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _numbers(self, texts: Sequence[str]) -> Tensor:
        """Returns float32 [texts]."""
        read = self._tokenizer(
            list(texts),
            padding=True,
            truncation=True,
            max_length=MAX_PROMPT_TOKENS,
            return_tensors="pt",
        )
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._device.type == "cuda"):
            return self._network(**read.to(self._device)).logits[:, 0].float()


def _begin(owner: int, settings: tuple[str, str, float, int, int]) -> None:
    """Sets up the new process, which dies with `owner`, and opens its model."""
    import transformers

    global _model
    die_with(owner)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; rank 0 decides
    transformers.logging.set_verbosity_error()  # it would warn of the new head at its end
    transformers.logging.disable_progress_bar()
    if settings[1] == "cpu":  # trainer and generators need the same cores
        os.nice(19)
        torch.set_num_threads(1)
    _model = FineTuned(*settings)


def _do(job: str, rows: Sequence[Any]) -> Any:
    return getattr(_model, job)(rows)
