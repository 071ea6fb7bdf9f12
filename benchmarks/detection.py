"""Which wrong weights a proof finds (`lrl.weights.proof`).

A policy takes 20 steps of AdamW. Then a fault is put into the weights of a stand-in generator, the
same model in the generator's number format, and it is proved: over 512 tokens as a new one, over 64
as later. No vLLM server takes part.
"""

from __future__ import annotations

import argparse
import asyncio
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import lrl
from benchmarks import arguments, records
from benchmarks.arguments import Row
from lrl.generators.generator import State, gather
from lrl.training.collate import text_as_micro_batch
from lrl.weights.proof import FIRST_PROOF_TOKENS_ON_CPU, Proof
from tests.tiny_families import save_tiny

Weights = dict[str, Tensor]
Versions = tuple[Weights, Weights, Weights]  # the first, the last but one, the last
FAMILY = "qwen3_moe"
STEPS = 20  # syncs from one proof to the next


def with_tensor(change: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Versions], Weights]:
    """Changes the last layer's output matrix, given what it was a version before and is now."""

    def fault(versions: Versions) -> Weights:
        _, before, now = versions
        name = max(one for one in now if one.endswith("self_attn.o_proj.weight"))
        return now | {name: change(before[name], now[name])}

    return fault


def swapped_experts(versions: Versions) -> Weights:
    now = versions[-1]
    experts = [name for name in now if "layers.0.mlp.experts." in name]
    return now | {name: now[name].roll(1, 0) for name in experts}


def swapped_layers(versions: Versions) -> Weights:
    other = {"0": "1", "1": "0"}
    return {
        re.sub(r"layers\.([01])\.", lambda found: f"layers.{other[found[1]]}.", name): one
        for name, one in versions[-1].items()
    }


FAULTS: dict[str, Callable[[Versions], Weights]] = {
    "a tensor is zero": with_tensor(lambda before, now: torch.zeros_like(now)),
    "a row of it is zero": with_tensor(lambda before, now: now.index_fill(0, torch.tensor(0), 0.0)),
    "the experts of a layer are swapped": swapped_experts,
    "two layers are swapped": swapped_layers,
    "a tensor misses an update": with_tensor(lambda before, now: before),
    "all weights miss an update": lambda versions: versions[-2],
    f"all weights miss {STEPS} updates": lambda versions: versions[0],
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
    return kept[0], kept[1], copied(policy)


def copied(policy: lrl.PolicyModule) -> Weights:
    return {name: one.clone() for name, one in policy.network.state_dict().items()}


def stand_in(model: lrl.PolicyModule, dtype: str, state: State) -> Any:
    async def answer(tokens: list[int], **how: Any) -> list[float]:
        return model.prompt_logprobs(tokens)

    settings = SimpleNamespace(dtype=dtype, quantization=None, extra_args={})
    server, client = SimpleNamespace(settings=settings), SimpleNamespace(prompt_logprobs=answer)
    return SimpleNamespace(name="it", state=state, syncs=STEPS, server=server, client=client)


SETTINGS: dict[str, Any] = {
    "model": ("", "folder of the policy; by default a tiny mixture"),
    "lrs": ([1e-6, 1e-5, 1e-4, 1e-3], "learning rates"),
}


def passes(proof: Proof, generator: Any) -> bool:
    return asyncio.run(gather([proof(generator)])) == [None]


def runs(args: argparse.Namespace) -> list[Row]:
    both = product(args.lrs, ("float32", "bfloat16"))
    return [{"model": args.model, "lr": lr, "dtype": dtype} for lr, dtype in both]


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
        how: Row = {"version": STEPS, "tolerance": None, "deadline_s": 60.0}
        proof = Proof(policy.prompt_logprobs, "float32", text, [new], **how)

        held.network.load_state_dict(versions[-1])
        sound = copied(held)
        assert passes(proof, new), "nothing is wrong"
        found = dict[str, str]()
        for name, fault in FAULTS.items():
            held.network.load_state_dict(fault(versions))
            if all(map(torch.equal, sound.values(), copied(held).values())):
                found[name] = "same bytes"
            elif passes(proof, new):
                found[name] = "no"
            else:
                found[name] = "first proof" if passes(proof, old) else "proof"
        yield row | {"found": found}


def table(rows: Sequence[Row]) -> str:
    heads = ["in the engine", *(f"{row['lr']:g}, {row['dtype']}" for row in rows)]
    return records.markdown(heads, [[one, *(row["found"][one] for row in rows)] for one in FAULTS])


if __name__ == "__main__":
    arguments.run("detection", __doc__, SETTINGS, runs, measure, table)
