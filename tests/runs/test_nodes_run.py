"""A real run on two machines (network namespaces), each of which starts generators of its own."""

from __future__ import annotations

import os
from pathlib import Path

import lrl
from benchmarks.runs import quiet_trainer
from lrl.callbacks import Throughput, WeightSync
from lrl.run import Run
from tests.leftovers import MARK, living, wait_for, words
from tests.network_namespace import two_machines
from tests.runs.test_async_run import PROMPTS, SMALL, Before, Witness, data_module
from tests.strategies.forked_ranks import RANK_0, nodes

STEPS, GROUPS = 5, 4
DEADLINE_S = 600.0


def fit(host: str, model: Path, mark: str) -> None:
    """Trains on one of the nodes; rank 0 loses the other's generator in mid-run, and says what came
    of it."""

    def lose_a_generator(run: Run) -> None:
        assert run.fleet.joined == 1
        (joined,) = (process for process in living(mark) if "join" in words(process))
        joined.kill()
        wait_for(lambda: run.fleet.rollouts.pending, DEADLINE_S, "one in its place")

    settings = lrl.ServerSettings(**SMALL, host=host, insecure=True)
    witness = Witness()
    of_rank_0 = [witness, Before({1: lose_a_generator})] if os.environ["RANK"] == "0" else []
    trainer = quiet_trainer(
        STEPS,
        Path("run"),
        devices=2,
        num_nodes=2,
        strategy=lrl.AsyncDDP(generator_devices=1, server=settings, heartbeat_s=10.0),
        callbacks=[WeightSync(), Throughput(), *of_rank_0],
    )
    data = data_module(groups_per_step=GROUPS, max_lag=1, prompts=PROMPTS[: STEPS * GROUPS])
    trainer.fit(lrl.PolicyModule(str(model), lr=5e-4), datamodule=data)
    if trainer.is_global_zero:
        ids = sorted(group.prompt.id for _, group in witness.groups)
        print(f"trained {ids}, joined {trainer.callback_metrics['fleet/joined']:.0f}", flush=True)


def test_each_node_starts_its_generators_and_one_that_dies_again(
    mark: str, policy_folder: Path, tmp_path: Path
) -> None:
    mine = tmp_path / "node-0"
    mine.mkdir()
    words = (fit, RANK_0, policy_folder, mark)
    own = {MARK: mark, "TMPDIR": os.environ["TMPDIR"]}
    with two_machines() as (one, other), nodes(tmp_path) as start:
        first = start(0, one, *words, **own)
        second = start(1, other, *words, hidden=(policy_folder, mine), **own)
        assert [first.wait(), second.wait()] == [0, 0], first.printed() + second.printed()
    assert f"trained {list(range(STEPS * GROUPS))}, joined 2" in first.printed()
    logs = (tmp_path / "node-1").glob("run/**/lrl-generator-*.log")
    said = "".join(path.read_text() for path in logs)
    assert said.count(": fetches the run's model") == 2, "its folder is hidden there"
    # Its node sees the end of its process, or rank 0 its silence: whichever is first.
    assert said.count(": answers at") == 2 and "Generator 1 is replaced" in second.printed()
