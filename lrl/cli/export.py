"""`lrl export`: the policy of a checkpoint in Hugging Face format, which transformers and vLLM
open; or its critic.

A run exports its last policy by itself (`lrl.callbacks.Export`). This is for any earlier step of
it, for a run that has ended in the middle, and for the critic.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lrl.rollouts import chat_template
from lrl.system.imports import quick_imports

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from lrl.training.lora import LoRA

PREFIX = "network."
TRUNK, HEAD = "critic.trunk.", "critic.head."
"""What the names of the policy's and of the critic's weights begin with in a checkpoint."""


def main(argv: Sequence[str]) -> int:
    """Runs `lrl export`; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="lrl export",
        description="Write the policy of a checkpoint, or its critic, in Hugging Face format.",
    )
    add = parser.add_argument
    add("checkpoint", type=Path, help="a checkpoint of a run: a .ckpt file or folder")
    add("folder", type=Path, help="where to write the policy, with its tokenizer")
    model = (
        "folder or hub name of the run's model.model, if it was moved since; with --critic that of "
        "model.critic.model, if there is one"
    )
    add("--model", help=model)
    critic = "a model for token classification, whose one number for a token is the value behind it"
    add("--critic", action="store_true", help=f"write the critic: {critic}")
    args = parser.parse_args(argv)
    write = export_critic if args.critic else export
    steps = write(args.checkpoint, args.folder, args.model)
    what = "critic" if args.critic else "policy"
    chat = "." if args.critic else f": lrl chat {shlex.quote(str(args.folder))}"
    sys.stdout.write(f"The {what} after {steps} steps is in {args.folder}{chat}\n")
    return 0


def export(checkpoint: Path, folder: Path, model: str | None = None) -> int:
    """Writes the policy of a checkpoint, with its tokenizer; returns the steps it has done.

    Adapters are merged into it, and also stand alone in its folder `adapter`, in peft's format.
    `model` is what the run began with, if that was moved.
    """
    with quick_imports():
        from lrl.training.export import save_policy
        from lrl.training.lora import whole_adapters
        from lrl.training.model import open_tokenizer

    state, weights = read(checkpoint, folder)
    base = _base(checkpoint, model or state.get("policy_folder"))
    network, whole, lora = _policy(checkpoint, state, weights, base)
    save_policy(
        network,
        whole,
        open_tokenizer(base),
        base=base,
        folder=folder,
        lora=lora,
        adapters=() if lora is None else whole_adapters(network),
    )
    chat_template.save_form(state.get("prompt_form", {}), folder)  # an older checkpoint lacks it
    return int(state["global_step"])


def export_critic(checkpoint: Path, folder: Path, model: str | None = None) -> int:
    """Writes the critic of a checkpoint, with the tokenizer; returns the steps it has done. `model`
    is its own, or the policy's for a head on it, if that was moved."""
    with quick_imports():
        from lrl.training.export import save_critic
        from lrl.training.model import decoder_of, open_meta_model, open_tokenizer, unique_tensors

    state, weights = read(checkpoint, folder)
    if not (head := _named(weights, HEAD)):
        raise ValueError(f"{checkpoint} has no critic: its run had no model.critic.")
    base = _base(checkpoint, model or state.get("critic_folder") or state.get("policy_folder"))
    if "critic_folder" in state:
        decoder = decoder_of(open_meta_model(base, None))
        trunk = _named(weights, TRUNK)
        expected = dict(unique_tensors(decoder))
        check_shapes(expected, trunk, f"the critic of {checkpoint} is of another model than {base}")
    else:
        network, whole, _ = _policy(checkpoint, state, weights, base)
        decoder = decoder_of(network)
        names = {id(module): name for name, module in network.named_modules()}
        trunk = _named(whole, f"{names[id(decoder)]}.")
    save_critic(decoder, trunk, head, tokenizer=open_tokenizer(base), folder=folder)
    return int(state["global_step"])


def _base(checkpoint: Path, name: str | None) -> str:
    if name is None:
        raise ValueError(
            f"{checkpoint} does not name its model: give the run's model.model as --model."
        )
    return name


def _named(weights: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Returns the weights with a prefix, by their names without it."""
    names = (name for name in weights if name.startswith(prefix))
    return {name.removeprefix(prefix): weights[name] for name in names}


def _policy(
    checkpoint: Path, state: Mapping[str, Any], weights: Mapping[str, Tensor], base: str
) -> tuple[PreTrainedModel, dict[str, Tensor], LoRA | None]:
    """Returns the policy's model, its weights by name, with the adapters merged, and their kind."""
    from lrl.training.lora import LoRA, is_adapter
    from lrl.training.model import (
        ModelSource,
        open_meta_model,
        unique_tensors,
        whole_tensors,
    )

    found = _named(weights, PREFIX)
    other = f"{checkpoint} is of another model than {base}"
    if "lora" not in state:
        network = open_meta_model(base, None).to(next(iter(found.values())).dtype)
        expected = dict(unique_tensors(network))
        check_shapes(expected, found, other)
        return network, {name: found[name] for name in expected}, None
    lora = LoRA(**state["lora"])
    network = ModelSource(base, state["dtype"]).open()
    lora.add_to(network)
    adapters = {name: one for name, one in unique_tensors(network) if is_adapter(name)}
    check_shapes(adapters, found, other)
    network.load_state_dict(found, strict=False)
    return network, dict(whole_tensors(network)), lora


def check_shapes(expected: Mapping[str, Tensor], found: Mapping[str, Tensor], prefix: str) -> None:
    """Raises ValueError, beginning with `prefix`, if a weight is missing or of another shape."""
    for name, weight in expected.items():
        if name not in found or found[name].shape != weight.shape:
            shape = list(found[name].shape) if name in found else "none"
            raise ValueError(
                f"{prefix}: {name} is {shape} in it and {list(weight.shape)} there. Give its "
                "model.model as --model."
            )


def read(checkpoint: Path, folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Returns a checkpoint without its weights, and the weights of policy and critic, on the CPU;
    checks that `folder`, the target, is new or empty."""
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
        if not _named(weights, PREFIX):
            raise KeyError(f"{PREFIX}*")
    except READ_ERRORS as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(
            f"{checkpoint} is no checkpoint of an lrl run ({reason:.200}): give another."
        ) from error
    return state, weights
