"""The memory that training takes, over its shards."""

from __future__ import annotations

import pytest

from lrl.planning.planner import memory
from tests.planning.shapes import LLAMA_8B, QWEN_1_5B, shape


def test_training_holds_sixteen_bytes_a_parameter_over_all_its_shards() -> None:
    eight_b = shape(LLAMA_8B)
    assert memory.training(eight_b, 1, 1).fixed == pytest.approx(16 * eight_b.parameters, rel=0.02)
    spread = memory.training(eight_b, 1024, 1), memory.training(eight_b, 512, 1)
    assert spread[1].fixed - spread[0].fixed == pytest.approx(16 * eight_b.parameters / 1024)


def test_tensor_parallelism_splits_the_memory_of_tokens() -> None:
    whole, half = (memory.training(shape(QWEN_1_5B), 8, tp).per_token for tp in (1, 2))
    assert half == whole / 2
