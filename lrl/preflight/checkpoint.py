"""Checks of the checkpoint that a run resumes: there, and of this model, this data and this
strategy."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lrl.checkpoints.checkpoint_file import READ_ERRORS
from lrl.checkpoints.checkpoint_folder import META, is_checkpoint_folder, shapes
from lrl.errors import ConfigError
from lrl.rollouts.ledger import Ledger

if TYPE_CHECKING:
    from lrl.datamodule import RolloutDataModule
    from lrl.preflight.model import Shape
    from lrl.run import Run

WORDS = ("last", "best", "hpc")
"""What Lightning resolves itself."""


def check_checkpoint(run: Run, ckpt_path: str, shape: Shape) -> None:
    """Checks that the checkpoint can be read, and is one of this run; not of one at an address."""
    if "://" in ckpt_path or ckpt_path in WORDS or ckpt_path.startswith("registry"):
        return
    path = Path(ckpt_path)
    in_parts = is_checkpoint_folder(path)
    if not path.exists() or (path.is_dir() and not in_parts):
        raise ConfigError(f"--ckpt_path {ckpt_path!r}: there is no checkpoint.")
    if in_parts and not run.strategy.resumes_parts:
        raise ConfigError(
            f"--ckpt_path {ckpt_path!r} is a folder of parts, which only lrl.AsyncFSDP resumes. "
            "Train with that, or begin anew with the policy in it (`lrl export`)."
        )
    try:
        file = path / META if in_parts else path
        state: Any = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        sizes = (
            shapes(path)
            if in_parts
            else {name: weight.shape for name, weight in state["state_dict"].items()}
        )
        found = {name.removeprefix("network."): tuple(size) for name, size in sizes.items()}
    except READ_ERRORS as error:
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"--ckpt_path {ckpt_path!r} is no checkpoint that can be read ({reason:.200})."
        ) from error
    for name, size in shape.trained.items():
        if found.get(name) != size:
            raise ConfigError(
                f"--ckpt_path {ckpt_path!r} is of another model than "
                f"model.model={run.policy.model!r}: {name} is {list(found.get(name, ()))} in it "
                f"and {list(size)} here. Resume with the model, and the model.lora, it was made "
                "with."
            )
    if run.data.trains:
        _check_progress(ckpt_path, state, run.data)


def _check_progress(ckpt_path: str, state: dict[str, Any], data: RolloutDataModule) -> None:
    name = type(data).__qualname__
    if name not in state:
        raise ConfigError(
            f"--ckpt_path {ckpt_path!r} has no state of {name}: it is not of a run with this data "
            "module."
        )
    ledger = state[name]["ledger"]
    if data.prompts.loaded and ledger is not None:
        Ledger(data.pacing).load_state_dict(ledger, data.prompts.__getitem__)
        data.check_prompts(ledger)
