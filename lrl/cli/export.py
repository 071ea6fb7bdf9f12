"""`lrl export`: the policy of a checkpoint in Hugging Face format, which transformers and vLLM open.

A run exports its last policy by itself (`lrl.callbacks.Export`). This is for any earlier step of
it, and for a run that has ended in the middle.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lrl.rollouts.policy_text import save_form
from lrl.system.imports import quick_imports

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from lrl.training.lora import LoRA

PREFIX = "network."
"""What the names of the policy's weights begin with in a checkpoint."""


def main(argv: Sequence[str]) -> int:
    """Runs `lrl export`; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="lrl export", description="Write the policy of a checkpoint in Hugging Face format."
    )
    add = parser.add_argument
    add("checkpoint", type=Path, help="a checkpoint of a run: a .ckpt file or folder")
    add("folder", type=Path, help="where to write the policy, with its tokenizer")
    add("--model", help="folder or hub name of the run's model.model, if it was moved since")
    args = parser.parse_args(argv)
    steps = export(args.checkpoint, args.folder, args.model)
    chat = f"lrl chat {shlex.quote(str(args.folder))}"
    sys.stdout.write(f"The policy after {steps} steps is in {args.folder}: {chat}\n")
    return 0


def export(checkpoint: Path, folder: Path, model: str | None = None) -> int:
    """Writes the policy of a checkpoint, with its tokenizer and adapters merged; returns the steps it
    has done. `model` is what the run began with, if that was moved."""
    with quick_imports():
        from lrl.training.export import save_policy
        from lrl.training.lora import adapter_tensors
        from lrl.training.model import open_tokenizer
        from lrl.training.pieces import whole_tensors

    state, found = read(checkpoint, folder)
    if (base := model or state.get("policy_folder")) is None:
        raise ValueError(
            f"{checkpoint} does not name its model: give the run's model.model as --model."
        )
    other = f"{checkpoint} is of another model than {base}"
    network, lora = _policy(state, found, base, other)
    save_policy(
        network,
        dict(whole_tensors(network)),
        open_tokenizer(base),
        base=base,
        folder=folder,
        lora=lora,
        adapters=dict(adapter_tensors(network)),
    )
    save_form(state.get("prompt_form", {}), folder)  # an older checkpoint lacks it
    return int(state["global_step"])


def _policy(
    state: Mapping[str, Any], found: Mapping[str, Tensor], base: str, other: str
) -> tuple[PreTrainedModel, LoRA | None]:
    """Returns the policy's model with its weights, and the kind of its adapters; raises ValueError,
    beginning with `other`, if a weight is missing or of another shape."""
    from lrl.training.lora import LoRA, is_adapter
    from lrl.training.model import ModelSource, open_meta_model
    from lrl.training.pieces import unique_tensors

    lora = LoRA(**state["lora"]) if "lora" in state else None
    if lora is None:
        network = open_meta_model(base, None)
    else:
        network = ModelSource(base, state["dtype"]).open()
        lora.add_to(network)
    for name, weight in unique_tensors(network):
        if lora is not None and not is_adapter(name):
            continue
        if name not in found or found[name].shape != weight.shape:
            shape = list(found[name].shape) if name in found else "none"
            raise ValueError(
                f"{other}: {name} is {shape} in it and {list(weight.shape)} there. Give its "
                "model.model as --model."
            )
    network.load_state_dict(found, strict=False, assign=True)
    network.tie_weights()
    return network, lora


def read(checkpoint: Path, folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Returns a checkpoint and its policy's weights, on the CPU, if `folder` is new or empty."""
    import torch

    from lrl.checkpoints.checkpoint_file import READ_ERRORS
    from lrl.checkpoints.checkpoint_folder import META, is_checkpoint_folder, read_weights

    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} holds something already: give a new folder.")
    in_parts = is_checkpoint_folder(checkpoint)
    try:
        file = checkpoint / META if in_parts else checkpoint
        state: Any = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        weights = read_weights(checkpoint) if in_parts else state.pop("state_dict")
        found = {
            name.removeprefix(PREFIX): weight
            for name, weight in weights.items()
            if name.startswith(PREFIX)
        }
        if not found:
            raise KeyError(f"{PREFIX}*")
    except READ_ERRORS as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(
            f"{checkpoint} is no checkpoint of an lrl run ({reason:.200}): give another."
        ) from error
    return state, found
