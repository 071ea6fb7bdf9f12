"""Checkpoints of a sharded policy: in parts or whole, a run continues from them with any number of
ranks."""

from __future__ import annotations

import copy
import functools
import os
import re
import signal
from pathlib import Path
from typing import Any

import lightning as L
import psutil
import pytest
import torch

from lrl.checkpoints.checkpoint_folder import read_weights, shapes
from lrl.cli.main import main
from lrl.generators.supervisor import SHM
from lrl.training.model import ModelSource, open_tokenizer
from tests.checkpoints.test_checkpoint_file import FullDisk
from tests.leftovers import left_in_shared_memory, wait_for, wait_for_none
from tests.run_without_generators import StepsByVersion, trainer
from tests.strategies import run_of_ranks
from tests.strategies.forked_ranks import DEADLINE_S, free_port, run_ranks, start_rank
from tests.strategies.run_of_ranks import DiesAt, given_policy, weights_of


def fit_sharded(
    policy: Path, folder: Path, ranks: int, steps: int, *callbacks: L.Callback, **settings: Any
) -> Any:
    folder.mkdir()
    call = program(policy, folder, *callbacks, ranks=ranks, steps=steps, **settings)
    (folder / "output").write_text(run_ranks(call, ranks, folder))
    return torch.load(folder / "weights.pt")


def program(policy: Path, folder: Path, *callbacks: L.Callback, **settings: Any) -> Any:
    return functools.partial(run_of_ranks.fit, str(policy), str(folder), *callbacks, **settings)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def runs(policy_folder: Path, folder: Path) -> dict[str, Any]:
    parts = fit_sharded(policy_folder, folder / "parts", 2, 3, full_disk_at(2))
    whole = fit_sharded(
        *(policy_folder, folder / "whole", 3, 5),
        ckpt_path=folder / "parts" / "step=3.ckpt",
        save_distributed_checkpoint=False,
        reduce_gradients="once",
    )
    copies = fit_sharded(
        *(policy_folder, folder / "copies", 4, 7, full_disk_at(7)),
        ckpt_path=folder / "whole" / "step=5.ckpt",
        replicas=2,
    )
    return {"parts": parts, "whole": whole, "copies": copies}


def full_disk_at(step: int) -> FullDisk:
    return FullDisk(range(step - 1, step), rank=1, free=1000)


class Weights(L.Callback):
    """Keeps the weights behind each step."""

    def __init__(self) -> None:
        self.at: dict[int, Any] = {}

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *args: Any) -> None:
        self.at[trainer.global_step] = copy.deepcopy(weights_of(pl_module))


def fit_alone(policy: Path, steps: int, ckpt_path: Path | None = None, **parts: Any) -> Any:
    """The weights of one process behind each step."""
    weights = Weights()
    running = trainer(Path(), weights, max_steps=steps, enable_checkpointing=False)
    module = given_policy(str(policy), **parts)
    running.fit(module, datamodule=StepsByVersion(), ckpt_path=ckpt_path)
    return weights.at


@pytest.fixture(scope="module")
def alone(policy_folder: Path) -> Any:
    return fit_alone(policy_folder, 7)


def check_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, atol=2e-5, rtol=1e-4, msg=name)


@pytest.mark.parametrize(("name", "step"), [("parts", 3), ("whole", 5), ("copies", 7)])
def test_a_sharded_run_goes_on_from_either_format_with_another_number_of_ranks(
    name: str, step: int, runs: dict[str, Any], alone: dict[int, Any]
) -> None:
    for kind in ("policy", "reference"):
        assert runs[name][kind].keys() == alone[step][kind].keys()
        check_close(runs[name][kind], alone[step][kind])
    first = next(iter(alone[3]["policy"]))  # the steps change something
    assert (alone[3]["policy"][first] - alone[5]["policy"][first]).abs().max() > 1e-3


def test_one_process_goes_on_from_a_whole_checkpoint_of_several(
    runs: dict[str, Any], alone: dict[int, Any], policy_folder: Path, folder: Path
) -> None:
    found = fit_alone(policy_folder, 7, folder / "whole" / "step=5.ckpt")
    check_close(found[7]["policy"], alone[7]["policy"])


def test_adapters_are_sharded_saved_alone_and_resumed_with_another_number_of_ranks(
    policy_folder: Path, folder: Path, tmp_path: Path
) -> None:
    adapters = {"adapters": True}
    fit_sharded(policy_folder, folder / "adapters", 2, 2, parts=adapters)
    checkpoint = folder / "adapters" / "step=2.ckpt"
    assert shapes(checkpoint) and all(".lora_" in name for name in shapes(checkpoint))
    how: dict[str, Any] = {"ckpt_path": checkpoint, "parts": adapters}
    found = fit_sharded(policy_folder, folder / "adapters_on", 3, 3, **how)
    check_close(found["policy"], fit_alone(policy_folder, 3, **adapters)[3]["policy"])
    assert main(["export", str(checkpoint), str(tmp_path / "policy")]) == 0


@pytest.mark.parametrize("in_parts", [True, False])
def test_a_sharded_run_in_bfloat16_resumes_exactly_and_its_replicas_stay_alike(
    in_parts: bool, policy_folder: Path, folder: Path
) -> None:
    """Weights are rounded at random: a resumed run draws what it would have drawn, replicas draw the
    same, and ranks with other parts of a weight draw other numbers."""
    ranks = 2 if in_parts else 4
    how: dict[str, Any] = {"parts": {"dtype": "bfloat16"}, "replicas": ranks // 2}
    how["save_distributed_checkpoint"] = in_parts
    begun = folder / f"bfloat16_{ranks}"
    whole = fit_sharded(policy_folder, begun, ranks, 3, **how)
    how["ckpt_path"] = begun / "step=2.ckpt"
    resumed = fit_sharded(policy_folder, folder / f"{begun.name}_on", ranks, 3, **how)
    assert {weight.dtype for weight in whole["policy"].values()} == {torch.bfloat16}
    for name, weight in whole["policy"].items():
        assert torch.equal(resumed["policy"][name], weight), name
    own = [torch.load(begun / f"own{rank}.pt") for rank in range(ranks)]
    for one, replica in zip(own[:2], own[2:], strict=False):
        assert all(torch.equal(weight, replica[name]) for name, weight in one.items())


@pytest.mark.parametrize("checkpoint", ["parts/step=3.ckpt", "whole/step=5.ckpt"])
def test_lrl_export_makes_the_policy_of_either_format(
    checkpoint: str, runs: dict[str, Any], policy_folder: Path, folder: Path, tmp_path: Path
) -> None:
    assert main(["export", str(folder / checkpoint), str(tmp_path / "policy")]) == 0
    exported = ModelSource(str(tmp_path / "policy")).open().state_dict()
    for name, expected in runs[checkpoint.partition("/")[0]]["policy"].items():
        assert torch.equal(exported[name.removeprefix("network.")], expected)
    vocabularies = [
        open_tokenizer(str(one)).get_vocab() for one in (tmp_path / "policy", policy_folder)
    ]
    assert vocabularies[0] == vocabularies[1]


def test_a_checkpoint_that_one_rank_cannot_write_leaves_nothing_and_the_run_goes_on(
    runs: dict[str, Any], folder: Path
) -> None:
    saved = sorted(path.name for path in (folder / "parts").glob("*.ckpt*"))
    assert saved == ["step=1.ckpt", "step=3.ckpt"]
    text = (folder / "parts" / "output").read_text()
    assert text.count("The checkpoint of step 2 cannot be written") == 1
    assert "File too large" in text


def test_a_last_checkpoint_that_one_rank_cannot_write_goes_elsewhere_with_the_parts_of_all(
    runs: dict[str, Any], folder: Path
) -> None:
    assert not (folder / "copies" / "step=7.ckpt").exists()
    output = (folder / "copies" / "output").read_text()
    text = re.search(r"Saved after 7 steps. Resume with --ckpt_path (\S+)", output)
    assert text is not None
    for name, weight in read_weights(Path(text[1])).items():
        assert torch.equal(runs["copies"]["policy"][name], weight)


@pytest.mark.parametrize(
    ("place", "rank", "steps"),
    [("load", 1, 0), ("step", 1, 1), ("sync", 1, 1), ("save", 1, 1), ("step", 0, 0)],
)
def test_a_rank_that_dies_ends_the_run_in_lrls_words_and_leaves_the_last_checkpoint(
    place: str, rank: int, steps: int, policy_folder: Path, tmp_path: Path
) -> None:
    call = program(policy_folder, tmp_path, DiesAt(place, rank), ranks=2, steps=9)
    before, ends = set(os.listdir(SHM)), [1, 1]
    ends[rank] = -signal.SIGKILL
    text = run_ranks(call, 2, tmp_path, ends=ends)
    wait_for_none(lambda: left_in_shared_memory(before), 60.0, "its files in shared memory")
    of_any = f"(Rank {rank}|Another rank) has ended|Another rank does not take part"
    assert re.search("Rank 1 has ended" if place == "sync" else of_any, text), text
    saved = [path.name for path in tmp_path.glob("step=*")]
    assert saved == ["step=1.ckpt"][:steps], "what was saved before"


@pytest.mark.parametrize("told", [False, True])
def test_a_rank_that_stands_still_in_a_sync_ends_the_run_at_the_syncs_deadline_or_at_a_signal(
    told: bool, policy_folder: Path, tmp_path: Path
) -> None:
    stops, how = DiesAt("sync", by=signal.SIGSTOP), {"deadline_s": 300.0 if told else 10.0}
    call, port = program(policy_folder, tmp_path, stops, ranks=2, steps=9, **how), free_port()
    first, stopped = (start_rank(call, rank, 2, port, tmp_path) for rank in range(2))
    try:
        if told:
            still = psutil.Process(stopped.pid)
            wait_for(lambda: still.status() == psutil.STATUS_STOPPED, DEADLINE_S, "rank 1's stop")
            first.send_signal(signal.SIGTERM)
        status = first.wait(60 if told else DEADLINE_S)
        said = first.printed()
        assert status == (128 + signal.SIGTERM if told else 1), said
        assert ("Rank 1 has not answered in time" in said) != told
        assert "The last checkpoint could not be made. RankLostError: The policy is" in said
        assert "Traceback" not in said
        assert stopped.poll() is None
    finally:
        for one in (first, stopped):
            one.process.kill()
            one.wait(60)
