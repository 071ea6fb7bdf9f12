"""The file that generators assemble from the parts of all ranks is the one that rank 0 would stage,
however the policy is divided.

Covers lrl/training/pieces.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from lrl.training.pieces import Piece
from lrl.weights.version_file import Header, check_file, spec_of
from tests.policies import SIZES, save_model
from tests.strategies import staged_parts
from tests.strategies.forked_ranks import run_ranks
from tests.strategies.test_sharded import configs

DIVISIONS = {
    "copies": {},
    "two_shards_offloaded": {"shards": 2},
    "four_shards": {"shards": 4},
    "replicas_of_shards": {"replicas": 2, "shards": 2},
    "shards_and_tensor_parallelism": {"shards": 2, "tensor": 2},
    "replicas_and_tensor_parallelism": {"replicas": 2, "shards": 1, "tensor": 2},
}
RANKS = {"copies": 3, "two_shards_offloaded": 2}
"""Four, where not said."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tied heads, biases, norms of heads, experts, packed projections, adapters, and dimensions that
    no number of ranks divides."""
    folder = tmp_path_factory.mktemp("models")
    odd = SIZES | {"vocab_size": 33, "intermediate_size": 30}
    odd |= {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 2, "hidden_size": 6}
    known = configs()
    chosen = ["llama_tied", "qwen2", "qwen3_moe", "phi3", "llama_lora"]
    for name in chosen:
        save_model(folder / name, known[name])
    save_model(folder / "odd", transformers.Qwen3Config(**odd))
    return folder


@pytest.fixture(scope="module", params=DIVISIONS)
def staged(
    request: pytest.FixtureRequest, models: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, int]:
    folder, ranks = tmp_path_factory.mktemp("staged"), RANKS.get(request.param, 4)
    offload = request.param.endswith("offloaded")
    run_ranks(staged_parts.main, ranks, folder, models, folder, DIVISIONS[request.param], offload)
    return folder, ranks


def test_the_staged_file_has_the_weights_that_rank_0_gathers(staged: tuple[Path, int]) -> None:
    folder, ranks = staged
    found = sorted(folder.glob("*.safetensors"))
    assert len(found) >= 3
    for file in found:
        weights, tensors = torch.load(folder / f"{file.stem}-file.pt"), load_file(file)
        assert tensors.keys() == weights.keys()
        assert all(torch.equal(tensors[name], weight) for name, weight in weights.items())


def test_a_worker_receives_the_weights_of_all_ranks_in_its_format(staged: tuple[Path, int]) -> None:
    """Adapters are merged, and rounded as in the whole weight."""
    folder, _ = staged
    found = sorted(folder.glob("*-worker.pt"))
    assert len(found) >= 3
    for file in found:
        received = torch.load(file)
        weights = torch.load(folder / f"{file.stem.removesuffix('-worker')}-sent.pt")
        assert received.keys() == weights.keys()
        for name, weight in weights.items():
            dtype = spec_of(Piece(name, weight.shape, 0, weight), torch.bfloat16).dtype
            others = (received[name] != weight.to(dtype)).float().mean()
            # A product of some rows may differ from that of all in its last bit, and so one in
            # thousands of draws.
            assert others <= (0.01 if "lora" in file.stem else 0), name


def test_the_parts_in_the_ranks_memory_make_a_file_in_the_generators_format(
    staged: tuple[Path, int], tmp_path: Path
) -> None:
    folder, ranks = staged
    for reference in sorted(folder.glob("*.safetensors")):
        parts = [torch.load(folder / f"{reference.stem}-{rank}.pt") for rank in range(ranks)]
        assert len({text for text, _ in parts}) == 1, "all ranks know the same version"
        header = Header(parts[0][0])
        file = tmp_path / reference.name
        with file.open("w+b") as out:
            out.write(header.text)
            out.truncate(header.size)
            for blocks, (_, contents) in zip(header.parts, parts, strict=True):
                for block, content in zip(blocks, contents, strict=True):
                    block.write(out.fileno(), content)
        check_file(file, header.checksum)
        found = load_file(file)
        for name, weight in load_file(reference).items():
            dtype = spec_of(Piece(name, weight.shape, 0, weight), torch.bfloat16).dtype
            assert torch.equal(found[name], weight.to(dtype)), name


def test_no_rank_stages_much_more_than_its_share(staged: tuple[Path, int]) -> None:
    folder, ranks = staged
    for reference in sorted(folder.glob("*.safetensors")):
        sizes = [
            sum(map(len, torch.load(folder / f"{reference.stem}-{rank}.pt")[1]))
            for rank in range(ranks)
        ]
        # Experts of a layer are staged by one rank, and the tiny model has two layers.
        assert max(sizes) <= sum(sizes) * (0.7 if "moe" in reference.stem else 1.3 / ranks)
