"""Which wrong syncs are found, and by what.

A policy takes 20 steps of AdamW. Then a fault is put into the weights of a stand-in generator: the
same model in the generator's number format. The checksum is that of the file which a transfer would
read (`lrl.weights.staged_file`), and the proof is a run's own (`lrl.weights.proof`): of a new
generator over 512 tokens, later over 64. No vLLM server takes part.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

import lrl
from benchmarks import arguments, records
from benchmarks.arguments import Row
from lrl.errors import GeneratorError
from lrl.generators.generator import State
from lrl.training.model import text_as_micro_batch
from lrl.weights.proof import FIRST_PROOF_TOKENS_ON_CPU, Proof
from lrl.weights.staged_file import stage_file
from lrl.weights.wire import TensorSpec
from tests.tiny_families import save_tiny

Weights = dict[str, Tensor]
FAMILY = "qwen3_moe"
STEPS = 20
"""Syncs from one proof to the next."""


class Versions(NamedTuple):
    """The policy's weights at three versions."""

    first: Weights
    before: Weights
    now: Weights


def with_tensor(change: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Versions], Weights]:
    """Changes the last layer's output matrix, given what it is now and was a version before."""

    def fault(versions: Versions) -> Weights:
        name = max(one for one in versions.now if one.endswith("self_attn.o_proj.weight"))
        return versions.now | {name: change(versions.now[name], versions.before[name])}

    return fault


def without_row(now: Tensor, before: Tensor) -> Tensor:
    return torch.cat([torch.zeros_like(now[:1]), now[1:]])


def swapped_experts(versions: Versions) -> Weights:
    names = [one for one in versions.now if "layers.0.mlp.experts." in one]
    return versions.now | {name: versions.now[name].roll(1, 0) for name in names}


def swapped_layers(versions: Versions) -> Weights:
    first = {name: one for name, one in versions.now.items() if "layers.0." in name}
    other = {name: name.replace("layers.0.", "layers.1.") for name in first}
    swapped = {name: versions.now[other[name]] for name in first}
    return versions.now | swapped | {other[name]: one for name, one in first.items()}


FAULTS: dict[str, Callable[[Versions], Weights]] = {
    "a tensor is zero": with_tensor(lambda now, before: torch.zeros_like(now)),
    "a row of it is zero": with_tensor(without_row),
    "the experts of a layer are swapped": swapped_experts,
    "two layers are swapped": swapped_layers,
    "a tensor misses an update": with_tensor(lambda now, before: before),
    "all weights miss an update": lambda versions: versions.before,
    f"all weights miss {STEPS} updates": lambda versions: versions.first,
}


def trained(policy: lrl.PolicyModule, text: list[int], lr: float) -> Versions:
    optimizer = torch.optim.AdamW(policy.network.parameters(), lr=lr, betas=(0.9, 0.95))
    kept = [copied(policy)]
    for _ in range(STEPS):
        kept = [kept[0], copied(policy)]
        logprobs = policy(text_as_micro_batch(text, torch.device("cpu")))
        (torch.randn_like(logprobs) * logprobs).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return Versions(*kept, copied(policy))


def copied(policy: lrl.PolicyModule) -> Weights:
    return {name: one.clone() for name, one in policy.network.state_dict().items()}


def checksum(weights: Weights, file: Path) -> int:
    specs = [TensorSpec(name, one.dtype, tuple(one.shape)) for name, one in weights.items()]
    file.unlink(missing_ok=True)
    return stage_file(specs, weights.items(), file)


def stand_in(model: lrl.PolicyModule, dtype: str, state: State) -> Any:
    async def answer(tokens: list[int], **how: Any) -> list[float]:
        return model.prompt_logprobs(tokens)

    settings = SimpleNamespace(dtype=dtype, quantization=None, extra_args={})
    server, client = SimpleNamespace(settings=settings), SimpleNamespace(prompt_logprobs=answer)
    return SimpleNamespace(name="it", state=state, syncs=STEPS, server=server, client=client)


def passes(proof: Proof, generator: Any) -> bool:
    try:
        asyncio.run(proof(generator))
    except GeneratorError:
        return False
    return True


def runs(args: argparse.Namespace) -> list[Row]:
    formats = ("float32", "bfloat16")
    return [{"model": args.model, "lr": lr, "dtype": each} for lr in args.lrs for each in formats]


def measure(args: argparse.Namespace, missing: list[Row]) -> Iterator[Row]:
    folder = args.model or str(save_tiny(FAMILY, args.folder / FAMILY, 4.0))
    for row in missing:
        torch.manual_seed(0)
        policy, held = (lrl.PolicyModule(folder, dtype=each) for each in ("float32", row["dtype"]))
        policy.configure_model(), held.configure_model()
        tokens = FIRST_PROOF_TOKENS_ON_CPU - 1
        (text,) = policy.network.generate(
            torch.tensor([[3]]), do_sample=True, min_new_tokens=tokens, max_new_tokens=tokens
        ).tolist()
        versions = trained(policy, text, row["lr"])
        new, old = (stand_in(held, row["dtype"], state) for state in (State.NEW, State.SERVING))
        proof = Proof(policy, text, [new], version=STEPS, tolerance=None, deadline_s=60.0)

        def loaded(weights: Weights, held: lrl.PolicyModule = held) -> int:
            held.network.load_state_dict(weights)
            return checksum(copied(held), args.folder / "staged")

        sound = loaded(versions.now)
        assert passes(proof, new), "nothing is wrong"
        found = dict[str, str]()
        for name, fault in FAULTS.items():
            if loaded(fault(versions)) == sound:
                found[name] = "same bytes"
            elif passes(proof, new):
                found[name] = "no"
            else:
                found[name] = "first proof" if passes(proof, old) else "proof"
        yield row | {"found": found}


def table(rows: Sequence[Row]) -> str:
    heads = ["in the engine", *(f"{row['lr']:g}, {row['dtype']}" for row in rows)]
    lines = [[name, *(row["found"][name] for row in rows)] for name in FAULTS]
    return records.markdown(heads, lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments.make_parser("detection", __doc__)
    arguments.add(
        parser,
        model=("", "folder of the policy; a tiny random mixture if it is empty"),
        lrs=([1e-6, 1e-5, 1e-4, 1e-3], "learning rates"),
    )
    arguments.add_places(parser, "detection")
    return arguments.run(parser, argv, runs, measure, table)


if __name__ == "__main__":
    raise SystemExit(main())
