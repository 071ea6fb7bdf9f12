"""The trial of a model: leaks are found, other models share rows, and the trial changes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.modules.module import register_module_forward_pre_hook
from transformers import PreTrainedModel

from lrl.training import trials, varlen
from lrl.training.model import ModelSource
from lrl.training.trials import OTHERS, Shared, check_rows, shared_by_responses
from lrl.types import MicroBatch
from tests.policies import opened
from tests.tiny_policies import save_tiny


def open_tiny(
    family: str, folder: Path, scale: float, seed: int = 0, dtype: Any = "float32", **settings: Any
) -> PreTrainedModel:
    saved = save_tiny(family, folder, scale, seed, **settings)
    return ModelSource(str(saved), dtype).open()


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gemma3_text"])
def test_a_model_without_a_leak_shares_rows_in_bfloat16(family: str, tmp_path: Path) -> None:
    for seed, scale in enumerate((1.0, 4.0)):
        network = open_tiny(family, tmp_path / str(seed), scale, seed, "bfloat16")
        assert shared_by_responses(network) == Shared(packed=True, prefixes=True)
        assert shared_by_responses(sharpened(network)).rows


def sharpened(network: PreTrainedModel) -> PreTrainedModel:
    """Makes it sure of its tokens, as training does: in bfloat16 its large logits then round by a
    nat and more."""
    with torch.no_grad():
        network.get_output_embeddings().weight *= 100.0
    return network


@pytest.mark.parametrize("family", ["llama4_text", "qwen3_next", "mamba", "bloom"])
def test_a_leak_is_found_in_bfloat16_whatever_the_rounding(family: str, tmp_path: Path) -> None:
    network = open_tiny(family, tmp_path, 4.0, dtype="bfloat16")
    assert not shared_by_responses(network).rows
    assert not shared_by_responses(sharpened(network)).rows


BEHIND_THE_TRIAL = 2 * max(OTHERS)


@pytest.mark.parametrize(
    ("family", "setting", "shares"),
    [
        ("falcon", None, Shared(prefixes=True)),
        ("gpt_oss", None, Shared(prefixes=True)),
        ("xglm", None, Shared(prefixes=True)),
        ("llama4_text", "attention_chunk_size", Shared()),
        ("recurrent_gemma", "attention_window_size", Shared()),
        ("moshi", "sliding_window", Shared(packed=True)),
        ("gpt_neo", "window_size", Shared(packed=True)),
        ("mistral", "sliding_window", Shared(packed=True, prefixes=True)),
        ("gemma2", "sliding_window", Shared(packed=True, prefixes=True)),
        ("deepseek_v32", "index_topk", Shared(packed=True, prefixes=True)),
    ],
)
def test_a_model_shares_what_its_attention_keeps_apart_also_behind_the_trial_s_tokens(
    family: str, setting: str | None, shares: Shared, tmp_path: Path
) -> None:
    """Chunks and windows of thousands of tokens were not reached, and responses shared what leaks
    behind them."""
    settings = {setting: BEHIND_THE_TRIAL} if setting else {}
    network = open_tiny(family, tmp_path, 4.0, **settings)
    assert shared_by_responses(network) == shares
    assert all(getattr(network.config, name) == BEHIND_THE_TRIAL for name in settings)


def test_two_models_share_rows_by_a_mask_only_if_it_holds_for_both() -> None:
    by_mask = Shared(prefixes=True)
    assert by_mask.also(Shared(packed=True, prefixes=True)) == by_mask
    assert Shared(packed=True).also(by_mask) == Shared()
    assert Shared(packed=True).also(Shared(packed=True, prefixes=True)) == Shared(packed=True)


def draw(*_: Any) -> None:
    torch.rand(1)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_trial_leaves_nothing_behind(folder: str, checkpointing: bool) -> None:
    network = ModelSource(folder, gradient_checkpointing=checkpointing).open()
    before = torch.get_rng_state()
    weights = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    dropout = register_module_forward_pre_hook(draw)  # as an unknown one would
    assert shared_by_responses(network).rows
    dropout.remove()
    assert torch.equal(torch.get_rng_state(), before)
    assert network.training and all(module.training for module in network.modules())
    assert all(weight.grad is None for weight in network.parameters())
    assert all(torch.equal(tensor, weights[name]) for name, tensor in network.state_dict().items())


def test_a_leaking_policy_trains_unpacked(tmp_path: Path) -> None:
    assert not opened(save_tiny("bloom", tmp_path, 4.0)).responses_share.rows


@pytest.mark.parametrize(
    ("family", "dtype", "settings"),
    [
        ("bert-generation", "float32", {}),
        ("bert-generation", "bfloat16", {}),
        ("doge", "float32", {"keep_window_size": BEHIND_THE_TRIAL}),
    ],
)
def test_a_model_whose_tokens_see_what_comes_behind_is_refused(
    family: str, dtype: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    network = open_tiny(family, tmp_path, 4.0, dtype=dtype, **settings)
    for trial in (check_rows, shared_by_responses):
        with pytest.raises(ValueError, match=rf"{tmp_path}.*gives a response that is padded"):
            trial(network)


def test_a_leak_in_the_gradient_alone_is_found(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Simulates an attention whose backward pass mixes responses."""
    network, honest = ModelSource(folder).open(), trials.label_logprobs

    def wrong_backward(network: PreTrainedModel, micro: MicroBatch, chunk_tokens: int) -> Tensor:
        logprobs = honest(network, micro, chunk_tokens)
        shared = micro.num_sequences > len(micro.input_ids)
        return logprobs + (0.01 * logprobs - (0.01 * logprobs).detach() if shared else 0.0)

    monkeypatch.setattr(trials, "label_logprobs", wrong_backward)
    assert not shared_by_responses(network).rows


def test_attention_without_masks_gets_copies_of_the_prompt(
    folder: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(varlen, "WITH_MASKS", ("eager",))
    assert shared_by_responses(ModelSource(folder).open()) == Shared(packed=True)
    assert "'sdpa' takes no mask" in caplog.text
