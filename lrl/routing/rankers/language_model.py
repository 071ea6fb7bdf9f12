"""StreamRL's ranker: a small language model, fine-tuned on prompts and the lengths of their responses (2504.15930,
section 5), in a process beside the trainer.

Nobody waits for it. What was answered is taught to it in the background, and prompts that start soon are guessed ahead.
What it has not guessed yet the n-grams do (`NgramRanker`), and so they do if its process is lost.

Its guesses are not taken at their word (`Ensemble`): a model that has learnt nothing yet does no harm.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures import Future
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pebble import ProcessPool
from torch import Tensor

from lrl.routing.rankers import finetuning
from lrl.routing.rankers.base import Ranker
from lrl.routing.rankers.finetuning import Recipe, Row
from lrl.routing.rankers.ngrams import NgramRanker
from lrl.runtime.config_errors import above, at_least, fault
from lrl.types import Prompt

NEWEST = 512
"""Numbers to which the worth of both guesses is fitted."""
LEAST = 64
"""With fewer the second guess is not believed."""


class Ensemble:
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


log = logging.getLogger(__name__)

JOB_S = 1800.0
"""Longest that opening the model, learning a step or guessing one may take."""
LOOKED_AHEAD = 65_536
"""Prompts whose guesses are kept, the newest."""


class LanguageModelRanker(Ranker):
    """A language model with a number at its end, fine-tuned while the run goes on.

    Args:
        model: Hub name or folder of a causal language model; it need not be of the policy's family.
        device: Where it is: `cuda:0`, `cpu`, ...; null takes the first CUDA device, else the CPU. It needs 16 bytes a
            parameter there, and activations for 16 prompts of at most 512 tokens.
        lr: Learning rate of AdamW, constant.
        passes: How often what was answered in a step is read, each time with as much of what was before.
        fitted_prompts: Prompts of which those are drawn, the newest. A run that is resumed begins with the model as it
            was and reads these again.

    Raises:
        ValueError: A setting is outside its range.
    """

    def __init__(
        self, model: str, device: str | None = None, lr: float = 2e-5, passes: int = 2, fitted_prompts: int = 2048
    ) -> None:
        above(0, "data.length_predictor.ranker", lr=lr)
        at_least(1, "data.length_predictor.ranker", passes=passes, fitted_prompts=fitted_prompts)
        self.model = model
        self.device = find_device(device)
        self._recipe = Recipe(model, str(self.device), lr, passes, fitted_prompts)
        self._ngrams = NgramRanker(fitted_prompts)
        self._ensemble = Ensemble()
        self._guesses: dict[int, float] = {}  # prompt id -> the language model's
        self._learnt = deque[Row](maxlen=fitted_prompts)
        self._to_learn = deque[Row](maxlen=fitted_prompts)
        self._lock = threading.Lock()  # one thread may close the pool while another gives it a job
        self._pool: ProcessPool | None = None
        self._learning: Future[None] | None = None
        self._guessing: Future[list[float]] | None = None

    def guess(self, prompt: Prompt) -> float:
        """Both guesses, each for what it is worth; the n-grams' alone where there is no other."""
        return self._ensemble(self._ngrams.guess(prompt), self._guesses.get(prompt.id))

    def learn(self, prompts: Sequence[Prompt], numbers: Sequence[float]) -> None:
        """Judge both guesses by `numbers`, and teach them; the language model as soon as it is free."""
        found = [
            (prompt, self._guesses.get(prompt.id), number) for prompt, number in zip(prompts, numbers, strict=True)
        ]
        self._ensemble.judge(
            [(self._ngrams.guess(p), guess, number) for p, guess, number in found if guess is not None]
        )
        self._ngrams.learn(prompts, numbers)
        self._take_in([(prompt.text, number) for prompt, _, number in found])

    def _take_in(self, rows: Sequence[Row]) -> None:
        self._learnt.extend(rows)
        self._to_learn.extend(rows)
        self._teach()

    def _teach(self) -> None:
        if self._to_learn and self._is_free(self._learning):
            self._learning = self._schedule(finetuning.learn, list(self._to_learn))
            if self._learning is not None:
                self._to_learn.clear()

    def look_ahead(self, prompts: Sequence[Prompt]) -> None:
        """Have `prompts` guessed, unless it is still busy with those before."""
        if self._is_free(self._guessing):
            ids, texts = [prompt.id for prompt in prompts], [prompt.text for prompt in prompts]
            self._guessing = self._schedule(finetuning.guess, texts)
            if self._guessing is not None:
                self._guessing.add_done_callback(lambda guessing: self._keep(ids, guessing))

    def _schedule(self, job: Callable[..., Any], given: Sequence[Any]) -> Future[Any] | None:
        """Give the process a job, which waits for those before; None without a process."""
        with self._lock:
            if self._pool is None or not self._pool.active:
                return None
            return self._pool.schedule(job, (self._recipe, given), timeout=JOB_S)

    def _keep(self, ids: list[int], guessing: Future[list[float]]) -> None:
        """Keep what was guessed; on pebble's thread. What went wrong is said at the next look (`_is_free`)."""
        if not guessing.cancelled() and guessing.exception() is None:
            self._guesses |= zip(ids, guessing.result(), strict=True)
            while len(self._guesses) > LOOKED_AHEAD:
                del self._guesses[next(iter(self._guesses))]

    def _is_free(self, job: Future[Any] | None) -> bool:
        """Whether there can be another one; when `job` went wrong there is none any more."""
        if job is None or not job.done() or job.cancelled():
            return job is None
        if (error := job.exception()) is not None:
            log.warning(
                "data.length_predictor.ranker: the process with %s is lost (%s: %s). Lengths are guessed from n-grams "
                "alone until this run ends; a resumed one begins with it again.",
                *(self.model, type(error).__name__, error),
            )
            self.close()
        return error is None

    def figures(self) -> dict[str, float]:
        """How well n-grams and language model go with what was found, over the last prompts with both."""
        found = self._ensemble.correlations()
        return (
            {}
            if found is None
            else {"length_predictor/ngrams_correlation": found[0], "length_predictor/model_correlation": found[1]}
        )

    def start(self) -> None:
        """Start the process, and open the model in it, while the generators start."""
        on_cpu = self.device.type == "cpu"
        context = multiprocessing.get_context("spawn")  # as for reward workers: a fork would inherit open pipes
        self._pool = ProcessPool(1, initializer=finetuning.begin, initargs=(os.getpid(), on_cpu), context=context)
        self.look_ahead([])
        self._to_learn.clear()
        self._to_learn.extend(self._learnt)  # a new process knows nothing of it
        self._teach()

    def close(self) -> None:
        """End the process at once, whatever it is doing."""
        with self._lock:
            pool, self._pool = self._pool, None
        self._learning = self._guessing = None
        if pool is not None:
            pool.stop()
            pool.join()

    def wait(self, timeout_s: float) -> None:
        """Until all that it was given is done; for measurements, no run waits.

        Raises:
            TimeoutError: It is not.
        """
        jobs: list[Future[Any]] = [job for job in (self._learning, self._guessing) if job is not None]
        if futures.wait(jobs, timeout_s).not_done:
            raise TimeoutError(f"The process with {self.model} was not done in {timeout_s:g} s.")

    def state_dict(self) -> dict[str, Any]:
        """What it was taught, as text, and what the guesses were worth; no weights."""
        texts, numbers = zip(*self._learnt, strict=True) if self._learnt else ((), ())
        return {
            "ngrams": self._ngrams.state_dict(),
            "texts": list(texts),
            "numbers": torch.tensor(numbers, dtype=torch.float32),
            "judged": self._ensemble.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Teach what was learnt to the model as it was before the first run."""
        self._ngrams.load_state_dict(state["ngrams"])
        self._ensemble.load_state_dict(state["judged"])
        self._learnt.clear()
        self._to_learn.clear()
        self._take_in(list(zip(state["texts"], state["numbers"].tolist(), strict=True)))


def find_device(name: str | None) -> torch.device:
    """The device of that name; raises ValueError if this machine has none."""
    if name is None:
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        fault(
            f"data.length_predictor.ranker.device is {name!r}, which torch does not know; it must be like cuda:0 or "
            "cpu."
        )
        return torch.device("cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        fault(
            f"data.length_predictor.ranker.device is {name!r}, and this machine has {torch.cuda.device_count()} CUDA "
            "devices: name one of them, or cpu."
        )
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device
