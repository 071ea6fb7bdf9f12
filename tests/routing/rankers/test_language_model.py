"""Rankers: the fit of the n-grams; what the language model learns beside the trainer, and what
happens without its process.

In its tests the n-grams learn nothing: they read a prompt's tokens, and all prompts have the same.
Where no process matters, the model learns on a thread of the test.

Covers lrl/routing/rankers/ngrams.py.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.synchronize import Event
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from lrl.routing.rankers import language_model
from lrl.routing.rankers.language_model import FineTuned, LanguageModelRanker
from lrl.routing.rankers.ngrams import SMALLEST_RESIDUAL, fit_ridge
from lrl.types import Prompt
from tests.checkpoints.through_files import through_a_file
from tests.leftovers import lives, wait_for, words
from tests.tiny_policies import tiny_llama

DEADLINE_S = 900.0  # the process is at nice 19, and may get a hundredth of a busy machine
LR = 1e-3
FORK = multiprocessing.get_context("fork")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_llama(tmp_path_factory.mktemp("model")))


@pytest.fixture
def make(model: str) -> Iterator[Callable[[], LanguageModelRanker]]:
    """Makes rankers, whose processes end with the test."""
    made: list[LanguageModelRanker] = []

    def make() -> LanguageModelRanker:
        made.append(LanguageModelRanker(model, "cpu", lr=LR, passes=8))
        return made[-1]

    yield make
    for ranker in made:
        ranker.close()


class OnAThread(ThreadPoolExecutor):
    """What a ranker's process does, on a thread of the test."""

    _processes = None


def start_on_a_thread(ranker: LanguageModelRanker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Starts the ranker with a fresh model in this process."""
    monkeypatch.setattr(language_model, "_model", FineTuned(*ranker._settings), raising=False)
    pool: Any = OnAThread(1)
    monkeypatch.setattr(language_model, "ProcessPoolExecutor", lambda *args, **how: pool)
    ranker.start()


def told(id: int) -> tuple[Prompt, float]:
    """Returns a prompt, of which one word decides the number."""
    draw = random.Random(id)
    word, number = draw.choice([("brief", -1.0), ("whole", 1.0)])
    text = f"Give me the {word} story of {draw.randrange(100)}."
    return Prompt(id=id, token_ids=[1, 2], text=text), number + draw.gauss(0.0, 0.1)


def step(start: int, count: int = 40) -> tuple[list[Prompt], list[float]]:
    prompts, numbers = zip(*(told(id) for id in range(start, start + count)), strict=True)
    return list(prompts), list(numbers)


def processes_of(owner: int) -> set[int]:
    """Returns its living child processes, without Python's tracker of shared memory, which serves
    all of them."""
    found = psutil.Process(owner).children(recursive=True)
    return {
        one.pid for one in found if lives(one) and "resource_tracker" not in " ".join(words(one))
    }


def wait(ranker: LanguageModelRanker) -> None:
    """Waits until the process has done its jobs."""
    assert not futures.wait(list(ranker._jobs.values()), DEADLINE_S).not_done


def live(ranker: LanguageModelRanker, first: int, steps: int) -> None:
    """Runs some steps: the ranker guesses prompts before they start, and learns them afterwards."""
    for start in range(first, first + 40 * steps, 40):
        prompts, numbers = step(start)
        ranker.look_ahead(prompts)
        wait(ranker)
        ranker.learn(prompts, numbers)
        wait(ranker)


def correlation(ranker: LanguageModelRanker, first: int = 10_000) -> float:
    """Returns the correlation of guesses and numbers, on new prompts."""
    prompts, numbers = step(first, 200)
    ranker.look_ahead(prompts)
    wait(ranker)
    guesses = [ranker.guess(prompt) for prompt in prompts]
    return float(np.corrcoef(guesses, numbers)[0, 1]) if np.ptp(guesses) else 0.0


def test_lengths_that_only_the_text_shows_are_learned_beside_the_run_and_again_after_a_resume(
    make: Callable[[], LanguageModelRanker], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranker, resumed = make(), make()
    start_on_a_thread(ranker, monkeypatch)
    live(ranker, 0, steps=2)
    assert correlation(ranker) == 0, "the n-grams guess until the model has learnt enough"
    live(ranker, 80, steps=2)
    assert correlation(ranker) > 0.9
    state = through_a_file(ranker.state_dict())

    for again in (ranker, resumed):  # another run of the same data module, and a resumed one
        again.close()
        start_on_a_thread(again, monkeypatch)
        if again is resumed:
            again.load_state_dict(state)
        wait(again)
        assert correlation(again, 20_000) > 0.9


def test_a_process_that_is_stopped_or_lost_blocks_nothing_and_the_n_grams_continue(
    make: Callable[[], LanguageModelRanker], caplog: pytest.LogCaptureFixture
) -> None:
    before = processes_of(os.getpid())
    ranker = make()
    ranker.start()
    wait(ranker)
    (process,) = processes_of(os.getpid()) - before
    os.kill(process, signal.SIGSTOP)
    for start in range(0, 120, 40):
        ranker.learn(*step(start))
        ranker.look_ahead(step(start + 40)[0])
    assert not ranker._guesses
    assert len(ranker._to_learn) == 80, "all but what it was given first"
    fresh = told(390)[0]
    assert ranker.guess(fresh) == ranker._ngrams.guess(fresh)

    with caplog.at_level(logging.WARNING, "lrl"):
        os.kill(process, signal.SIGKILL)
        wait(ranker)
        for start in range(440, 560, 40):
            ranker.learn(*step(start))
            ranker.look_ahead(step(start + 40)[0])
    assert [ranker.model in record.getMessage() for record in caplog.records] == [True]
    assert ranker.guess(fresh) == ranker._ngrams.guess(fresh)
    wait_for(lambda: processes_of(os.getpid()) <= before, 60.0, "its end")


def hold_a_ranker(model: str, started: Event) -> None:
    """Is a trainer with a ranker, whose process is a fork, too: it has imported what it needs."""
    multiprocessing.get_context = lambda method=None: FORK  # type: ignore[assignment]
    ranker = LanguageModelRanker(model, "cpu")
    ranker.start()
    wait(ranker)
    started.set()
    time.sleep(DEADLINE_S)


def test_its_process_dies_with_a_trainer_that_is_killed(model: str) -> None:
    started = FORK.Event()
    trainer = FORK.Process(target=hold_a_ranker, args=(model, started))
    trainer.start()
    processes: set[int] = set()
    try:
        assert trainer.pid is not None and started.wait(DEADLINE_S)
        processes = processes_of(trainer.pid)
        for process in processes:  # one that is busy does not look for its trainer either
            os.kill(process, signal.SIGSTOP)
        trainer.kill()
        trainer.join(DEADLINE_S)
        assert processes
        wait_for(lambda: not any(map(psutil.pid_exists, processes)), 60.0, "their end")
    finally:
        trainer.kill()
        for process in processes:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


def test_the_fit_solves_the_normal_equations_and_does_not_penalise_the_intercept() -> None:
    columns, penalty, offset = 40, 0.5, 100.0
    random = np.random.default_rng(0)
    places = [
        random.choice(columns, size, replace=False).astype(np.int16)
        for size in random.integers(1, 8, 300)
    ]
    rows = [(place, random.standard_normal(len(place)).astype(np.float32)) for place in places]
    whole = torch.zeros(len(rows), columns, dtype=torch.float64)
    for number, (place, values) in enumerate(rows):
        whole[number, torch.from_numpy(place).long()] = torch.from_numpy(values).double()
    numbers = whole @ torch.from_numpy(random.standard_normal(columns)) + offset

    weights, intercept = fit_ridge(rows, numbers.tolist(), columns, penalty)

    centred = whole - whole.mean(0)
    equations = centred.T @ centred + penalty * torch.eye(columns, dtype=torch.float64)
    exact = torch.linalg.solve(equations, centred.T @ (numbers - numbers.mean()))
    assert (weights - exact).norm() < 3 * SMALLEST_RESIDUAL * exact.norm()
    assert abs(intercept - offset) < 0.01 * offset
