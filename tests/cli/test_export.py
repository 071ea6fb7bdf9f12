"""`lrl export`: the policy of a checkpoint as a folder that transformers opens; `tests/strategies`
has sharded ones."""

from __future__ import annotations

import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lrl.cli.main import main
from lrl.rollouts import prompt_form
from lrl.rollouts.prompts import Prompts
from lrl.training.model import ModelSource, open_tokenizer
from tests.run_without_generators import fit, trainer
from tests.tiny_policies import tiny_llama, tiny_qwen2


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps that has saved both; `policy` is the model that it began with."""
    folder = tmp_path_factory.mktemp("run")
    tiny_llama(folder / "policy")
    saving = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    fit(str(folder / "policy"), trainer(folder, saving, max_steps=2))
    return folder


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return ModelSource(str(folder)).open().state_dict()


def test_the_policy_of_any_step_is_exported_with_its_tokenizer(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "my policy's"
    assert main(["export", str(run / "step=1.ckpt"), str(folder)]) == 0
    said, _, command = capsys.readouterr().out.strip().partition(": lrl ")
    assert "The policy after 1 steps is in" in said
    assert shlex.split(command) == ["chat", str(folder)], "it is quoted for the shell"
    saved, before = torch.load(run / "step=1.ckpt")["state_dict"], weights_of(run / "policy")
    weights = weights_of(folder)
    for name, weight in weights.items():
        assert torch.equal(weight, saved[f"network.{name}"])
    assert not all(torch.equal(weights[name], before[name]) for name in before)
    vocabularies = [open_tokenizer(str(one)).get_vocab() for one in (folder, run / "policy")]
    assert vocabularies[0] == vocabularies[1]


def test_the_form_of_the_runs_prompts_goes_from_the_checkpoint_into_the_policys_folder(
    run: Path, tmp_path: Path
) -> None:
    assert main(["export", str(run / "step=2.ckpt"), str(tmp_path / "without")]) == 0
    form = tmp_path / "without" / prompt_form.FILE
    assert not form.exists(), "this run had no data set of lrl's"
    state = torch.load(run / "step=2.ckpt")
    prompts = Prompts([{"question": "2+2"}], prompt_column="question", template="{question}=")
    state["prompt_form"] = prompt_form.of(SimpleNamespace(prompts=prompts))
    torch.save(state, tmp_path / "with.ckpt")
    assert main(["export", str(tmp_path / "with.ckpt"), str(tmp_path / "with")]) == 0
    assert prompt_form.read(tmp_path / "with") == prompts.form


def test_a_model_that_was_moved_is_given_by_name(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = torch.load(run / "step=2.ckpt")
    state["policy_folder"] = str(tmp_path / "gone")
    torch.save(state, tmp_path / "moved.ckpt")
    assert main(["export", str(tmp_path / "moved.ckpt"), str(tmp_path / "out")]) == 2
    assert "gone" in capsys.readouterr().err and not (tmp_path / "out").exists()
    words = ["export", str(tmp_path / "moved.ckpt"), str(tmp_path / "out")]
    assert main([*words, "--model", str(run / "policy")]) == 0 and weights_of(tmp_path / "out")


def broken(name: str, run: Path, folder: Path) -> tuple[Path, list[str]]:
    """Returns a checkpoint and further words, one of which is wrong."""
    checkpoint, more = folder / "wrong.ckpt", list[str]()
    state: dict[str, Any] = torch.load(run / "step=2.ckpt")
    if name == "text":
        checkpoint.write_text("no checkpoint")
    elif name == "no policy":
        torch.save({"state_dict": {"layer.weight": torch.zeros(2)}, "global_step": 1}, checkpoint)
    elif name == "an older one":
        del state["policy_folder"]
        torch.save(state, checkpoint)
    elif name == "another model":
        torch.save(state, checkpoint)
        more = ["--model", str(tiny_qwen2(folder / "other"))]
    elif name == "a full folder":
        torch.save(state, checkpoint)
        (folder / "out").mkdir()
        (folder / "out" / "file").touch()
    return checkpoint, more


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("no checkpoint", "there is no such checkpoint"),
        ("text", "is no checkpoint of an lrl run"),
        ("no policy", "is no checkpoint of an lrl run"),
        ("an older one", "--model"),
        ("another model", "of another model"),
        ("a full folder", "give a new folder"),
    ],
)
def test_a_wrong_word_is_named_with_its_remedy_and_nothing_is_written(
    name: str, text: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint, more = broken(name, run, tmp_path)
    capsys.readouterr()
    assert main(["export", str(checkpoint), str(tmp_path / "out"), *more]) == 2
    error = capsys.readouterr().err
    assert error.startswith("lrl: error: ") and text in error and len(error.splitlines()) == 1
    assert not (tmp_path / "out" / "config.json").exists()
