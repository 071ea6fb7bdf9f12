"""A real run with one real generator; a second one joins in the middle by `lrl join`, and leaves
again.

It joins on the same machine by the run's folder, and in another network namespace, which is another
machine to the run, by the run's address: it has the model and everything else from there.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest

import lrl
from benchmarks.runs import quiet_trainer
from lrl.callbacks import Throughput, WeightSync
from lrl.generators.client import GeneratorClient
from tests.network_namespace import HERE, THERE, network_namespace
from tests.runs.test_async_run import PROMPTS, Witness, check_trained_once, data_module

STEPS, GROUPS = 6, 4
JOINS_AT, LEAVES_AT = 1, 3
LRL = [sys.executable, "-c", "from lrl.cli.main import main; raise SystemExit(main())"]
START_S = 300.0


class Guest(L.Callback):
    """Has a generator join before one step and leave before another; on other steps it only counts.

    Args:
        run: The run's folder.
        namespace: The network namespace from which it joins; empty for this one.
    """

    def __init__(self, run: Path, namespace: str) -> None:
        self.run = run
        self.namespace = namespace
        self.elsewhere = run / "elsewhere"
        self.elsewhere.mkdir()
        self.alive: list[int] = []
        self.joining: subprocess.Popen[str] | None = None

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, *args: Any) -> None:
        fleet = trainer.datamodule.run.fleet  # type: ignore[attr-defined]
        self.alive.append(fleet.alive)
        if trainer.global_step == JOINS_AT:
            words, environment = [*LRL, "join", str(self.run)], {**os.environ}
            if self.namespace:
                run = trainer.strategy.run.members.server.elsewhere.url  # type: ignore[attr-defined]
                words = [*LRL, "join", run, "--host", THERE, "--insecure"]
                words = ["ip", "netns", "exec", self.namespace, *words]
                environment["LRL_TOKEN"] = fleet.generators[0].server.token
            self.joining = subprocess.Popen(
                words,
                cwd=self.elsewhere,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env=environment,
            )
            end = time.monotonic() + START_S
            while not fleet.rollouts.pending:
                assert self.joining.poll() is None and time.monotonic() < end
                time.sleep(0.1)
        if trainer.global_step == LEAVES_AT:
            subprocess.run([*LRL, "leave", str(self.run)], check=True, timeout=300)


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Tokens written so far, by generator."""
    counts: Counter[str] = Counter()
    write = GeneratorClient.write

    async def counted(
        self: GeneratorClient, prompt_ids: list[int], rollouts: Any, *words: Any, **settings: Any
    ) -> None:
        before = sum(len(rollout.token_ids) for rollout in rollouts)
        try:
            await write(self, prompt_ids, rollouts, *words, **settings)
        finally:
            counts[self.name] += sum(len(rollout.token_ids) for rollout in rollouts) - before

    monkeypatch.setattr(GeneratorClient, "write", counted)
    return counts


@pytest.fixture(params=["this machine", "another machine"])
def namespace(request: pytest.FixtureRequest) -> Iterator[str]:
    """The network namespace of the second generator; empty for this one."""
    if request.param == "this machine":
        yield ""
        return
    with network_namespace() as name:
        yield name


def test_a_generator_joins_a_run_writes_and_leaves_with_every_prompt_trained_once(
    policy_folder: Path, tmp_path: Path, written: Counter[str], namespace: str
) -> None:
    endpoint: dict[str, Any] = {"host": HERE, "insecure": True} if namespace else {}
    # So few at once that requests always wait: the second generator gets some as soon as it serves.
    settings = lrl.ServerSettings(max_num_seqs=8, dtype="float32", kv_cache_gib=0.1, **endpoint)
    strategy = lrl.AsyncSingleDevice(generator_devices=1, server=settings)
    witness, guest = Witness(), Guest(tmp_path, namespace)
    trainer = quiet_trainer(
        STEPS,
        tmp_path,
        devices=2,
        strategy=strategy,
        callbacks=[WeightSync(), Throughput(), witness, guest],
    )
    policy = lrl.PolicyModule(str(policy_folder), lr=5e-4)
    try:
        trainer.fit(
            policy,
            datamodule=data_module(
                groups_per_step=GROUPS, max_lag=2, prompts=PROMPTS[: STEPS * GROUPS]
            ),
        )
        assert guest.joining is not None
        message, _ = guest.joining.communicate(timeout=300)
    finally:
        if guest.joining is not None:
            guest.joining.kill()
    assert guest.joining.returncode == 0, message
    assert strategy.choose_transport().backend == ("pull" if namespace else "shared_memory")
    assert [path.name for path in guest.elsewhere.rglob("*.*")] == (
        ["generator-1.log"] if namespace else []
    )
    assert ("generator 1: fetches the run's model" in message) == bool(namespace)
    assert "generator 1: serves since version" in message and "generator 1: has left" in message
    assert set(guest.alive[: JOINS_AT + 1]) == {1} and set(
        guest.alive[JOINS_AT + 1 : LEAVES_AT + 1]
    ) == {2}
    assert set(guest.alive[LEAVES_AT + 1 :]) == {1}
    assert set(written) == {"generator 0", "generator 1"} and min(written.values()) > 0
    check_trained_once(witness, STEPS * GROUPS, max_lag=2)
    assert (
        trainer.callback_metrics["fleet/joined"] == 1
        and trainer.callback_metrics["fleet/left"] == 1
    )
    assert "fleet/restarts" not in trainer.callback_metrics and not (tmp_path / "fleet").exists()
