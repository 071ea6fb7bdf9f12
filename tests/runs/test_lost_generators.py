"""A real run with two real generators, of which one dies and the other freezes at once; then another
one joins by `lrl join`, and leaves again. Those of Ray, SLURM and a second node join from another
machine."""

from __future__ import annotations

import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import psutil

import lrl
from lrl.generators.generator import Generator
from lrl.run import Run
from tests.leftovers import engines, wait_for
from tests.runs.test_async_run import SMALL, Before, train_every_prompt_once

STEPS = 8
LRL = [sys.executable, "-c", "from lrl.cli.main import main; raise SystemExit(main())"]
DEADLINE_S = 600.0


def engine_of(generator: Generator) -> psutil.Process:
    supervisor = generator.server._supervisor
    assert supervisor is not None
    (engine,) = engines(psutil.Process(supervisor.pid))
    return engine


def test_generators_die_freeze_join_and_leave_with_every_prompt_trained_once(
    policy_folder: Path, tmp_path: Path
) -> None:
    guests: list[subprocess.Popen[str]] = []
    seen: dict[str, Generator] = {}

    def lose_both(run: Run) -> None:
        frozen, dead = map(engine_of, run.fleet.generators)
        dead.send_signal(signal.SIGKILL)
        frozen.send_signal(signal.SIGSTOP)

    def join(run: Run) -> None:
        have(2, 2, run)
        words = [*LRL, "join", str(tmp_path)]
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        guests.append(subprocess.Popen(words, text=True, **streams))
        here = lambda: run.fleet.rollouts.pending or guests[0].poll() is not None  # noqa: E731
        wait_for(here, DEADLINE_S, "the guest")
        assert guests[0].poll() is None
        assert run.fleet.alive == 2, "it serves after the next sync"

    def have(alive: int, restarts: int, run: Run) -> None:
        """Waits for them; syncs what is new meanwhile."""
        fleet = run.fleet
        wait_for(
            lambda: run.poll() or (fleet.alive == alive and fleet.restarts >= restarts),
            DEADLINE_S,
            f"{alive} generators",
        )

    def leave(run: Run) -> None:
        have(3, 2, run)
        seen.update({one.name: one for one in run.fleet.generators})
        subprocess.run([*LRL, "leave", str(tmp_path)], check=True, timeout=DEADLINE_S)
        assert run.fleet.alive == 2

    # So few at once that requests always wait: the guest gets some as soon as it serves.
    settings = lrl.ServerSettings(**SMALL | {"max_num_seqs": 8})
    strategy = lrl.AsyncSingleDevice(
        generator_devices=2, server=settings, heartbeat_s=5.0, generator_timeout_s=900.0
    )
    try:
        trainer, _ = train_every_prompt_once(
            strategy,
            policy_folder,
            tmp_path,
            Before({1: lose_both, 3: join, 5: leave, 7: partial(have, 2, 2)}),
            devices=3,
            steps=STEPS,
            groups=4,
            max_lag=2,
            sync_deadline_s=10.0,
        )
        said, _ = guests[0].communicate(timeout=DEADLINE_S)
    finally:
        for guest in guests:
            guest.kill()
    assert guests[0].returncode == 0, said
    assert "generator 2: serves since version" in said and "generator 2: has left" in said
    assert strategy.choose_transport().backend == "shared_memory"
    written = {name: one.stats.snapshot().written for name, one in seen.items()}
    assert len(written) == 3 and min(written.values()) > 0
    metrics = trainer.callback_metrics
    assert metrics["fleet/joined"] == metrics["fleet/left"] == 1 and metrics["fleet/alive"] == 2
    # On a busy machine a generator that is well may let a heartbeat pass, too.
    assert metrics["fleet/restarts"] >= 2
    assert not (tmp_path / "fleet").exists()
