"""`lrl export`: the policy of a checkpoint as a folder that transformers opens; `tests/strategies`
has sharded ones."""

from __future__ import annotations

import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lrl.cli.main import main
from lrl.rollouts import policy_text
from lrl.rollouts.prompts import Prompts
from lrl.training.model import ModelSource, open_tokenizer
from tests.cli.conftest import Say
from tests.run_without_generators import fit, trainer
from tests.tiny_policies import save_tiny, tiny_llama


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
    run: Path, tmp_path: Path, say: Say
) -> None:
    folder = tmp_path / "my policy's"
    status, out, _ = say("export", run / "step=1.ckpt", folder)
    said, _, command = out.strip().partition(": lrl ")
    assert status == 0 and "The policy after 1 steps is in" in said
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
    form = tmp_path / "without" / policy_text.FORM_FILE
    assert not form.exists(), "this run had no data set of lrl's"
    state = torch.load(run / "step=2.ckpt")
    prompts = Prompts([{"question": "2+2"}], prompt_column="question", template="{question}=")
    state["prompt_form"] = policy_text.form_of(SimpleNamespace(prompts=prompts))
    torch.save(state, tmp_path / "with.ckpt")
    assert main(["export", str(tmp_path / "with.ckpt"), str(tmp_path / "with")]) == 0
    assert policy_text.read_form(tmp_path / "with") == prompts.form


def test_a_model_that_was_moved_is_given_by_name(run: Path, tmp_path: Path, say: Say) -> None:
    state = torch.load(run / "step=2.ckpt")
    state["policy_folder"] = str(tmp_path / "gone")
    torch.save(state, tmp_path / "moved.ckpt")
    words = ["export", tmp_path / "moved.ckpt", tmp_path / "out"]
    status, _, error = say(*words)
    assert status == 2 and "gone" in error and not (tmp_path / "out").exists()
    assert say(*words, "--model", run / "policy")[0] == 0 and weights_of(tmp_path / "out")


def test_a_wrong_word_is_named_with_its_remedy_and_nothing_is_written(
    run: Path, tmp_path: Path, say: Say
) -> None:
    checkpoint, out, full = run / "step=2.ckpt", tmp_path / "out", tmp_path / "full"
    text, older = tmp_path / "text.ckpt", tmp_path / "older.ckpt"
    text.write_text("no checkpoint")
    state = torch.load(checkpoint)
    del state["policy_folder"]
    torch.save(state, older)
    full.mkdir()
    (full / "file").touch()
    for words, told in (
        ((tmp_path / "none.ckpt", out), "No such file"),
        ((text, out), "is no checkpoint of an lrl run"),
        ((older, out), "--model"),
        ((checkpoint, out, "--model", save_tiny("qwen2", tmp_path / "other")), "of another model"),
        ((checkpoint, full), "give a new folder"),
    ):
        status, _, error = say("export", *words)
        assert status == 2 and error.startswith("lrl: error: ") and told in error, error
        assert len(error.splitlines()) == 1 and not (words[1] / "config.json").exists()
