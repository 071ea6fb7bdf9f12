"""Fused kernels compute what a policy's own layers do.

torch's compiler runs here, on the CPU. Liger's kernels need a GPU.
"""

from __future__ import annotations

import functools
import logging
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._inductor.config
from torch import Tensor, nn
from torch._dynamo.utils import counters
from transformers.models.llama import modeling_llama

import lrl
from lrl.errors import ConfigError
from lrl.system.ranks import Ranks
from lrl.training import kernels, logprobs
from lrl.training.kernels import fuse_tried
from tests.policies import GROUPS, flat_gradient, opened, pack
from tests.tiny_policies import adapted, save_tiny

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
    return save_tiny("qwen3", tmp_path_factory.mktemp("qwen3"), initializer_range=0.3)


def results(policy: lrl.PolicyModule, budgets: tuple[int, ...]) -> list[Tensor]:
    """Log-probs and gradient of micro-batches of so many tokens."""
    found = []
    for budget in budgets:
        for micro in pack(GROUPS, budget):
            policy.zero_grad()
            logprobs = policy(micro)[micro.mask]
            (torch.linspace(-1, 1, len(logprobs)) * logprobs).sum().backward()
            found += [logprobs.detach(), flat_gradient(policy)]
    return found


def assert_near(found: list[Tensor], wanted: list[Tensor]) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert (one - other).norm() <= 1e-5 * other.norm()


def test_a_compiled_policy_gives_the_eager_ones_numbers(folder: str, compiler: None) -> None:
    eager, compiled = opened(folder), opened(folder, kernels="compile")
    assert compiled.kernels_in_use == "compile"
    assert_near(results(compiled, (200,)), results(eager, (200,)))


def test_all_layers_and_shapes_share_few_compilations_beside_checkpointing_and_adapters(
    qwen3: str, traced: None
) -> None:
    """A proof's pass is eager: hooks add rounding, and a compiled layer would leave them out."""
    settings: dict[str, Any] = {"gradient_checkpointing": True, "lora": lrl.LoRA(rank=2)}
    torch.manual_seed(0)
    eager = adapted(opened(qwen3, **settings))
    torch.manual_seed(0)
    compiled = adapted(opened(qwen3, **settings, kernels="compile"))
    budgets = (200, 40, 30)
    shapes = {tuple(micro.input_ids.shape) for budget in budgets for micro in pack(GROUPS, budget)}
    assert len(shapes) > MOST_GRAPHS
    assert_near(results(compiled, budgets), results(eager, budgets))
    assert 2 < counters["stats"]["unique_graphs"] <= MOST_GRAPHS
    assert not counters["graph_break"]
    assert list(compiled.state_dict()) == list(eager.state_dict())
    for how in ((), ("bfloat16",), (None, "bfloat16")):
        wanted, found = (one.prompt_logprobs(list(range(20)), *how) for one in (eager, compiled))
        assert found == wanted


def no_compiler(*_: Any) -> Any:
    raise RuntimeError("no compiler")


def test_kernels_that_cannot_work_are_refused_and_auto_goes_without(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        ConfigError, match="kernels is 'liger', and Liger's kernels need a CUDA GPU"
    ):
        opened(folder, kernels="liger")
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=no_compiler))
    with pytest.raises(ConfigError, match="compile fails on LlamaForCausalLM .*no compiler"):
        opened(folder, kernels="compile")
    assert opened(folder).kernels_in_use == "eager"


@pytest.mark.parametrize("factor", [1.0, 1.1])
def test_liger_changes_a_network_only_if_its_numbers_stay(
    folder: str, factor: float, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A fake exchanges what Liger does: names in the model's module, and forward functions."""
    norm = modeling_llama.LlamaRMSNorm
    monkeypatch.setattr(modeling_llama, "LlamaRMSNorm", norm)
    monkeypatch.setattr(kernels, "_unable", lambda *_: "")

    def fuse(network: nn.Module, _: str) -> None:
        modeling_llama.LlamaRMSNorm = None
        for module in network.modules():
            if isinstance(module, norm):
                module.forward = lambda hidden, own=module: factor * norm.forward(own, hidden)

    monkeypatch.setattr(kernels, "fuse", fuse)
    policy, shared = opened(folder), dict(vars(modeling_llama))
    before = results(policy, (200,))
    policy.zero_grad()

    def passes() -> Tensor:
        (micro,) = pack(GROUPS[:1], 200)
        found = policy(micro)[micro.mask]
        found.sum().backward()
        return found.detach()

    with caplog.at_level(logging.INFO):
        used = fuse_tried(
            policy.network, "auto", torch.device("cuda"), Ranks(), passes, in_16_bits=False
        )
    assert used == ("liger" if factor == 1.0 else "eager")
    assert (vars(modeling_llama) == shared) == (factor != 1.0)
    assert ("liger gives LlamaForCausalLM other numbers" in caplog.text) == (factor != 1.0)
    assert_near(results(policy, (200,)), before)
