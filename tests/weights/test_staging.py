"""A version that is staged in parts is, bit for bit, the file of all its weights.

Covers lrl/weights/version_file.py.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from lrl.system.machine import memory_file
from lrl.system.ranks import Ranks
from lrl.training.pieces import piece_of
from lrl.weights import staging
from lrl.weights.staging import StageOrder
from lrl.weights.version_file import Header, check_file, spec_of
from tests.weights.whole_weights import WholeWeights

Weights = dict[str, Tensor]

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.uint8]
shapes = st.lists(st.integers(0, 9), max_size=3)
models = st.lists(st.tuples(shapes, st.sampled_from(DTYPES)), min_size=1, max_size=6)


def weights_of(model: list[tuple[list[int], torch.dtype]], seed: int = 0) -> Weights:
    torch.manual_seed(seed)
    return {
        f"tensor.{number}": torch.randint(0, 100, shape).to(dtype)
        for number, (shape, dtype) in enumerate(model)
    }


def staged(weights: Weights, file: Path, ranks: int = 1) -> Header:
    """Stages into a new file by as many ranks, and returns its header."""
    file.touch()
    with closing(WholeWeights(weights.items, ranks)) as policy:
        return policy.stage_weights(StageOrder("pool", None, str(file)))


def holds(file: Path, weights: Weights, header: Header) -> bool:
    check_file(file, header.checksum)
    found = load_file(file)
    return found.keys() == weights.keys() and all(
        torch.equal(found[name], weight) and found[name].dtype is weight.dtype
        for name, weight in weights.items()
    )


def assemble(policy: WholeWeights, header: Header, file: Path) -> None:
    """Puts the parts of all ranks into a file, as a generator does."""
    with file.open("w+b") as out:
        out.write(header.text)
        out.truncate(header.size)
        for blocks, one in zip(header.parts, policy.all, strict=True):
            for block in blocks:
                block.write(out.fileno(), one.staging.parts["pool"].read(block.index))


@given(model=models, ranks=st.integers(1, 4))
def test_the_parts_of_all_ranks_make_the_file_that_one_rank_would_stage(
    model: list[tuple[list[int], torch.dtype]], ranks: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("staged")
    weights = weights_of(model)
    one = staged(weights, folder / "one")
    assert holds(folder / "file", weights, staged(weights, folder / "file", ranks))
    with closing(WholeWeights(weights.items, ranks)) as policy:
        header = policy.stage_weights(StageOrder("pool", None))
        assemble(policy, header, folder / "all")
    assert holds(folder / "all", weights, header)
    if ranks == 1:
        assert (folder / "one").read_bytes() == (folder / "all").read_bytes()
    assert one.size - len(one.text) == header.size - len(header.text)


def test_a_rank_that_has_the_weights_in_another_order_writes_the_same_file(tmp_path: Path) -> None:
    weights = weights_of([([9, 4], torch.float32), ([8, 3], torch.bfloat16), ([7], torch.int64)])
    file = tmp_path / "weights"
    file.touch()
    with closing(WholeWeights(weights.items, 3)) as policy:
        for one in policy.all[1:]:
            one.weights = dict(reversed(weights.items())).items
        assert holds(file, weights, policy.stage_weights(StageOrder("pool", None, str(file))))


def test_two_pools_have_parts_of_their_own_with_differences_from_their_own_versions() -> None:
    weights = weights_of([([9, 4], torch.float32)])
    with closing(WholeWeights(weights.items)) as policy:
        for _ in range(2):
            for pool in ("rollouts", "evaluation"):
                policy.stage_weights(StageOrder(pool, None))
            weights["tensor.0"] += 1
        one, other = (part.header.checksum for part in policy.staging.parts.values())
    assert one != other


def test_every_version_has_its_bytes_at_the_same_places(tmp_path: Path) -> None:
    model = [([300, 40], torch.float32), ([7], torch.bfloat16)]
    headers = [staged(weights_of(model, seed), tmp_path / str(seed), 3) for seed in range(2)]
    assert len(headers[0].text) == len(headers[1].text) and headers[0] != headers[1]
    one, other = ([block.ranges for part in each.parts for block in part] for each in headers)
    assert one == other


@pytest.mark.parametrize("place", [20, -1, 5000])
def test_one_flipped_bit_is_seen_wherever_it_is(place: int, tmp_path: Path) -> None:
    file = tmp_path / "weights"
    header = staged(weights_of([([300, 40], torch.float32)]), file, 2)
    content = bytearray(file.read_bytes())
    content[place] ^= 4
    file.write_bytes(content)
    with pytest.raises(ValueError, match="damaged|checksum"):
        check_file(file, header.checksum)


def test_a_rank_without_room_fails_the_stage_on_rank_0_alone_and_the_next_one_succeeds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weights, order = weights_of([([300, 40], torch.float32)]), StageOrder("pool", None)
    full = [True]

    def create(name: str) -> int:
        if full:
            raise OSError("Cannot allocate memory")
        return memory_file(name)

    monkeypatch.setattr(staging, "memory_file", create)
    why = "Cannot allocate memory"
    with closing(WholeWeights(weights.items, 2)) as policy:
        with pytest.raises(OSError, match=f"^rank 0: {why}; rank 1: {why}$"):
            policy.stage_weights(order)
        assert not any(one.done() for one in policy._threads), "an error would end the rank"
        full.clear()
        policy.stage_weights(order)
        assert all(one.staging.parts.keys() == {"pool"} for one in policy.all)


HALF, FULL, LONG = torch.bfloat16, torch.float32, torch.int64


@pytest.mark.parametrize(
    ("shape", "policy", "generator", "travels"),
    [
        ([3, 5], FULL, HALF, HALF),
        ([3, 5], HALF, FULL, HALF),
        ([3, 5], FULL, None, FULL),
        ([9], FULL, HALF, FULL),
        ([1, 1], LONG, HALF, LONG),
    ],
)
def test_a_matrix_of_floats_travels_in_the_narrower_format_and_all_else_as_it_is(
    shape: list[int], policy: torch.dtype, generator: torch.dtype | None, travels: torch.dtype
) -> None:
    piece = piece_of("w", torch.ones(shape, dtype=policy), Ranks())
    assert spec_of(piece, generator) == ("w", travels, tuple(shape))
