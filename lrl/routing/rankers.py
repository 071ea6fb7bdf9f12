"""Rankers: which prompts will have long responses, from the prompt alone.

A ranker learns a number for each answered prompt and guesses it for others: the length of its
responses relative to all responses of that time, in log tokens. It only ranks.

`NgramRanker` is ridge regression on hashed n-grams of the prompt's tokens. Of the models tried on
GSM8K it ranked best; stochastic gradient descent, fed once with each step, did worse than the bare
length. scikit-learn has it too, but where that is installed, torchmetrics and transformers import
it in each process: a fifth to a quarter of a start's seconds.

`LanguageModelRanker` is StreamRL's: a small language model, fine-tuned on prompts and the lengths
of their responses (2504.15930, section 5), in its own process. No call waits for it. It learns in
the background, and it guesses prompts before they start; the n-grams guess the others.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import random
import signal
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import mse_loss

from lrl.system.processes import die_with
from lrl.types import Prompt

__all__ = ["LanguageModelRanker", "NgramRanker", "Ranker"]

log = logging.getLogger(__name__)

MAX_PROMPT_TOKENS = 512
"""Tokens that are read at a prompt's end; those before them are mostly the same in all prompts."""
BUCKETS = 2**13
"""Buckets of the n-gram hash; the last one is the prompt's length."""
LENGTH_FEATURE = BUCKETS - 1
USUAL_LENGTH = np.log(64.0)
PENALTY = 1.0
"""L2 penalty of the regression."""
SMALLEST_RESIDUAL = 1e-2
"""Share of the first residual at which the fit ends; later rounds change no ranks."""
SparseRow = tuple[NDArray[np.int16], NDArray[np.float32]]
"""Columns, int16 [F], and their values, float32 [F]."""

BATCH = 16
"""Prompts of an optimizer step of the language model."""
MAX_GRAD_NORM = 1.0
MIN_LEARNT = 128
"""Prompts that the language model learns before it guesses one: its head begins at random."""
Row = tuple[str, float]
"""A prompt's text and its number."""


class Ranker(ABC):
    """Guesses a number for a prompt. `guess` never waits for `learn`, which another thread may call
    meanwhile."""

    @abstractmethod
    def learn(self, prompts: Sequence[Prompt], numbers: Sequence[float]) -> None:
        """Learns the numbers of a step's prompts."""

    @abstractmethod
    def guess(self, prompt: Prompt) -> float:
        """Returns the number of a prompt; 0 before anything was learnt."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Returns the state in plain types and tensors, of bounded size."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def look_ahead(self, prompts: Sequence[Prompt]) -> None:  # noqa: B027
        """Announces prompts that will be guessed soon; called by the thread that guesses."""

    def start(self) -> None:  # noqa: B027
        """Starts the ranker's process. Call it on a thread that outlives the run."""

    def close(self) -> None:  # noqa: B027
        """Ends the ranker's process. May be called twice, and without `start`."""


class NgramRanker(Ranker):
    """Guesses from the tokens and token pairs of a prompt.

    Args:
        fitted_prompts: The newest prompts, to which it is fitted after each step.
    """

    def __init__(self, fitted_prompts: int = 2048) -> None:
        self.fitted_prompts = fitted_prompts
        self._rows: list[tuple[SparseRow, float]] = []
        self._weights: tuple[NDArray[np.float64], float] = np.zeros(BUCKETS), 0.0

    def guess(self, prompt: Prompt) -> float:
        columns, values = features(prompt.token_ids)
        weights, intercept = self._weights  # one read: another thread may fit meanwhile
        return float(weights[columns] @ values) + intercept

    def learn(self, prompts: Sequence[Prompt], numbers: Sequence[float]) -> None:
        """Fits the newest prompts anew, these among them."""
        rows = map(features, (prompt.token_ids for prompt in prompts))
        self._fit([*self._rows, *zip(rows, numbers, strict=True)][-self.fitted_prompts :])

    def _fit(self, found: list[tuple[SparseRow, float]]) -> None:
        self._rows = found
        self._weights = np.zeros(BUCKETS), 0.0
        if found:
            rows, numbers = zip(*found, strict=True)
            weights, intercept = fit_ridge(rows, numbers, BUCKETS, PENALTY)
            self._weights = weights.numpy(), intercept

    def state_dict(self) -> dict[str, Any]:
        """Returns the fitted rows: int16 and float32 [sum of F], int64 [rows] and float32 [rows]; 6
        bytes a feature."""
        columns = [np.empty(0, np.int16), *(columns for (columns, _), _ in self._rows)]
        values = [np.empty(0, np.float32), *(values for (_, values), _ in self._rows)]
        return {
            "places": torch.from_numpy(np.concatenate(columns)),
            "values": torch.from_numpy(np.concatenate(values)),
            "sizes": torch.tensor([len(one) for one in columns[1:]], dtype=torch.int64),
            "numbers": torch.tensor([number for _, number in self._rows], dtype=torch.float32),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        sizes = state["sizes"].tolist()
        columns, values = (
            [part.numpy() for part in state[name].split(sizes)] for name in ("places", "values")
        )
        rows = zip(columns, values, strict=True)
        self._fit(list(zip(rows, state["numbers"].tolist(), strict=True)))


def features(token_ids: list[int]) -> SparseRow:
    """Returns a prompt's hashed tokens and pairs of neighbours as a vector of norm 1, and its
    length."""
    ids = np.asarray(token_ids[-MAX_PROMPT_TOKENS:], dtype=np.int64)
    ngrams = np.concatenate([ids * 2654435761, ids[:-1] * 40503 + ids[1:] * 2246822519 + 1])
    columns, counts = np.unique((ngrams ^ (ngrams >> 15)) % LENGTH_FEATURE, return_counts=True)
    values = np.log1p(counts)
    values /= max(float(np.linalg.norm(values)), 1.0)
    length = np.log(1.0 + len(token_ids)) - USUAL_LENGTH
    columns, values = np.append(columns, LENGTH_FEATURE), np.append(values, length)
    return columns.astype(np.int16), values.astype(np.float32)


def fit_ridge(
    rows: Sequence[SparseRow], numbers: Sequence[float], columns: int, penalty: float
) -> tuple[Tensor, float]:
    """Returns weights w, float64 [columns], and intercept b of least sum((rows w + b - numbers)^2)
    + penalty * |w|^2.

    It solves the normal equations by conjugate gradients. The penalty makes them positive definite.
    """
    places, values = zip(*rows, strict=True)
    row = torch.arange(len(rows)).repeat_interleave(torch.tensor(list(map(len, places))))
    column = torch.from_numpy(np.concatenate(places)).long()
    value = torch.from_numpy(np.concatenate(values)).double()
    wanted = torch.tensor(numbers, dtype=torch.float64)

    def times(weights: Tensor) -> Tensor:
        result = torch.zeros(len(rows), dtype=torch.float64)
        return result.index_add_(0, row, value * weights[column])

    def transposed_times(residuals: Tensor) -> Tensor:
        centred = residuals - residuals.mean()  # the intercept takes the mean, and is not penalised
        return torch.zeros(columns, dtype=torch.float64).index_add_(0, column, value * centred[row])

    weights = torch.zeros(columns, dtype=torch.float64)
    residual = direction = transposed_times(wanted)
    square = first = residual @ residual
    while square > SMALLEST_RESIDUAL**2 * first:
        image = transposed_times(times(direction)) + penalty * direction
        step = square / (direction @ image)
        weights = weights + step * direction
        residual = residual - step * image
        before, square = square, residual @ residual
        direction = residual + square / before * direction
    return weights, float((wanted - times(weights)).mean())


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
