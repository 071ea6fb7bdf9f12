"""StreamRL's ranker: a small language model, fine-tuned on prompts and the lengths of their
responses (2504.15930, section 5), in its own process.

No call waits for the model. It learns in the background, and it guesses prompts before they start.
The n-grams (`NgramRanker`) guess the prompts that it has not guessed yet, all prompts while they
rank the recent ones better, and all prompts if its process is lost.
"""

import logging
import multiprocessing
import os
import random
import signal
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import mse_loss
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BatchEncoding

from lrl.routing.rankers.ngrams import NgramRanker, Ranker
from lrl.system.config_errors import above, at_least
from lrl.system.processes import die_with
from lrl.types import Prompt

BATCH = 16
"""Prompts of an optimizer step."""
MAX_PROMPT_TOKENS = 512
"""Tokens read at a prompt's end; the tokens before them are mostly the same in all prompts."""
MAX_GRAD_NORM = 1.0
Row = tuple[str, float]
"""A prompt's text and its number."""
MAX_JUDGED = 512
"""Newest numbers over which both guesses are compared."""
MIN_JUDGED = 64
"""Numbers below which the model's guesses are not used."""
MAX_KEPT_GUESSES = 65_536
"""Prompts whose guesses are kept, the newest."""

log = logging.getLogger(__name__)


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
        above(0, "data.length_predictor.ranker", lr=lr)
        at_least(1, "data.length_predictor.ranker", passes=passes, fitted_prompts=fitted_prompts)
        self.model = model
        self.device = device or ("cuda:0" if torch.cuda.is_available() else "cpu")
        self._settings = (model, self.device, lr, passes, fitted_prompts)
        self._ngrams = NgramRanker(fitted_prompts)
        self._guesses: dict[int, float] = {}  # prompt id -> guess of the language model
        # The n-grams' guess, the model's, and the true number.
        self._judged = deque[tuple[float, float, float]](maxlen=MAX_JUDGED)
        self._correlations: tuple[float, float] | None = None  # of both guesses with the number
        self._learnt = deque[Row](maxlen=fitted_prompts)
        self._to_learn = deque[Row](maxlen=fitted_prompts)
        self._pool: ProcessPoolExecutor | None = None  # of one process
        self._learning: Future[None] | None = None
        self._guessing: Future[list[float]] | None = None

    def guess(self, prompt: Prompt) -> float:
        """Returns the model's guess if it has ranked better than the n-grams', else theirs."""
        guess = self._guesses.get(prompt.id)
        found = self._correlations  # one read: another thread may judge meanwhile
        if guess is None or found is None or found[1] <= found[0]:
            return self._ngrams.guess(prompt)
        return guess

    def learn(self, prompts: Sequence[Prompt], numbers: Sequence[float]) -> None:
        """Judges both guesses by `numbers` and trains both models; the language model as soon as it
        is free."""
        guessed = [
            (self._ngrams.guess(prompt), self._guesses[prompt.id], number)
            for prompt, number in zip(prompts, numbers, strict=True)
            if prompt.id in self._guesses
        ]
        self._judge(guessed)
        self._ngrams.learn(prompts, numbers)
        texts = [prompt.text for prompt in prompts]
        self._teach(list(zip(texts, numbers, strict=True)))

    def _judge(self, judged: Sequence[tuple[float, float, float]]) -> None:
        self._judged.extend(judged)
        if len(self._judged) >= MIN_JUDGED:
            first, second, found = np.array(self._judged).T
            self._correlations = correlation(first, found), correlation(second, found)

    def _teach(self, rows: Sequence[Row] = ()) -> None:
        """Gives the process these rows and those that still wait, if it has learnt the ones
        before."""
        self._learnt.extend(rows)
        self._to_learn.extend(rows)
        if self._to_learn and (self._learning is None or self._learning.done()):
            self._learning = self._submit("learn", list(self._to_learn))
            if self._learning is not None:
                self._to_learn.clear()

    def look_ahead(self, prompts: Sequence[Prompt]) -> None:
        """Has the process guess `prompts`, unless it still guesses the ones before."""
        if self._guessing is None or self._guessing.done():
            ids = [prompt.id for prompt in prompts]
            self._guessing = self._submit("guess", [prompt.text for prompt in prompts])
            if self._guessing is not None:
                self._guessing.add_done_callback(lambda guessing: self._keep(ids, guessing))

    def _submit(self, job: str, rows: Sequence[Any]) -> Future[Any] | None:
        """Gives the process a job, which waits for earlier jobs; returns None without a process."""
        if (pool := self._pool) is None:
            return None
        try:
            future = pool.submit(_do, job, rows)
        except RuntimeError:  # it has just ended; `_report` or `close` does the rest
            return None
        future.add_done_callback(self._report)
        return future

    def _keep(self, ids: list[int], guessing: Future[list[float]]) -> None:
        """Keeps the guesses of a job; runs on the pool's thread."""
        if not guessing.cancelled() and guessing.exception() is None:
            self._guesses |= zip(ids, guessing.result(), strict=True)
            while len(self._guesses) > MAX_KEPT_GUESSES:
                del self._guesses[next(iter(self._guesses))]

    def _report(self, job: Future[Any]) -> None:
        """Ends the process if a job has failed, and says so; runs on the pool's thread."""
        pool = self._pool  # None: `close` has ended it
        if pool is None or job.cancelled() or (error := job.exception()) is None:
            return
        self._pool = None
        _kill(pool)
        log.warning(
            "data.length_predictor.ranker: the process with %s is lost (%s: %s). Lengths are "
            "guessed from n-grams alone until this run ends; a resumed one begins with it again.",
            *(self.model, type(error).__name__, error),
        )

    def metrics(self) -> dict[str, float]:
        """Returns the correlation of both guesses with the true numbers, over the last prompts with
        both."""
        if self._correlations is None:
            return {}
        ngrams, model = self._correlations
        return {
            "length_predictor/ngrams_correlation": ngrams,
            "length_predictor/model_correlation": model,
        }

    def start(self) -> None:
        """Starts the process, which opens the model while the generators start."""
        # A fork would inherit open pipes.
        context = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(
            1, context, initializer=_begin, initargs=(os.getpid(), self._settings)
        )
        self.look_ahead([])  # a pool starts its process with the first job
        self._to_learn.clear()
        self._to_learn.extend(self._learnt)  # a new process has the original model
        self._teach()

    def close(self) -> None:
        """Ends the process at once."""
        pool, self._pool = self._pool, None
        self._learning = self._guessing = None
        if pool is not None:
            _kill(pool)
            pool.shutdown(cancel_futures=True)

    def state_dict(self) -> dict[str, Any]:
        """Returns the learnt texts with their numbers, and the judged guesses; no weights of the
        model."""
        return {
            "ngrams": self._ngrams.state_dict(),
            "texts": [text for text, _ in self._learnt],
            "numbers": torch.tensor([number for _, number in self._learnt], dtype=torch.float32),
            "model": self.model,
            "judged": torch.tensor(self._judged, dtype=torch.float32).reshape(-1, 3),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Trains the original model on the texts of the state; how well another model has guessed
        is not restored."""
        self._ngrams.load_state_dict(state["ngrams"])
        self._judged.clear()
        self._correlations = None
        if state.get("model") == self.model:
            self._judge(list(map(tuple, state["judged"].tolist())))
        self._learnt.clear()
        self._to_learn.clear()
        self._teach(list(zip(state["texts"], state["numbers"].tolist(), strict=True)))


def correlation(guesses: NDArray[np.float64], found: NDArray[np.float64]) -> float:
    """Returns Pearson's correlation; 0 if all guesses are the same."""
    return float(np.corrcoef(guesses, found)[0, 1]) if np.ptp(guesses) and np.ptp(found) else 0.0


def _kill(pool: ProcessPoolExecutor) -> None:
    for process in list((pool._processes or {}).values()):  # `kill_workers` since Python 3.14
        process.kill()


# ---- in the process

_model: "FineTuned"


class FineTuned:
    """The model in the ranker's process: float32 weights, gradients and moments, and bfloat16
    passes on CUDA. Its arguments are those of `LanguageModelRanker`."""

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
            mixed = [*rows, *older]
            self._draw.shuffle(mixed)
            for start in range(0, len(mixed), BATCH):
                self._step(mixed[start : start + BATCH])
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


def _begin(owner: int, settings: tuple[str, str, float, int, int]) -> None:
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


def _do(job: str, rows: Sequence[Any]) -> Any:
    return getattr(_model, job)(rows)
