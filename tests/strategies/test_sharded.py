"""Policies that are divided over ranks, as copies or sharded (FSDP2): their gradient, log-probs and
weights are those of one process. The file that generators assemble from the parts of all ranks is
the one that rank 0 would stage.

Covers lrl/strategies/fsdp.py, lrl/training/sharding.py, lrl/training/pieces.py.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lrl.errors import ConfigError
from lrl.training.beside.reference import Reference
from lrl.training.model import ModelSource
from lrl.training.pieces import Piece, whole_tensors
from lrl.training.sharding import tensor_parallel_plan
from lrl.weights.version_file import Header, check_file, spec_of
from tests.policies import gradient, opened, pack
from tests.policies import sizes as passes
from tests.strategies import step_of_ranks
from tests.strategies.forked_ranks import run_ranks
from tests.strategies.step_of_ranks import (
    ADAPTED,
    BUDGET,
    GROUPS,
    LONE,
    LORA,
    MIXTURE,
    OF_CRITICS,
    UNDIVIDED,
    advantages_of,
    critic_of,
    fill_new_weights,
    read,
    target_of,
)
from tests.tiny_policies import save_tiny

LLAMA3 = {"rope_type": "llama3", "rope_theta": 10_000.0, "factor": 8.0, "low_freq_factor": 1.0}
LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 32}
ODD = {"vocab_size": 33, "intermediate_size": 30, "hidden_size": 6, "head_dim": 2}
ODD |= {"num_attention_heads": 2, "num_key_value_heads": 2}
CONFIGS: dict[str, Any] = {
    "llama3_rope": {"family": "llama", "rope_parameters": LLAMA3},
    "llama_tied": {"family": "llama", "tie_word_embeddings": True},
    "qwen2": {"family": "qwen2"},
    OF_CRITICS: {"family": "qwen3"},
    "gemma2": {"family": "gemma2", "tie_word_embeddings": True},
    "qwen3_moe": {"family": "qwen3_moe"},
    "phi3": {"family": "phi3"},
    "llama_bf16": {"family": "llama"},
    ADAPTED: {"family": "llama"},
    "odd": {"family": "qwen3", **ODD},
}
"""Architectures with what may be divided wrongly: tied heads, biases, norms of heads, caps, experts,
packed projections, scaled positions, dimensions that no number of ranks divides. One computes in
bfloat16."""


DIVISIONS: dict[str, dict[str, int]] = {
    "copies": {},
    "two_shards_offloaded": {"shards": 2},
    "four_shards": {"shards": 4},
    "replicas_of_shards": {"replicas": 2, "shards": 2},
    "shards_and_tensor_parallelism": {"shards": 2, "tensor": 2},
    "replicas_and_tensor_parallelism": {"replicas": 2, "shards": 1, "tensor": 2},
}
"""The sizes of the mesh; of copies there are three."""
OF_ALL = ("two_shards_offloaded", "shards_and_tensor_parallelism")
"""Where all policies are divided; elsewhere those of `SOME`."""
SOME = ("llama_tied", MIXTURE, ADAPTED, "odd")
CASES = [
    (division, name)
    for division, sizes in DIVISIONS.items()
    for name in (CONFIGS if division in OF_ALL else SOME)
    if name != OF_CRITICS and ("tensor" not in sizes or name not in UNDIVIDED)
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name, config in CONFIGS.items():
        save_tiny(folder=folder / name, **config)
    return folder


@pytest.fixture(scope="module")
def results(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Has all ranks of a division do what is looked at, once."""

    @functools.cache
    def run(division: str) -> Path:
        folder, sizes = tmp_path_factory.mktemp(division), DIVISIONS[division]
        chosen = [name for one, name in CASES if one == division]
        offload = division.endswith("offloaded")
        run_ranks(
            *(step_of_ranks.main, math.prod(sizes.values()) if sizes else 3, folder),
            *(models, folder, chosen, sizes, offload),
        )
        return folder

    return run


@pytest.fixture(scope="module")
def alone(models: Path) -> Callable[..., dict[str, Any]]:
    """What one process finds."""

    @functools.cache
    def run(name: str, has_critic: bool) -> dict[str, Any]:
        policy: Any = opened(
            str(models / name),
            lora=LORA if name == ADAPTED else None,
            reference=Reference(),
            critic=critic_of(models / name, 1) if has_critic else None,
        )
        policy.setup("fit")
        fill_new_weights(policy)
        found = read(policy)
        groups = copy.deepcopy([*GROUPS, LONE])
        for group in groups if has_critic else ():
            policy.prepare(group, passes(BUDGET))
        batches = pack(groups, BUDGET, advantages=advantages_of(policy))
        found["gradient"] = gradient(policy, batches)
        found["target"] = target_of(policy)
        found["network"] = dict(whole_tensors(policy.network))
        found["trained"] = [key for key, one in policy.named_parameters() if one.requires_grad]
        return found

    return run


@dataclass
class Case:
    """What the ranks of a division have done with a policy."""

    name: str
    folder: Path
    sizes: dict[str, int]

    @functools.cached_property
    def ranks(self) -> list[dict[str, Any]]:
        files = sorted(self.folder.glob(f"{self.name}-?.pt"))
        return [torch.load(file) for file in files]

    @functools.cached_property
    def staged(self) -> dict[str, torch.Tensor]:
        """The staged file."""
        return load_file(self.folder / f"{self.name}.safetensors")


@pytest.fixture(params=CASES, ids="-".join)
def case(request: pytest.FixtureRequest, results: Callable[[str], Path]) -> Case:
    division, name = request.param
    return Case(name, results(division), DIVISIONS[division])


def test_a_divided_policy_equals_the_policy_of_one_process(
    case: Case, alone: Callable[..., dict[str, Any]]
) -> None:
    first, *others = case.ranks
    one = alone(case.name, first["critic"])
    in_bfloat16 = case.name.endswith("bf16")
    off = 0.05 if in_bfloat16 else 1e-5
    assert first["logprobs"] == pytest.approx(one["logprobs"], abs=off)
    assert (first["logprobs"] != one["logprobs"]) or not in_bfloat16
    assert first["rounded"] != first["logprobs"] == pytest.approx(first["rounded"], abs=1.0)
    assert first["held"] == pytest.approx(one["held"], abs=off)
    assert (first["held"] == first["logprobs"]) == in_bfloat16, "rounded once is rounded"
    assert first["afterwards"] == first["logprobs"], "the weights are whole again"
    for found, expected in zip(first["reference"], one["reference"], strict=True):
        assert found == pytest.approx(expected, abs=off)
    assert first["weights"].keys() == one["weights"].keys()
    assert all(weight.equal(one["weights"][key]) for key, weight in first["weights"].items())
    exported = ModelSource(str(case.folder / f"{case.name}-exported")).open().state_dict()
    assert all(exported[key].equal(weight) for key, weight in one["network"].items())
    assert one["gradient"].abs().max() > 0.001
    torch.testing.assert_close(first["target"], one["target"])
    for rank in case.ranks:
        whole = torch.cat([rank["gradient"][key].flatten() for key in one["trained"]])
        if in_bfloat16:
            assert whole.dtype == torch.float32
            assert (whole - one["gradient"]).norm() < 0.05 * one["gradient"].norm()
        else:
            torch.testing.assert_close(whole, one["gradient"], atol=1e-6, rtol=1e-4)


def test_ranks_share_weights_and_work(case: Case) -> None:
    """Ranks of copies have as many passes as they get; of shards all have equally many, and those
    that divide each layer's computation the same."""
    assert all(rank["passes"] > 1 for rank in case.ranks)
    sequences = sum(len(group.rollouts) for group in GROUPS) + 1
    assert [rank["sequences"] for rank in case.ranks] == [sequences] * len(case.ranks)
    if not case.sizes:
        assert [rank["share"] for rank in case.ranks] == [1.0] * 3
        return
    tensor = case.sizes.get("tensor", 1)
    apart = case.ranks[::tensor]
    assert len({rank["passes"] for rank in case.ranks}) == 1
    assert sum(rank["blanks"] for rank in apart) >= len(apart) - 1 > 0
    assert len(apart) > 2 or sum(rank["blanks"] for rank in apart) == 1
    assert [rank["blanks"] for rank in apart] == [
        rank["blanks"] for rank in case.ranks[tensor - 1 :: tensor]
    ]
    assert all(rank["share"] < 1.4 / tensor / case.sizes["shards"] for rank in case.ranks)


def test_a_mixture_with_tensor_parallelism_is_refused(models: Path) -> None:
    with pytest.raises(ConfigError, match="tensor_parallel_size is 2, .*moe_tp_experts"):
        tensor_parallel_plan(opened(str(models / MIXTURE)).network, 2)


def test_the_staged_file_has_the_weights_that_rank_0_gathers(case: Case) -> None:
    gathered = case.ranks[0]["of_file"]
    assert case.staged.keys() == gathered.keys()
    assert all(torch.equal(case.staged[key], weight) for key, weight in gathered.items())


def test_a_worker_receives_the_weights_of_all_ranks_in_its_format(case: Case) -> None:
    """Adapters are merged, and rounded as in the whole weight."""
    received, sent = case.ranks[0]["received"], case.ranks[0]["sent"]
    assert received.keys() == sent.keys()
    for name, weight in sent.items():
        others = (received[name] != in_format(name, weight)).float().mean()
        # A product of some rows may differ from that of all in its last bit, and so one in
        # thousands of draws.
        assert others <= (0.01 if case.name == ADAPTED else 0), name


def test_the_parts_in_the_ranks_memory_make_a_file_in_the_generators_format(
    case: Case, tmp_path: Path
) -> None:
    assert len({rank["header"] for rank in case.ranks}) == 1, "all ranks know the same version"
    header, file = Header(case.ranks[0]["header"]), tmp_path / "made.safetensors"
    with file.open("w+b") as out:
        out.write(header.text)
        out.truncate(header.size)
        for blocks, rank in zip(header.parts, case.ranks, strict=True):
            for block, content in zip(blocks, rank["blocks"], strict=True):
                block.write(out.fileno(), content)
    check_file(file, header.checksum)
    made = load_file(file)
    assert all(made[key].equal(in_format(key, weight)) for key, weight in case.staged.items())


def test_no_rank_stages_much_more_than_its_share(case: Case) -> None:
    sizes = [sum(map(len, rank["blocks"])) for rank in case.ranks]
    # Experts of a layer are staged by one rank, and the tiny model has two layers.
    assert max(sizes) <= sum(sizes) * (0.7 if case.name == MIXTURE else 1.3 / len(sizes))


def in_format(name: str, weight: torch.Tensor) -> torch.Tensor:
    """A weight in the dtype that a generator in bfloat16 has it in."""
    return weight.to(spec_of(Piece(name, weight.shape, 0, weight), torch.bfloat16).dtype)


@pytest.mark.parametrize(
    ("family", "size", "text"),
    [
        ("gpt2", 2, "no plan to divide"),
        ("llama", 4, "does not divide the model's num_key_value_heads 2"),
    ],
)
def test_a_model_that_tensor_parallelism_cannot_divide_is_refused(
    family: str, size: int, text: str, tmp_path: Path
) -> None:
    network = opened(save_tiny(family, tmp_path)).network
    with pytest.raises(ConfigError, match=f"strategy.tensor_parallel_size is {size}, .*{text}"):
        tensor_parallel_plan(network, size)
