"""Fused kernels compute what a policy's own layers do.

torch's compiler runs here, on the CPU. Liger's kernels need a GPU: what lrl does around them is
tried with a package that stands for Liger.
"""

from __future__ import annotations

import functools
import logging
import shutil
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
import torch._inductor.config
from torch import Tensor, nn
from torch._dynamo.utils import counters
from transformers import Qwen3Config
from transformers.models.llama import modeling_llama

import lrl
from lrl.errors import ConfigError
from lrl.system.ranks import Ranks
from lrl.training import logprobs
from lrl.training.kernels import fuse_tried
from lrl.training.logprobs import FUSED_HEAD
from tests.policies import GROUPS, SIZES, adapted, opened, pack, save_model

MOST_GRAPHS = 6
"""One row or several, each with lrl's masks and without; the head forwards and backwards."""


@pytest.fixture(autouse=True)
def anew() -> None:
    """Forgets what an earlier test has compiled."""
    torch._dynamo.reset()
    logprobs._compiled.cache_clear()
    counters.clear()


@pytest.fixture
def compiler() -> Iterator[None]:
    """Lets torch compile, in this process: the tests' environment names no compiler."""
    if shutil.which("c++") is None:
        pytest.skip("no C++ compiler")
    with torch._inductor.config.patch({"cpp.cxx": (None, "c++"), "compile_threads": 1}):
        yield


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiles without generating code, which takes ten seconds a layer."""
    trace = functools.partial(torch.compile, backend="aot_eager")
    monkeypatch.setattr(torch, "compile", trace)


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> str:
    config = Qwen3Config(**SIZES, head_dim=16, initializer_range=0.3)
    return save_model(tmp_path_factory.mktemp("qwen3"), config)


def results(policy: lrl.PolicyModule, budgets: tuple[int, ...]) -> list[Tensor]:
    """Log-probs and gradient of micro-batches of so many tokens."""
    found = []
    for budget in budgets:
        for micro in pack(GROUPS, budget):
            policy.zero_grad()
            found.append(policy(micro)[micro.mask])
            (torch.linspace(-1, 1, len(found[-1])) * found[-1]).sum().backward()
            gradients = [one.grad.flatten() for one in policy.parameters() if one.grad is not None]
            found += [found.pop().detach(), torch.cat(gradients)]
    return found


def assert_near(found: list[Tensor], wanted: list[Tensor]) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert (one - other).norm() <= 1e-5 * other.norm()


def test_a_compiled_policy_gives_the_eager_ones_numbers(folder: str, compiler: None) -> None:
    eager, compiled = opened(folder), opened(folder, kernels="compile")
    assert compiled.kernels_in_use == "compile"
    assert_near(results(compiled, (200,)), results(eager, (200,)))


@pytest.mark.parametrize("adapters", [None, lrl.LoRA(rank=2)])
def test_all_layers_and_shapes_share_few_compilations_beside_checkpointing_and_adapters(
    qwen3: str, adapters: lrl.LoRA | None, traced: None
) -> None:
    settings: dict[str, Any] = {"gradient_checkpointing": True, "lora": adapters}
    torch.manual_seed(0)
    eager = adapted(opened(qwen3, **settings))
    torch.manual_seed(0)
    compiled = adapted(opened(qwen3, **settings, kernels="compile"))
    budgets = (64, 200, 40, 90, 30)
    shapes = {tuple(micro.input_ids.shape) for budget in budgets for micro in pack(GROUPS, budget)}
    assert len(shapes) > MOST_GRAPHS
    assert_near(results(compiled, budgets), results(eager, budgets))
    assert 2 < counters["stats"]["unique_graphs"] <= MOST_GRAPHS
    assert not counters["graph_break"]


def test_a_proof_of_a_compiled_policy_sees_rounding(folder: str, traced: None) -> None:
    """Hooks add it, and a compiled layer would leave them out."""
    eager, compiled = opened(folder), opened(folder, kernels="compile")
    assert list(compiled.state_dict()) == list(eager.state_dict())
    for how in ((), ("bfloat16",), (None, "bfloat16")):
        wanted, found = (one.prompt_logprobs(list(range(20)), *how) for one in (eager, compiled))
        assert found == wanted


def test_a_reference_and_a_critics_model_have_the_policys_kernels(
    folder: str, traced: None
) -> None:
    settings: dict[str, Any] = {
        "reference": lrl.Reference(),
        "critic": lrl.Critic(model=folder),
        "kernels": "compile",
    }
    policy = lrl.PolicyModule(folder, **settings)
    policy.setup("fit")  # as Lightning does, before the model is opened
    policy.configure_model()
    assert policy.reference is not None and policy.critic is not None
    for network in (policy.network, policy.reference.network, *policy.critic.trunks):
        assert getattr(network, FUSED_HEAD)


def test_kernels_that_cannot_work_are_refused_and_auto_goes_without(
    folder: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(
        ConfigError, match="kernels is 'liger', and Liger's kernels need a CUDA GPU"
    ):
        opened(folder, kernels="liger")
    monkeypatch.setattr(torch._inductor.config.cpp, "cxx", (None, "/no/compiler"))
    with pytest.raises(ConfigError, match="compile fails on LlamaForCausalLM .*compiler"):
        opened(folder, kernels="compile")
    assert opened(folder).kernels_in_use == "eager"
    with pytest.raises(ConfigError, match="model.kernels is 'fast'"):
        opened(folder, kernels="fast")


class FusedNorm:
    """Stands for Liger: exchanges names in the model's module and forward functions of a network."""

    def __init__(self, factor: float = 1.0) -> None:
        self.factor = factor
        self.calls: list[str] = []
        self.package, self.patches = ModuleType("liger_kernel"), ModuleType("monkey_patch")
        self.patches.MODEL_TYPE_TO_APPLY_LIGER_FN = {"llama": self.patch}  # type: ignore[attr-defined]
        self.patches._apply_liger_kernel_to_instance = self.patch  # type: ignore[attr-defined]

    def patch(self, network: nn.Module, **settings: Any) -> None:
        assert not any(settings.values())  # neither of its losses
        rotate, norm = modeling_llama.apply_rotary_pos_emb, modeling_llama.LlamaRMSNorm

        def rotated(*args: Any) -> Any:
            self.calls.append("rotary")
            return rotate(*args)

        def normed(module: nn.Module, hidden: Tensor) -> Tensor:
            self.calls.append("norm")
            return self.factor * norm.forward(module, hidden)

        modeling_llama.apply_rotary_pos_emb = rotated
        modeling_llama.LlamaRMSNorm = None
        for module in network.modules():
            if isinstance(module, norm):
                module.forward = normed.__get__(module)


@pytest.mark.parametrize("factor", [1.0, 1.1])
def test_liger_changes_a_network_only_if_its_numbers_stay(
    folder: str,
    factor: float,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    traced: None,
) -> None:
    for name in ("apply_rotary_pos_emb", "LlamaRMSNorm"):  # which all of one class then share
        monkeypatch.setattr(modeling_llama, name, getattr(modeling_llama, name))
    liger, other, policy = FusedNorm(factor), opened(folder), opened(folder)
    for name, module in {
        "liger_kernel": liger.package,
        "liger_kernel.transformers": liger.package,
        "liger_kernel.transformers.monkey_patch": liger.patches,
    }.items():
        monkeypatch.setitem(sys.modules, name, module)
    liger.package.__spec__ = sys.__spec__
    shared, wanted = dict(vars(modeling_llama)), results(other, (200,))

    def passes() -> Tensor:
        (micro,) = pack(GROUPS[:1], 200)
        found = policy(micro)[micro.mask]
        found.sum().backward()
        return found.detach()

    with caplog.at_level(logging.INFO):
        used = fuse_tried(
            policy.network, "auto", torch.device("cuda"), Ranks(), passes, in_16_bits=False
        )
    assert {"norm", "rotary"} == set(liger.calls)
    liger.calls.clear()
    assert_near(results(policy, (200,)), wanted)
    if factor == 1.0:
        assert used == "liger"
        assert liger.calls.count("rotary") == SIZES["num_hidden_layers"]
        liger.calls.clear()
    else:
        assert used == "eager" and vars(modeling_llama) == shared
        assert "liger gives LlamaForCausalLM other numbers than eager" in caplog.text
    assert_near(results(other, (200,)), wanted)
    assert "norm" not in liger.calls, "another network keeps its own"
