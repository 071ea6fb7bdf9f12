"""Models of the tests of training."""

from __future__ import annotations

import pytest

from tests.tiny_policies import save_tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny("llama", tmp_path_factory.mktemp("llama"), initializer_range=0.3)


@pytest.fixture(scope="module")
def alike_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of the same architecture, with other weights."""
    return save_tiny("llama", tmp_path_factory.mktemp("alike"), initializer_range=0.2)


@pytest.fixture(scope="module")
def other_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    sizes = {"hidden_size": 48, "initializer_range": 0.3}
    return save_tiny("llama", tmp_path_factory.mktemp("other"), **sizes)
