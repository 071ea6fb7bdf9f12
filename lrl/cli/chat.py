"""`lrl chat`: responses of an exported policy.

transformers writes them, not vLLM: a folder opens in seconds and needs no server. A prompt is made
as in the run that made the policy: with its `system_prompt`, its `template` and its `chat`. As in a
generator, sampling settings in the folder do not count, only the tokens that end a response.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lrl.rollouts.policy_text import ends_of_text, read_form, stop_tokens
from lrl.system.imports import quick_imports

if TYPE_CHECKING:
    from transformers import BatchEncoding, PreTrainedModel, PreTrainedTokenizerBase


def main(argv: Sequence[str]) -> int:
    """Runs `lrl chat`: answers the prompt, or each typed line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="lrl chat", description="Chat with a policy that was exported to a folder."
    )
    add = parser.add_argument
    add("folder", type=Path, help="the policy, in Hugging Face format")
    asked = "what to ask; else a line at a time, until an empty one"
    add("prompt", nargs="*", default=[], help=asked)
    plain = "without the system prompt, the template and the tools of the run"
    add("--plain", action="store_true", help=plain)
    likeliest = "0 takes the likeliest token each time (0)"
    add("--temperature", type=float, default=0.0, help=likeliest)
    add("--max_tokens", type=int, default=512, help="longest response, in tokens (512)")
    args = parser.parse_intermixed_args(argv)  # plain argparse takes no prompt after an option
    form = {} if args.plain else read_form(args.folder)
    policy, tokenizer = open_policy(args.folder, args.temperature, args.max_tokens)
    shown = ("system_prompt", "template", "tools")
    if used := [name.replace("_", " ") for name in shown if form.get(name)]:
        sys.stderr.write(
            f"With the {' and the '.join(used)} of the run (--plain leaves them out).\n"
        )
    if args.prompt:
        respond(policy, tokenizer, " ".join(args.prompt), form)
    else:
        for prompt in typed_lines():
            try:
                respond(policy, tokenizer, prompt, form)
            except ValueError as error:
                sys.stderr.write(f"lrl: error: {error}\n")
    return 0


def open_policy(
    folder: Path, temperature: float, max_tokens: int
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Returns the model, on the GPU if there is one, and its tokenizer; raises ValueError if the
    folder is not a whole policy."""
    if not (folder / "config.json").is_file():  # transformers would look for the name on the hub
        raise ValueError(
            f"{folder} holds no policy (there is no {folder / 'config.json'}).\n"
            "Give the folder that the end of a run names; lrl.callbacks.Export writes it."
        )
    with quick_imports():
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, logging

        from lrl.training.model import open_config

    logging.disable_progress_bar()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    open_config(str(folder))
    ends = stop_tokens(tokenizer, str(folder))
    policy = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").to(device)
    sampling: dict[str, Any] = {"max_new_tokens": max_tokens, "eos_token_id": sorted(ends) or None}
    if temperature:
        sampling |= {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    policy.generation_config = GenerationConfig(pad_token_id=pad, **sampling)
    return policy.eval(), tokenizer


def respond(
    policy: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    form: Mapping[str, Any],
) -> None:
    """Streams the response to stdout, as rewards see it: special tokens too, but no end. Raises
    ValueError if the prompt cannot be encoded."""
    import torch
    from transformers import TextStreamer

    class Stream(TextStreamer):
        def put(self, value: torch.Tensor) -> None:
            if self.next_tokens_are_prompt or value.item() not in ends:
                super().put(value)

    ends = ends_of_text(tokenizer, frozenset(policy.generation_config.eos_token_id or ()))
    inputs = encode(tokenizer, prompt, form)
    # Beyond it a policy that never ends would write what it was never trained to write.
    positions = getattr(policy.config, "max_position_embeddings", None) or math.inf
    room = positions - inputs["input_ids"].shape[1]
    longest = max(1, min(policy.generation_config.max_new_tokens or 1, room))
    stream = Stream(tokenizer, skip_prompt=True)
    policy.generate(**inputs.to(policy.device), streamer=stream, max_new_tokens=longest)


def encode(
    tokenizer: PreTrainedTokenizerBase, prompt: str, form: Mapping[str, Any]
) -> BatchEncoding:
    """Returns the input_ids, [1, n], of a typed prompt, made as in training by the `Prompts.form` of
    the run. Raises ValueError if the run's template needs other columns."""
    from transformers import BatchEncoding

    from lrl.rollouts.prompts import Prompts

    settings = dict(form)
    row = {"tools": settings.pop("tools", None), form.get("prompt_column", "prompt"): prompt}
    prompts = Prompts([row], **settings)
    prompts.load(tokenizer, sys.maxsize)
    token_ids = prompts[0].token_ids
    batch = {"input_ids": [token_ids], "attention_mask": [[1] * len(token_ids)]}
    return BatchEncoding(batch, tensor_type="pt")


def typed_lines() -> Iterator[str]:
    """Yields lines of stdin, until an empty one or the end."""
    try:
        while (line := input("> " if sys.stdin.isatty() else "")).strip():
            yield line
    except (EOFError, KeyboardInterrupt):
        return
