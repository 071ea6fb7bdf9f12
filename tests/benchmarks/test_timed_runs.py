"""The benchmarks of time, as far as they go without a server."""

import argparse
import json
import multiprocessing
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import lrl
from benchmarks import at_once, overlap, ready_responses, timed_run
from benchmarks.against_trl import speed
from benchmarks.random_policy import SHAPES
from benchmarks.timed_run import Timed
from tests.leftovers import wait_for

TINY = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


@pytest.fixture
def policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The policy of the timed runs, but tiny."""
    monkeypatch.setitem(SHAPES, "5m", SHAPES["5m"] | TINY | {"num_key_value_heads": 2})
    return timed_run.policy_5m(tmp_path)


def took(seconds: float) -> dict[str, list[float]]:
    return {
        "step": [seconds - 0.1, seconds, seconds + 0.1],
        "wait": [0.0] * 3,
        "sync": [0.1] * 3,
        "sync_pause": [0.0] * 3,
        "on_core": [seconds] * 3,
    }


def test_training_alone_has_the_same_responses_in_every_step_as_a_run(
    policy: Path, tmp_path: Path
) -> None:
    lengths, trained = timed_run.LENGTHS["long-tailed"], list[int]()
    data = ready_responses.timed_steps(policy, lengths, timed_run.MICRO_BATCH_TOKENS)

    class Counts(lrl.PolicyModule):
        def training_step(self, step: Any, batch_idx: int) -> None:
            super().training_step(step, batch_idx)
            trained.append(step.num_tokens)

    trainer = timed_run.quiet_trainer(2, tmp_path, callbacks=[data.supervisor])
    trainer.fit(timed_run.make_module(policy, Counts), data)
    drawn = [
        sum(lengths.of(group, group, timed_run.RESPONSES)) for group in range(2 * timed_run.GROUPS)
    ]
    assert trained == [sum(drawn[: timed_run.GROUPS]), sum(drawn[timed_run.GROUPS :])]
    assert all(times.train > 0 and times.sync == 0 for times in data.supervisor.times)


def test_with_both_at_once_no_side_begins_a_step_before_the_other(
    policy: Path, tmp_path: Path
) -> None:
    here, there = multiprocessing.Pipe()
    system = overlap.systems("equal")["at_once"]
    trains = threading.Thread(
        target=at_once.train_for,
        args=(there, system, policy, timed_run.LENGTHS["equal"], 2, tmp_path),
        daemon=True,
    )
    trains.start()
    takes = at_once.AtThePaceOf(here, 2)
    takes.on_train_start()
    for step in range(2):
        wait_for(here.poll, 60.0, "the end of a step")
        time.sleep(0.3)
        assert trains.is_alive() and len(takes.times) == step
        takes.on_train_batch_end()
    takes.on_train_batch_end()  # nobody is left to wait for
    trains.join(60)
    assert not trains.is_alive() and [times.train > 0 for times in takes.times] == [True, True]
    assert len(takes.seconds) == 2 and min(takes.seconds) > 0.3


def test_a_side_that_ends_early_is_not_waited_for() -> None:
    here, there = multiprocessing.Pipe()
    there.close()
    with pytest.raises(RuntimeError, match="has ended early"):
        at_once.heard(here)


def test_trls_counted_steps_have_the_responses_of_lrls(policy: Path, tmp_path: Path) -> None:
    args = argparse.Namespace(folder=tmp_path, steps=2, examples=3)
    job, drawn = speed.make_job(args, "long-tailed")
    first = timed_run.WARM_UP * timed_run.GROUPS
    groups = range(first, first + timed_run.GROUPS)
    lengths = timed_run.LENGTHS["long-tailed"]
    assert drawn[speed.TRL_WARM_UP] == [
        tokens for group in groups for tokens in lengths.of(group, group, 16)
    ]
    rows = [json.loads(line) for line in Path(job.prompts).read_text().splitlines()]
    own = speed.problems()[first]
    found = rows[speed.TRL_WARM_UP * timed_run.GROUPS]
    assert found == own | {"prompt": found["prompt"]}
    assert found["prompt"].endswith(own["prompt"]) and found["prompt"].count(",") == 3
    assert job.steps == len(drawn) == 3


def test_overlap_is_compared_with_the_slower_side() -> None:
    step = {
        "asynchronous": took(3.3),
        "writing": took(1.0),
        "training": took(3.0),
        "synchronous": took(6.6),
    }
    found = overlap.table({("equal", name): row for name, row in step.items()})
    assert "1.10 times the larger of both alone" in found
    assert "2.00 times as fast as lrl's synchronous one" in found


def test_lrl_is_compared_with_the_faster_of_trls_ways() -> None:
    speeds = {"trl": 20.0, "trl-pieces": 25.0, "split": 30.0, "trainer-all": 40.0}
    parts = {part: [1.0, 1.0, 1.0] for part in speed.PARTS}
    rows = {
        ("equal", name): parts | {"answers_per_s": value, "trl": "1"}
        for name, value in speeds.items()
    }
    assert "trains 1.60 times TRL's responses" in speed.table(
        rows
    ) and "TRL 1, in pieces" in speed.table(rows)


def test_a_mean_counts_the_step_that_waited() -> None:
    found = timed_run.means([Timed({"train": 1.0}), Timed({"train": 1.0, "wait_last": 3.0})])
    assert found["step"] == 2.5 and found["wait"] == 1.5 and found["train"] == 1.0


@pytest.mark.parametrize("main", [overlap.main, speed.main])
def test_threads_that_the_environment_would_overrule_are_refused(
    main: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with pytest.raises(SystemExit, match="OMP_NUM_THREADS"):
        main([])
