"""Every family of causal language models: trained as if each response were alone, or refused, as
docs/models.md says.

The results are compared with transformers' own log-probs of each response alone, not with lrl's.
A test run has the families of `USUAL`; `LRL_FAMILIES=all python -m pytest
tests/training/test_model_families.py` has all of the table, in about three minutes.

Covers lrl/training/model.py.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from lrl.errors import ConfigError
from lrl.training.collate import text_as_micro_batch
from lrl.training.logprobs import label_logprobs
from lrl.training.lora import LoRA, adapted_layers, adapter_tensors
from lrl.training.model import ModelSource
from lrl.training.trials import Shared, check_adapters, shared_by_responses
from lrl.types import MicroBatch
from lrl.weights.version_file import merged
from tests.policies import flat_gradient, make_group, pack
from tests.tiny_policies import FAMILIES, response_logprobs, save_tiny

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
TREES, PACKED, ALONE, REFUSED = "share prompts", "share rows", "one a row", "refused"
KINDS = (TREES, PACKED, ALONE, REFUSED, "not tried")
ROW = re.compile(rf"^\| ({'|'.join(KINDS)}) \| ([^|]*) \| (`[^|]+`) \|", re.MULTILINE)
USUAL = (
    *("afmoe", "bloom", "deepseek_v3", "doge", "falcon", "falcon_mamba", "gemma2"),
    *("gemma3", "glm4_moe", "gpt2", "gpt_oss", "gpt_neo", "jamba", "lfm2", "llama"),
    *("llama4_text", "mamba2", "mistral", "mixtral", "modernbert-decoder", "olmo2", "opt"),
    *("phi3", "qwen2", "qwen3", "qwen3_5_text", "xlnet"),
)
"""One of each kind: how it knows positions, what its layers are, how it is trained or why not."""
LENGTHS = [3, 27, 10, 41, 19, 6]
PROMPT = [7, 5, 11, 3, 9, 14, 2, 8, 6]
BUDGET = 110  # two rows of the longest response
CHEAP_ATTENTION = 10_000  # trees as large as the budget
GROUP = make_group(0, lengths=LENGTHS, prompt=PROMPT, tokens=64)
RESPONSES = [rollout.token_ids for rollout in GROUP.rollouts]


class Outcome(NamedTuple):
    """The outcome for a family."""

    responses: str
    """One of `KINDS`."""
    lora: str = ""
    """The linear layers that can have an adapter, of a family that can be trained."""


TABLE = {
    family: Outcome(responses, lora)
    for responses, lora, families in ROW.findall(PAGE.read_text())
    for family in families.strip("`").split("`, `")
}
TRIED = [
    family
    for family in (TABLE if os.environ.get("LRL_FAMILIES") == "all" else USUAL)
    if TABLE[family].responses != "not tried"
]


@pytest.mark.parametrize("family", TRIED)
def test_responses_are_trained_as_if_each_were_alone(family: str, tmp_path: Path) -> None:
    save_tiny(family, tmp_path, 4.0)
    try:
        network = ModelSource(str(tmp_path)).open()
        shared = shared_by_responses(network)
    except ConfigError:
        assert TABLE[family].responses == REFUSED
        return
    trees = shared.prefixes
    responses = TREES if trees else PACKED if shared.rows else ALONE
    assert Outcome(responses, adapters_of(tmp_path)) == TABLE[family]
    for_trees = packed_as(shared, CHEAP_ATTENTION if trees else 0)
    assert any(micro.readers_end is not None for micro in for_trees) == (trees or shared.masks)
    check_against_each_alone(network, for_trees)
    if shared.masks:  # where prompts are not shared, rows still need the mask
        check_against_each_alone(network, packed_as(shared, 0))


def adapters_of(folder: Path) -> str:
    """Returns which linear layers of a model may have adapters, for `Outcome.lora`."""
    try:
        open_with_adapters(folder)
    except ConfigError as error:
        remedy = re.search(r"Set model\.lora\.target_modules to \[(.*)\]", str(error))
        if remedy is None:
            return "none"
        right = remedy[1].split(", ")
        open_with_adapters(folder, right)
        layers = LoRA().layers(ModelSource(str(folder)).open())
        wrong = {name.rpartition(".")[2] for name in layers} - set(right)
        return "all but " + ", ".join(f"`{end}`" for end in sorted(wrong))
    return "all"


def open_with_adapters(
    folder: Path, target_modules: str | list[str] = "all-linear"
) -> PreTrainedModel:
    """Opens a model as a run with `model.lora` does."""
    network = ModelSource(str(folder)).open()
    LoRA(rank=4, target_modules=target_modules).add_to(network)
    check_adapters(network)
    return network


def packed_as(shared: Shared, attention_tokens: int) -> list[MicroBatch]:
    """Returns the micro-batches of the responses; with `attention_tokens`, as trees."""
    how = {"share_rows": shared.rows, "masks": shared.masks}
    micros = pack([GROUP], BUDGET, attention_tokens=attention_tokens, **how)
    most = max(micro.num_sequences - len(micro.input_ids) for micro in micros)
    assert most > 0 or not shared.rows
    return micros


def check_against_each_alone(network: PreTrainedModel, micros: list[MicroBatch]) -> None:
    """Compares log-probs and gradient with those of transformers for each response alone."""
    wanted = {tuple(one): response_logprobs(network, PROMPT, one) for one in RESPONSES}
    for micro in micros:
        logprobs = label_logprobs(network, micro, chunk_tokens=64)
        for number in range(micro.num_sequences):
            here = (micro.sequence_ids == number) & micro.mask
            alone = wanted[tuple(micro.labels[here].tolist())]
            torch.testing.assert_close(logprobs[here], alone, atol=2e-5, rtol=0.0)
    packed = gradient(network, lambda: sum(loss_of(network, micro) for micro in micros))
    alone = gradient(network, lambda: sum(loss_alone(network, one) for one in RESPONSES))
    assert alone.norm() > 0
    assert (packed - alone).norm() < 1e-4 * alone.norm()


@pytest.mark.parametrize("family", [name for name in TRIED if "all" in TABLE[name].lora])
def test_a_generator_that_merges_the_adapters_computes_what_the_policy_computes(
    family: str, tmp_path: Path
) -> None:
    save_tiny(family, tmp_path, 4.0)
    without = set(TABLE[family].lora.removeprefix("all but ").replace("`", "").split(", "))
    linear = LoRA().layers(ModelSource(str(tmp_path)).open())
    ends = {name.rpartition(".")[2] for name in linear} - without
    network = open_with_adapters(tmp_path, sorted(ends))
    assert {name.rpartition(".")[2] for name, _ in adapted_layers(network)} == ends
    torch.manual_seed(1)
    micro = text_as_micro_batch(list(range(5, 25)), torch.device("cpu"))
    with torch.no_grad():
        before = label_logprobs(network, micro, chunk_tokens=64)
        for name, weight in network.named_parameters():
            if ".lora_B." in name:
                weight.normal_(std=0.02)
        wanted = label_logprobs(network, micro, chunk_tokens=64)
        assert (wanted - before).abs().mean() > 1e-3, "the adapters do something"
        for file in tmp_path.glob("*.safetensors"):
            sent = dict(adapter_tensors(network))
            weights = dict(merged(load_file(file).items(), sent, torch.float32))
            whole = {name: weight.contiguous() for name, weight in weights.items()}
            save_file(whole, file, {"format": "pt"})
        again = ModelSource(str(tmp_path)).open()
        torch.testing.assert_close(
            label_logprobs(again, micro, chunk_tokens=64), wanted, atol=1e-4, rtol=0.0
        )


def test_the_table_has_every_family_of_transformers() -> None:
    assert set(TABLE) == set(FAMILIES)


def loss_alone(network: PreTrainedModel, response: list[int]) -> Tensor:
    return (weights(torch.tensor(response)) * response_logprobs(network, PROMPT, response)).sum()


def loss_of(network: PreTrainedModel, micro: MicroBatch) -> Tensor:
    return (weights(micro.labels) * label_logprobs(network, micro, chunk_tokens=64)).sum()


def weights(labels: Tensor) -> Tensor:
    """Returns a weight for each token, some negative."""
    return torch.cos(1.3 * labels)


def gradient(network: PreTrainedModel, loss: Callable[[], Tensor]) -> Tensor:
    """Returns the gradient of the loss by every weight."""
    network.zero_grad()
    loss().backward()
    return flat_gradient(network)
