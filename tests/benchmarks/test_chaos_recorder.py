"""What the chaos benchmarks see and break: responses that go on, generators that leave, processes
that are hit."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.chaos import faults, footprint, generators, recorder, soak, trainer
from benchmarks.chaos.journal import Journal, Reader
from lrl.rollouts.serialisation import Resumed, save_group
from lrl.types import Group, Prompt, Rollout
from tests.leftovers import wait_for

PARTS = ["lrl.vllm_plugin.api_server", "VLLM::EngineCore", "VLLM::Worker"]
TREE = """
import os, subprocess, sys, time
if names := os.environ["BELOW"].split():
    subprocess.Popen([sys.executable, sys.argv[0], names[0]], env=os.environ | {"BELOW": " ".join(names[1:])})
print("up", flush=True)
time.sleep(60)
"""
"""A process with one below it for the first name, which has one below it for the second, and so
on."""


def group(tokens: list[list[int]], *, finished: bool) -> Group:
    reason = "stop" if finished else ""
    rollouts = [
        Rollout(
            token_ids=t,
            logprobs=[-1.0] * len(t),
            versions=[3] * len(t),
            finish_reason=reason,
            reward=1.0,
        )
        for t in tokens
    ]
    return Group(
        index=7,
        prompt=Prompt(id=2, token_ids=[1, 5], text="1+1="),
        rollouts=rollouts,
        admitted_by=3,
    )


def fleet(members: int = 2, serving: int = 2) -> Any:
    pool = SimpleNamespace(
        generators=list(range(members)), serving=list(range(serving)), last_loss="it is gone"
    )
    return SimpleNamespace(rollouts=pool, generators=[0, 1], alive=serving, restarts=0, reissued=4)


def run_of(one: Group, resumed: Resumed | None = None) -> Any:
    data = SimpleNamespace(
        controller=SimpleNamespace(resumed=resumed),
        step_stream=SimpleNamespace(groups=[one], step=5),
        fleet=fleet(),
        environment=None,
    )
    return SimpleNamespace(datamodule=data, global_step=5, should_stop=False)


@pytest.mark.parametrize(
    ("tokens", "kept", "lost"), [([[4, 5, 6], [7]], 1, 0), ([[4, 9, 6], [7]], 0, 1)]
)
def test_a_response_counts_as_continued_only_with_exactly_the_tokens_of_the_checkpoint(
    tmp_path: Path, tokens: list[list[int]], kept: int, lost: int
) -> None:
    path = tmp_path / "journal.jsonl"
    one = recorder.StepRecorder(Journal(path), tmp_path / "stop")
    saved = save_group(group([[4, 5], []], finished=False), scored=False)
    one.on_load_checkpoint(None, None, {"RolloutDataModule": {"ledger": {"running": [saved]}}})  # type: ignore[arg-type]
    resumed = Resumed(step=5, responses=1, tokens=2, finished_groups=0)
    one.on_train_start(run_of(group(tokens, finished=True), resumed), None)  # type: ignore[arg-type]
    one.on_train_batch_end(run_of(group(tokens, finished=True)), None)  # type: ignore[arg-type]
    start, step = Reader(path).refresh()
    assert start["resumed"] == {"responses": 1, "tokens": 2, "finished_groups": 0}
    assert (step["continued"], step["rewritten"]) == (kept, lost)
    assert (step["indices"], step["prompts"], step["lag_max"], step["tokens"]) == ([7], [2], 2, 4)


def test_an_episode_that_waits_for_a_reply_counts_as_continued(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    one = recorder.StepRecorder(Journal(path), tmp_path / "stop")
    begun = group([[4], []], finished=False)
    turn = Rollout(token_ids=[5], logprobs=[-1.0], versions=[3], finish_reason="stop")
    begun.rollouts[0].open_turn = turn
    saved = save_group(begun, scored=False)
    one.on_load_checkpoint(None, None, {"RolloutDataModule": {"ledger": {"running": [saved]}}})  # type: ignore[arg-type]
    one.on_train_batch_end(run_of(group([[4, 5, 6], [7]], finished=True)), None)  # type: ignore[arg-type]
    (step,) = Reader(path).refresh()
    assert (step["continued"], step["rewritten"]) == (1, 0)


def test_a_run_ends_after_the_step_that_finds_the_stop_file(tmp_path: Path) -> None:
    one, run = (
        recorder.StepRecorder(Journal(tmp_path / "journal.jsonl"), tmp_path / "stop"),
        run_of(group([], finished=True)),
    )
    one.on_train_batch_end(run, None)  # type: ignore[arg-type]
    assert not run.should_stop
    (tmp_path / "stop").touch()
    one.on_train_batch_end(run, None)  # type: ignore[arg-type]
    assert run.should_stop


def test_a_fleet_is_whole_again_only_when_all_serve_and_a_pause_is_no_loss(tmp_path: Path) -> None:
    reader, generators_of = Reader(tmp_path / "journal.jsonl"), fleet()
    watch = recorder.FleetRecorder(Journal(reader.path))
    watch.on_train_start(SimpleNamespace(datamodule=SimpleNamespace(fleet=generators_of)), None)  # type: ignore[arg-type]
    generators_of.rollouts.serving = []
    time.sleep(3 * recorder.LOOK_S)
    assert not reader.refresh()
    generators_of.rollouts.generators = [0]
    wait_for(lambda: reader.refresh())
    generators_of.rollouts.generators = [0, 1]
    time.sleep(3 * recorder.LOOK_S)
    assert [line["event"] for line in reader.refresh()] == ["lost"]
    generators_of.rollouts.serving = [0, 1]
    wait_for(lambda: len(reader.refresh()) == 2)
    watch.on_train_end(None, None)  # type: ignore[arg-type]
    assert [line["event"] for line in reader.lines] == ["lost", "whole"]


@pytest.fixture
def tree(tmp_path: Path) -> Iterator[int]:
    """Process id of a trainer with a supervisor, and with the processes of a generator, each below
    the one before.

    A process of its own: below this one the session's server may be running, which no fault may
    hit.
    """
    script = tmp_path / "generators" / "supervisor.py"
    script.parent.mkdir()
    script.write_text(TREE)
    starter = "import subprocess, sys; subprocess.run(sys.argv[1:])"
    words = [sys.executable, "-c", starter, sys.executable, str(script), "--port", "8123"]
    parts = os.environ | {"BELOW": " ".join(PARTS)}
    trainer = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=parts)
    assert trainer.stdout is not None
    for _ in range(4):
        assert trainer.stdout.readline() == "up\n"
    below = footprint.psutil.Process(trainer.pid).children(recursive=True)
    yield trainer.pid
    for process in below:
        with contextlib.suppress(footprint.psutil.NoSuchProcess):  # it went with the one above it
            process.kill()
    trainer.kill()
    trainer.wait()


@pytest.mark.parametrize("part", list(faults.PARTS))
@pytest.mark.parametrize("freeze", [False, True])
def test_a_fault_hits_the_named_process_alone(tree: int, part: str, freeze: bool) -> None:
    (supervisor,) = faults.supervisors_of(tree)
    assert faults.port(supervisor) == 8123
    processes = {name: faults.part_of(supervisor, name) for name in faults.PARTS}
    faults.Fault(part, (0,), freeze).inject(tree)
    broken = (footprint.psutil.STATUS_ZOMBIE, footprint.psutil.STATUS_STOPPED)
    hit = processes.pop(part)
    wait_for(lambda: hit.status() == broken[freeze])
    assert not any(process.status() in broken for process in processes.values())


def test_a_part_that_is_not_there_is_an_error(tree: int) -> None:
    (supervisor,) = faults.supervisors_of(tree)
    worker = faults.part_of(supervisor, "Worker")
    worker.kill()
    wait_for(lambda: not faults.words(worker))
    with pytest.raises(
        RuntimeError, match="0 processes of the generator at port 8123 are its Worker"
    ):
        faults.part_of(supervisor, "Worker")


def test_a_footprint_counts_the_children_and_shared_memory_once() -> None:
    alone = footprint.footprint(footprint.psutil.Process().pid)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(30)"])
    with_child = footprint.footprint(footprint.psutil.Process().pid)
    child.kill()
    child.wait()
    assert set(alone) == set(footprint.NAMES)
    assert with_child["processes"] == alone["processes"] + 1
    assert with_child["all_threads"] > alone["all_threads"] >= with_child["trainer_threads"]


def test_sockets_are_no_files(tmp_path: Path) -> None:
    files, sockets = footprint.descriptors(os.getpid())
    with (tmp_path / "some").open("w"), socket.socket():
        assert footprint.descriptors(os.getpid()) == (files + 1, sockets + 1)
    assert footprint.descriptors(os.getpid()) == (files, sockets)


def test_a_slope_is_per_thousand_steps_at_any_rate_of_samples() -> None:
    samples = [{"step": 2.0 * n, "trainer_rss_mib": 500 + 0.01 * 2 * n} for n in range(200)]
    found = soak.trend(samples, "trainer_rss_mib")
    assert found["slope"] == pytest.approx(10, rel=1e-3) and found["half"] == pytest.approx(
        0, abs=1e-3
    )
    assert soak.trend([], "trainer_rss_mib") == {"mean": None, "slope": None, "half": None}


def test_every_measurement_has_a_table() -> None:
    account = {"prompts": 8, "twice": [], "lost": [3], "untold": [], "open": 2}
    fault = {"fault": "kill Worker of both", "detected_s": 0.4, "whole_s": 41.0, "reissued": 12}
    common = {"given_up": [], "lag_max": 2, "accuracy": 0.91, "seconds": 90.0, "steps_done": 6}
    assert "| kill Worker of both | 0.4 | 41 | 12 |" in generators.table(
        common | {"faults": [fault], "trained": account}
    )
    kill = {"starting": False, "gone_s": None, "temporary_files": [], "resumed": {"responses": 3}}
    twice = {"missing": [], "twice": [], "epochs_whole": 2, "prompts": 8}
    counts: dict[str, Any] = {
        "responses_resumed": 3,
        "tokens_resumed": 30,
        "answers_continued": 3,
        "answers_rewritten": 0,
    }
    counts |= {"failed": 1, "played_again": {"replayed": 5}}
    with_turns = {"settings": {"environment": "module.Calculator"}}
    killed = trainer.table(
        common | with_turns | {"kills": [kill], "trained": twice} | counts, {"accuracy": 0.9}
    )
    assert "| 1; 5; 0 |" in killed
    assert "0.910; 0.900" in killed and "after which something stayed for 20 s | 1 |" in killed
    slopes = {
        "processes": {"mean": 9.0, "slope": 0.5, "half": 0.1},
        "shm_mib": dict.fromkeys(("mean", "slope", "half")),
    }
    collected = [{"step": 500, "trainer_heap_mib": 197.2, "trainer_python_blocks": 2306721.0}]
    risen = [500.0 + min(number, 100) for number in range(200)]  # over the first half alone
    series = {"step": [float(number) for number in range(200)], "trainer_rss_mib": risen}
    watched = {"slopes": slopes, "series": series, "collected": collected}
    soaked = soak.table(watched | {"faults": {"kill": 2}, "trained": account, "fleet": {}})
    assert "over the second half of the steps: 0 (0 to 0)" in soaked
    assert "| processes | 9 | 0.5 | 0.4 to 0.6 |" in soaked and "1 lost" in soaked
    assert "after step 500: 197.20 MiB and 2,306,721 blocks" in soaked


def test_a_soak_begins_with_every_kind_of_fault_at_all_generators_each_when_all_serve_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hit: list[faults.Fault] = []
    monkeypatch.setattr(faults.Fault, "inject", lambda fault, pid: hit.append(fault))
    monkeypatch.setattr(
        faults, "reward_workers_of", lambda pid: [SimpleNamespace(kill=lambda: None)]
    )
    broken = faults.RandomFaults(7, every_s=0.0, seed=0)
    for whole in [False, True, False, True, True, True]:
        broken.tick(whole)
    assert hit == list(faults.FIRST) and {fault.generators for fault in hit} == {(0, 1)}
    assert {fault.part for fault in hit if not fault.freeze} == set(faults.PARTS) and any(
        fault.freeze for fault in hit
    )
    assert broken.counts == {"kill": 6, "freeze": 2, "reward worker": 4}
    broken.tick(whole=False)
    assert len(hit) == 4 and broken.counts["reward worker"] == 5


def test_a_footprint_grows_with_a_process_and_falls_with_it() -> None:
    gc.collect()  # or what earlier tests have left behind goes in between
    before = footprint.held()
    buffers, objects = ctypes.create_string_buffer(2**24), [[number] for number in range(100_000)]
    given = footprint.held()
    del buffers, objects
    after = footprint.held()
    heap, blocks = footprint.HELD_NAMES
    assert given[heap] - before[heap] >= 16 and abs(after[heap] - before[heap]) < 8
    assert given[blocks] - before[blocks] > 90_000 and abs(after[blocks] - before[blocks]) < 10_000
