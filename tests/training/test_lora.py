"""Low-rank adapters: what is computed, sent, saved and exported with them, on models of two tiny
layers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GPT2Config

from lrl.cli.export import main as export
from lrl.errors import ConfigError
from lrl.policy import PolicyModule
from lrl.preflight.model import shape_of
from lrl.training.beside.reference import Reference
from lrl.training.lora import LoRA, adapted_layers, adapter_tensors, base_alone
from lrl.training.trials import check_adapters
from lrl.weights.version_file import merged
from tests import tiny_policies
from tests.policies import GROUPS, FakeStep, fit, make_group, opened, pack, prepared
from tests.tiny_policies import response_logprobs, save_tiny

WORDS = list(range(1, 20))
FAMILIES = ["gemma2", "qwen3_moe", "deepseek_v3"]
"""With tied heads, experts that have another layout in memory, and shared ones."""


def sent_adapters(policy: PolicyModule) -> dict[str, torch.Tensor]:
    """Its adapters as they travel through a file."""
    return dict(adapter_tensors(policy.network))


def adapted(model: str, **settings: Any) -> PolicyModule:
    """A policy with adapters that change what it computes."""
    return tiny_policies.adapted(opened(model, lora=LoRA(rank=4, alpha=8.0), **settings))


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_sent_and_what_is_exported_compute_what_the_policy_computes(
    tmp_path: Path, family: str
) -> None:
    folder = save_tiny(family, tmp_path / "base", 4.0)
    base, policy = opened(folder), adapted(folder)
    expected = torch.tensor(policy.prompt_logprobs(WORDS))
    assert (expected - torch.tensor(base.prompt_logprobs(WORDS))).abs().mean() > 0.01, (
        "the adapters do something"
    )
    with base_alone(policy.network):
        assert policy.prompt_logprobs(WORDS) == base.prompt_logprobs(WORDS)

    files = load_file(Path(folder) / "model.safetensors")
    received = dict(merged(files.items(), sent_adapters(policy), torch.float32))
    whole = dict(policy.whole_weights())
    assert whole.keys() == dict(base.whole_weights()).keys()
    for name, weight in whole.items():
        torch.testing.assert_close(received[name], weight)

    policy.export(tmp_path / "policy")
    torch.testing.assert_close(
        torch.tensor(opened(str(tmp_path / "policy")).prompt_logprobs(WORDS)), expected
    )


def test_an_export_in_bfloat16_has_the_weights_that_the_generators_had(
    folder: str, tmp_path: Path
) -> None:
    policy = adapted(folder, dtype="bfloat16")
    files = load_file(Path(folder) / "model.safetensors")
    halved = {name: weight.bfloat16() for name, weight in files.items()}
    generators = dict(merged(halved.items(), sent_adapters(policy), torch.bfloat16))
    policy.export(tmp_path / "policy")
    exported = load_file(tmp_path / "policy" / "model.safetensors")
    torch.testing.assert_close(exported, generators, rtol=0, atol=0)


def test_adapters_of_weights_in_bfloat16_are_trained_in_float32(folder: str) -> None:
    policy = adapted(folder, dtype="bfloat16")
    dtypes = {(".lora_" in name, weight.dtype) for name, weight in policy.named_parameters()}
    assert dtypes == {(True, torch.float32), (False, torch.bfloat16)}
    policy.compute_loss(pack(GROUPS)[0]).backward()
    trained = [weight for weight in policy.parameters() if weight.requires_grad]
    assert all(weight.grad is not None and weight.grad.dtype == torch.float32 for weight in trained)


def test_peft_opens_the_exported_adapters(folder: str, tmp_path: Path) -> None:
    policy = adapted(folder)
    policy.export(tmp_path)
    theirs = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(folder), str(tmp_path / "adapter")
    )
    with torch.no_grad():
        expected = response_logprobs(theirs, WORDS[:1], WORDS[1:])
    torch.testing.assert_close(torch.tensor(policy.prompt_logprobs(WORDS)), expected)


def test_adapters_of_another_model_are_no_update(folder: str) -> None:
    files = load_file(Path(folder) / "model.safetensors")
    gone = "model.layers.1.mlp.up_proj.weight"
    del files[gone]
    with pytest.raises(ValueError, match=rf"adapter {gone}.lora_A"):
        dict(merged(files.items(), sent_adapters(adapted(folder)), torch.float32))


def test_layers_that_compute_more_than_a_product_get_no_adapter(tmp_path: Path) -> None:
    """Phimoe's router derives from nn.Linear."""
    policy = opened(save_tiny("phimoe", tmp_path), lora=LoRA(rank=4))
    assert "router" not in {name.rpartition(".")[2] for name, _ in adapted_layers(policy.network)}


def test_a_layer_whose_adapter_the_model_goes_past_is_refused_and_all_others_are_trained(
    tmp_path: Path,
) -> None:
    folder = save_tiny("mamba", tmp_path)
    named = r"MambaForCausalLM cannot .* at backbone.layers.0.mixer.dt_proj \(and 1 more\)"
    remedy = r"Set model.lora.target_modules to \[in_proj, out_proj, x_proj\]."
    with pytest.raises(ConfigError, match=f"{named}.*{remedy}"):
        opened(folder, lora=LoRA(rank=4))
    opened(folder, lora=LoRA(rank=4, target_modules=["in_proj", "out_proj", "x_proj"]))


def test_the_trial_leaves_weights_gradients_and_random_numbers_as_they_were(folder: str) -> None:
    network = opened(folder, lora=LoRA(rank=4)).network
    before = {name: weight.detach().clone() for name, weight in network.named_parameters()}
    state = torch.get_rng_state()
    check_adapters(network)
    assert torch.equal(torch.get_rng_state(), state)
    for name, weight in network.named_parameters():
        assert weight.grad is None and weight.requires_grad == (".lora_" in name)
        torch.testing.assert_close(weight.detach(), before[name], rtol=0, atol=0)


def test_adapters_alone_are_trained_saved_and_resumed(folder: str, tmp_path: Path) -> None:
    steps = [FakeStep(pack(GROUPS, 24))] * 3
    lora = LoRA(rank=4, target_modules=["q_proj", "down_proj"])

    def trained(seed: int, ckpt_path: str | None = None, **how: Any) -> dict[str, torch.Tensor]:
        torch.manual_seed(seed)
        policy = opened(folder, lora=lora, lr=0.05)
        fit(policy, steps, ckpt_path, **how)
        return dict(policy.whole_weights())

    base, whole = dict(opened(folder).whole_weights()), trained(5, saves_in=tmp_path)
    changed = {
        name.split(".")[-2] for name, weight in whole.items() if not torch.equal(weight, base[name])
    }
    assert changed == {"q_proj", "down_proj"}
    path = str(tmp_path / "step=2.ckpt")
    saved = torch.load(path, weights_only=True)["state_dict"]
    assert saved.keys() == {f"network.{name}" for name in shape_of(folder, None, lora).trained}
    torch.testing.assert_close(trained(6, path), whole, rtol=0, atol=0)

    with pytest.raises(ValueError, match=r"made with model.lora .*'alpha': 32.0.* and it is None"):
        fit(opened(folder), steps, path)

    assert export([str(tmp_path / "step=3.ckpt"), str(tmp_path / "last")]) == 0
    torch.testing.assert_close(dict(opened(str(tmp_path / "last")).whole_weights()), whole)
    assert (tmp_path / "last" / "adapter" / "adapter_config.json").exists()


def test_the_base_of_the_adapters_is_the_reference_and_takes_no_memory(folder: str) -> None:
    policy, alone = adapted(folder, reference=Reference()), opened(folder, reference=Reference())
    groups = [
        *prepared(policy, [make_group(1)], 99, 0.7),
        *prepared(alone, [make_group(1)], 99, 0.7),
    ]
    found, expected = ([one.reference_logprobs for one in each.rollouts] for each in groups)
    assert found == expected
    assert not hasattr(policy.reference, "network")
    assert all(
        weight.requires_grad == (".lora_" in name) for name, weight in policy.named_parameters()
    )


def test_layers_that_the_model_does_not_have_are_refused_before_its_weights_are_loaded(
    folder: str,
) -> None:
    def refused(words: str, modules: list[str]) -> None:
        with pytest.raises(ConfigError, match=words):
            shape_of(folder, None, LoRA(target_modules=modules))

    refused(r"has 'c_attn'.*Choose from down_proj, gate_proj, .*v_proj", ["q_proj", "c_attn"])
    refused("'lm_head'", ["lm_head"])  # lrl computes log-probs with its weight itself
    config = GPT2Config(vocab_size=32, n_embd=32, n_layer=1, n_head=2)
    gpt2 = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ConfigError, match="model.lora is set, and GPT2LMHeadModel has no linear"):
        LoRA().add_to(gpt2)
