"""A round trip of a state through a checkpoint."""

import io
from typing import Any

import torch


def as_file(state: dict[str, Any]) -> bytes:
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def from_file(content: bytes) -> dict[str, Any]:
    """Loads a checkpoint like Lightning; fails for anything but plain types and tensors."""
    return torch.load(io.BytesIO(content), weights_only=True)


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    return from_file(as_file(state))
