"""Models of the tests of training."""

from __future__ import annotations

import pytest
from transformers import LlamaConfig

from tests.policies import SIZES, save_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("llama"), LlamaConfig(**SIZES, initializer_range=0.3))


@pytest.fixture(scope="module")
def alike_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of the same architecture, with other weights."""
    return save_model(tmp_path_factory.mktemp("alike"), LlamaConfig(**SIZES, initializer_range=0.2))


@pytest.fixture(scope="module")
def other_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    sizes = SIZES | {"hidden_size": 48}
    return save_model(tmp_path_factory.mktemp("other"), LlamaConfig(**sizes, initializer_range=0.3))
