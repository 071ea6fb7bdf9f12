"""What a checkpoint gives back of a state."""

import io
from typing import Any

import torch


def as_file(state: dict[str, Any]) -> bytes:
    """`state` as a checkpoint holds it."""
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def from_file(content: bytes) -> dict[str, Any]:
    """What is loaded again, as Lightning does it; fails for anything but plain types and tensors."""
    return torch.load(io.BytesIO(content), weights_only=True)


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    """`state`, saved and loaded."""
    return from_file(as_file(state))
