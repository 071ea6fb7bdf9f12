"""The critic of a checkpoint, exported: transformers computes the values that training had.

Those of a turn's Q are behind the token, not before it.

Covers lrl/training/export.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForTokenClassification, OlmoConfig

from lrl.cli.main import main
from lrl.policy import PolicyModule
from lrl.training.beside.turn_critic import TurnCritic
from lrl.training.lora import LoRA
from lrl.training.model import text_as_micro_batch
from tests.policies import SIZES, save_model
from tests.training.beside.test_critic import learner, run

TOKENS = [5, 9, 2, 7, 7, 1]


def values_of(policy: PolicyModule) -> Tensor:
    micro = text_as_micro_batch(TOKENS, policy.device)
    with torch.no_grad():
        found: Tensor = policy(micro, "values")
    return found[0, : len(TOKENS) - 1]


def values_in(folder: Path) -> Tensor:
    model = AutoModelForTokenClassification.from_pretrained(folder)
    with torch.no_grad():
        found: Tensor = model(torch.tensor([TOKENS])).logits
    if found.shape[2] == 1:
        return found[0, :-1, 0]
    return torch.cat([found[0, :-1, :2], found[0, 1:, 2:]], 1)


@pytest.mark.parametrize("kind", ["head", "adapters", "own model", "turns"])
def test_the_exported_critic_has_the_values_of_training(
    folder: str, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    own = folder if kind == "own model" else None
    settings: dict[str, Any] = {"lora": LoRA(rank=2)} if kind == "adapters" else {}
    if kind == "turns":
        settings["kind"] = TurnCritic
    policy = learner(folder, own, **settings)
    run(policy, 3, tmp_path)
    words = ["export", "--critic", str(tmp_path / "step=3.ckpt"), str(tmp_path / "critic")]
    assert main(words) == 0
    assert "The critic after 3 steps is in" in capsys.readouterr().out
    trained = values_of(policy)
    trained = trained[..., :4] if kind == "turns" else trained
    assert trained.abs().max() > 1e-3
    torch.testing.assert_close(values_in(tmp_path / "critic"), trained, rtol=1e-4, atol=1e-5)


def test_what_cannot_be_exported_is_refused_and_nothing_is_written(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(checkpoint: Path) -> str:
        assert main(["export", "--critic", str(checkpoint), str(tmp_path / "critic")]) == 2
        assert not (tmp_path / "critic").exists()
        return capsys.readouterr().err

    sizes = {name: SIZES[name] for name in SIZES if name != "num_key_value_heads"}
    olmo = save_model(tmp_path / "olmo", OlmoConfig(**sizes, initializer_range=0.3))
    run(learner(olmo), 1, tmp_path / "with")
    assert "of the kind olmo, for which" in refused(tmp_path / "with" / "step=1.ckpt")

    state = torch.load(tmp_path / "with" / "step=1.ckpt")
    weights = state["state_dict"]
    state["state_dict"] = {name: weights[name] for name in weights if name.startswith("network.")}
    torch.save(state, tmp_path / "without.ckpt")
    assert "its run had no model.critic" in refused(tmp_path / "without.ckpt")
