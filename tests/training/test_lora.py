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
from lrl.training.lora import LoRA, adapted_layers, base_alone, whole_adapters
from lrl.training.pieces import checkpoint_weights
from lrl.training.trials import check_adapters
from lrl.weights.version_file import merged
from tests import policies
from tests.policies import GROUPS, FakeStep, Steps, make_group, opened, pack, trainer
from tests.tiny_families import save_tiny
from tests.tiny_policies import byte_tokenizer
from tests.weights.whole_weights import named

WORDS = list(range(1, 20))
FAMILIES = ["llama", "qwen2", "gemma2", "phi3", "mixtral", "qwen3_moe", "deepseek_v3"]
"""With biases, tied heads, experts that have another layout in memory, and shared ones."""


def whole_weights(policy: PolicyModule) -> dict[str, torch.Tensor]:
    """Its weights with their names in a checkpoint; adapters are merged."""
    return dict(checkpoint_weights(policy.network))


def sent_adapters(policy: PolicyModule) -> dict[str, torch.Tensor]:
    """Its adapters as they travel through a file."""
    return dict(named(whole_adapters(policy.network)))


def adapted(model: str, **settings: Any) -> PolicyModule:
    """A policy with adapters that change what it computes."""
    return policies.adapted(opened(model, lora=LoRA(rank=4, alpha=8.0), **settings))


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_sent_and_what_is_exported_compute_what_the_policy_computes(
    tmp_path: Path, family: str
) -> None:
    folder = str(save_tiny(family, tmp_path / "base", 4.0))
    byte_tokenizer().save_pretrained(folder)
    base, policy = opened(folder), adapted(folder)
    expected = torch.tensor(policy.prompt_logprobs(WORDS))
    assert (expected - torch.tensor(base.prompt_logprobs(WORDS))).abs().mean() > 0.01, (
        "the adapters do something"
    )
    with base_alone(policy.network):
        assert policy.prompt_logprobs(WORDS) == base.prompt_logprobs(WORDS)

    files = load_file(Path(folder) / "model.safetensors")
    received = dict(merged(files.items(), sent_adapters(policy), torch.float32))
    whole = whole_weights(policy)
    assert whole.keys() == whole_weights(base).keys()
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
        logits = theirs(torch.tensor([WORDS])).logits[0, :-1].log_softmax(-1)
    expected = logits.gather(1, torch.tensor(WORDS[1:])[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(policy.prompt_logprobs(WORDS)), expected)


def test_adapters_of_another_model_are_no_update(folder: str) -> None:
    files = load_file(Path(folder) / "model.safetensors")
    gone = "model.layers.1.mlp.up_proj.weight"
    del files[gone]
    with pytest.raises(ValueError, match=rf"adapter {gone}.lora_A"):
        dict(merged(files.items(), sent_adapters(adapted(folder)), torch.float32))


def test_layers_that_compute_more_than_a_product_get_no_adapter(tmp_path: Path) -> None:
    """Phimoe's router derives from nn.Linear."""
    policy = opened(str(save_tiny("phimoe", tmp_path)), lora=LoRA(rank=4))
    assert "router" not in {name.rpartition(".")[2] for name, _ in adapted_layers(policy.network)}


def test_a_layer_whose_adapter_the_model_goes_past_is_refused_and_all_others_are_trained(
    tmp_path: Path,
) -> None:
    folder = str(save_tiny("mamba", tmp_path))
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


def stepped(
    policy: PolicyModule, steps: int, tmp_path: Path, ckpt_path: str | None = None
) -> PolicyModule:
    training = trainer(tmp_path, max_steps=steps)
    data = Steps([FakeStep(pack(GROUPS, 24))] * steps)
    training.fit(policy, data, ckpt_path=ckpt_path, weights_only=True)
    return policy


def test_adapters_alone_are_trained_saved_and_resumed(folder: str, tmp_path: Path) -> None:
    def policy() -> PolicyModule:
        torch.manual_seed(5)
        return opened(folder, lora=LoRA(rank=4, target_modules=["q_proj", "down_proj"]), lr=0.05)

    base = whole_weights(opened(folder))
    whole = whole_weights(stepped(policy(), 3, tmp_path / "whole"))
    changed = {
        name.split(".")[-2] for name, weight in whole.items() if not torch.equal(weight, base[name])
    }
    assert changed == {"q_proj", "down_proj"}
    path = tmp_path / "whole" / "step=2.ckpt"
    saved = torch.load(path, weights_only=True)["state_dict"]
    assert saved.keys() == {
        f"network.{name}" for name in shape_of(folder, None, policy().lora).trained
    }
    torch.manual_seed(6)
    resumed = stepped(
        opened(folder, lora=policy().lora, lr=0.05), 3, tmp_path / "resumed", str(path)
    )
    for name, weight in whole_weights(resumed).items():
        torch.testing.assert_close(weight, whole[name], rtol=0, atol=0)

    with pytest.raises(ValueError, match=r"made with model.lora .*'alpha': 32.0.* and it is None"):
        stepped(opened(folder), 3, tmp_path / "other", str(path))

    assert export([str(path), str(tmp_path / "exported")]) == 0
    assert export([str(tmp_path / "whole" / "step=3.ckpt"), str(tmp_path / "last")]) == 0
    found = whole_weights(opened(str(tmp_path / "last")))
    torch.testing.assert_close(found, whole)
    assert (tmp_path / "last" / "adapter" / "adapter_config.json").exists()


def test_the_base_of_the_adapters_is_the_reference_and_takes_no_memory(folder: str) -> None:
    policy, alone = adapted(folder, reference=Reference()), opened(folder, reference=Reference())
    for each in (policy, alone):
        each.setup("fit")
    group, other = make_group(1), make_group(1)
    policy.prepare(group, 0.7, 10_000)
    alone.prepare(other, 0.7, 10_000)
    assert [one.reference_logprobs for one in group.rollouts] == [
        one.reference_logprobs for one in other.rollouts
    ]
    assert not hasattr(policy.reference, "network")
    assert all(
        weight.requires_grad == (".lora_" in name) for name, weight in policy.named_parameters()
    )


@pytest.mark.parametrize(
    "settings", [{"rank": 0}, {"alpha": 0.0}, {"target_modules": "linear"}, {"target_modules": []}]
)
def test_settings_outside_their_range_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"model.lora.{next(iter(settings))} is"):
        LoRA(**settings)


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
    with pytest.raises(ConfigError, match="refresh_every_n_steps is 2, and model.lora trains"):
        PolicyModule(folder, lora=LoRA(), reference=Reference(refresh_every_n_steps=2))
