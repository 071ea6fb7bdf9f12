"""Checks of the checkpoint that a run resumes: there, readable, and of this model, this data and
these steps."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lrl.checkpoints.checkpoint_folder import META, is_checkpoint_folder, shapes
from lrl.checkpoints.read_errors import READ_ERRORS
from lrl.rollouts.ledger import Ledger
from lrl.system.config_errors import fault, noting

if TYPE_CHECKING:
    from lrl.datamodule import RolloutDataModule
    from lrl.preflight.model_folder import Shape
    from lrl.preflight.policy import Policy

log = logging.getLogger(__name__)


def local(ckpt_path: str | None) -> Path | None:
    """Returns the file or folder of `ckpt_path`; None for Lightning's words (`last`, `best`) and
    for addresses."""
    words = ("last", "best", "hpc")
    if (
        ckpt_path is None
        or "://" in ckpt_path
        or ckpt_path in words
        or ckpt_path.startswith("registry")
    ):
        return None
    return Path(ckpt_path)


def check_checkpoint_path(ckpt_path: str | None, resumes_parts: bool) -> None:
    """Checks that the path exists, and that the strategy reads such a checkpoint."""
    path = local(ckpt_path)
    if path is None:
        return
    if not path.exists():
        nearby = sorted(str(found.name) for found in path.parent.glob("*.ckpt"))[:3]
        there = f" In its folder: {', '.join(nearby)}." if nearby else ""
        fault(
            f"--ckpt_path {ckpt_path!r}: there is no such file.{there} Give a checkpoint of "
            "`trainer`, or leave it out."
        )
    elif path.is_dir() and not is_checkpoint_folder(path):
        fault(
            f"--ckpt_path {ckpt_path!r} is a folder without a checkpoint in it: give a checkpoint "
            "of `trainer`."
        )
    elif path.is_dir() and not resumes_parts:
        fault(
            f"--ckpt_path {ckpt_path!r} is a folder of parts, which only lrl.AsyncFSDP resumes. "
            "Train with that, or begin anew with the policy in it (`lrl export`)."
        )


def check_checkpoint_contents(
    ckpt_path: str | None, policy: Policy, data: RolloutDataModule, shape: Shape
) -> None:
    """Checks that the checkpoint is one of this run, and that the strategy can read it."""
    path = local(ckpt_path)
    if path is None or not path.exists():
        return
    in_parts = is_checkpoint_folder(path)
    if path.is_dir() and not in_parts:
        return  # `check_checkpoint_path` has noted it
    try:
        state: Any = torch.load(
            path / META if in_parts else path, map_location="cpu", weights_only=True, mmap=True
        )
        sizes = (
            shapes(path)
            if in_parts
            else {name: weight.shape for name, weight in state["state_dict"].items()}
        )
        found = {name.removeprefix("network."): tuple(size) for name, size in sizes.items()}
    except READ_ERRORS as error:
        reason = " ".join(str(error).split())
        fault(
            f"--ckpt_path {ckpt_path!r} is no checkpoint that can be read ({reason:.200}): give "
            "another."
        )
        return
    if other := next(
        (name for name, size in shape.trained.items() if found.get(name) != size), None
    ):
        fault(
            f"--ckpt_path {ckpt_path!r} is of another model than model.model={policy.model!r}: "
            f"{other} is {list(found[other]) if other in found else 'none'} in it and "
            f"{list(shape.trained[other])} here. Resume with the model, and the model.lora, it was "
            "made with."
        )
    if data.trains:
        _check_progress(str(ckpt_path), state, data)


def _check_progress(ckpt_path: str, state: dict[str, Any], data: RolloutDataModule) -> None:
    name, trainer = type(data).__qualname__, data.trainer
    if name not in state:
        fault(
            f"--ckpt_path {ckpt_path!r} has no state of {name}: it is not of a run with this data "
            "module. Give another."
        )
    elif data.prompts.loaded and state[name]["ledger"] is not None:
        with noting():
            ledger = state[name]["ledger"]
            Ledger(data.pacing).load_state_dict(ledger, data.prompts.__getitem__)
            data.check_prompts(ledger)
    if trainer is not None and 0 < trainer.max_steps <= state.get("global_step", 0):
        log.warning(
            "--ckpt_path is at step %d and trainer.max_steps is %d: nothing is left to train.",
            *(state["global_step"], trainer.max_steps),
        )
