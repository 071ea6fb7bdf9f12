"""What a generator in 16 bits gets of the policy's updates, by step, learning rate, and way of
rounding.

    python -m benchmarks.merged_updates MODEL                 measure and print
    python -m benchmarks.merged_updates MODEL --print-only    print what is there

MODEL is a folder whose files are in bfloat16. Its policy is trained in float32 for ten steps of
AdamW by random advantages, all weights or adapters alone. After some of them its weights are
rounded to bfloat16: to the nearest number, or as adapters are merged
(`lrl.training.merging.rounded`). Then the log-probs of other texts are computed with them, in
float32: what the weights carry, without the rounding of a generator's own activations. A move is
the change of these log-probs since step 0.
"""

from __future__ import annotations

import argparse
import random
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import cosine_similarity

import lrl
from benchmarks import records
from lrl.training.collate import fill_rows
from lrl.training.merging import rounded
from lrl.training.model import label_logprobs, open_network
from lrl.training.prefix_tree import PrefixTree, text_sequence
from lrl.weights.adapters import merged

RESULTS = Path(__file__).parent / "results" / "merged_updates.jsonl"
TRAINED = ("adapters", "weights")
LEARNING_RATES = (1e-6, 1e-5, 1e-4)
STEPS = (1, 3, 10)
WAYS = ("nearest", "drawn")
RANK = 16
HEAD = (
    "| trained | lr | step | policy moved (nats) | rounding | weights that "
    "changed | cosine of the moves | their part along the policy's | off the "
    "policy (nats) |\n" + "|---" * 9 + "|"
)


def nearest(name: str, weight: Tensor) -> Tensor:
    """Rounds to the nearest number."""
    return weight.bfloat16()


def drawn(name: str, weight: Tensor) -> Tensor:
    """Rounds as adapters are merged."""
    return rounded(weight.float(), torch.bfloat16, zlib.crc32(name.encode()))


def weights_of(policy: lrl.PolicyModule, files: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yields the weights that a generator has before it rounds them."""
    if policy.lora is None:
        return policy.sent_weights()
    return merged(files.items(), dict(policy.sent_weights()), torch.float32)


@torch.no_grad()
def logprobs(network: Any, texts: list[list[int]]) -> Tensor:
    """Returns the log-probs of all tokens but the first of each text, float32, in nats."""
    micro = fill_rows([[PrefixTree([text_sequence(text)])] for text in texts], temperature=1.0)
    return label_logprobs(network, micro, chunk_tokens=512)[micro.mask]


def step(network: Any, optimizer: torch.optim.Optimizer, texts: list[list[int]]) -> None:
    """Makes one step of AdamW, for or against eight texts at random."""
    micro = fill_rows(
        [[PrefixTree([text_sequence(text)])] for text in random.sample(texts, 8)], temperature=1.0
    )
    signs = torch.tensor([random.choice([-1.0, 1.0]) for _ in micro.input_ids])
    optimizer.zero_grad()
    (signs @ label_logprobs(network, micro, chunk_tokens=512).sum(1) / micro.mask.sum()).backward()
    torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
    optimizer.step()


def compared(policy: Tensor, generator: Tensor, start: Tensor) -> dict[str, float | None]:
    """Compares the generator's move with the policy's; `start` has the log-probs of both at step
    0."""
    wanted, found = policy - start, generator - start
    return {
        "cosine": records.rounded(cosine_similarity(wanted, found, dim=0).item()),
        "along": records.rounded((wanted @ found / wanted.square().sum()).item()),
        "off": records.rounded((generator - policy).abs().mean().item()),
    }


def measure(folder: str, trained: str, lr: float) -> dict[str, Any]:
    """Trains a policy and returns what the generators would have of it."""
    random.seed(0)
    torch.manual_seed(0)
    policy = lrl.PolicyModule(folder, lora=lrl.LoRA(rank=RANK) if trained == "adapters" else None)
    policy.configure_model()
    sums = [
        policy.tokenizer.encode(f"{a}+{b}={a + b}")
        for a in range(10, 99, 7)
        for b in range(10, 99, 7)
    ]
    random.shuffle(sums)
    texts, trained_on = sums[:12], sums[12:]
    files = {
        name: weight
        for file in Path(folder).glob("*.safetensors")
        for name, weight in load_file(file).items()
    }
    network = open_network(folder, "float32", None, False)
    start = logprobs(policy.network, texts)
    optimizer = torch.optim.AdamW(
        [weight for weight in policy.parameters() if weight.requires_grad],
        lr=lr,
        betas=(0.9, 0.95),
        weight_decay=0.0,
    )
    found: dict[str, Any] = {}
    for number in range(1, max(STEPS) + 1):
        step(policy.network, optimizer, trained_on)
        if number not in STEPS:
            continue
        now = logprobs(policy.network, texts)
        line: dict[str, Any] = {"moved": records.rounded((now - start).abs().mean().item())}
        for way in (nearest, drawn):
            changed = load(network, weights_of(policy, files), way, files)
            line[way.__name__] = compared(now, logprobs(network, texts), start) | {
                "changed": records.rounded(changed)
            }
        found[str(number)] = line
    return {"steps": found}


@torch.no_grad()
def load(
    network: Any,
    weights: Iterator[tuple[str, Tensor]],
    way: Callable[[str, Tensor], Tensor],
    files: dict[str, Tensor],
) -> float:
    """Gives a network rounded weights; returns the share of the layers' numbers that are not those
    of the files."""
    parameters = dict(network.named_parameters())
    changed = total = 0
    for name, weight in weights:
        weight = way(name, weight) if weight.dim() > 1 else weight
        parameters[name].copy_(weight)
        if weight.dim() > 1 and "embed" not in name:
            changed += int((weight != files[name]).sum())
            total += weight.numel()
    return changed / total


def rows(record: dict[str, Any]) -> Iterator[str]:
    """Yields the lines of a table."""
    for number, line in record["steps"].items():
        for way in WAYS:
            found = line[way]
            cells = (
                *(record["trained"], f"{record['lr']:g}", number, f"{line['moved']:.2g}", way),
                *(
                    f"{found['changed']:.2%}",
                    f"{found['cosine']:.2f}",
                    f"{found['along']:.2f}",
                    f"{found['off']:.2g}",
                ),
            )
            yield f"| {' | '.join(cells)} |"


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.merged_updates", description=__doc__.splitlines()[0]
    )
    parser.add_argument("model", help="a folder in Hugging Face format, in bfloat16")
    parser.add_argument("--print-only", action="store_true", help="print what was measured")
    args = parser.parse_args()
    name = Path(args.model).name
    wanted = [
        {"model": name, "trained": trained, "lr": lr}
        for trained in TRAINED
        for lr in LEARNING_RATES
    ]
    print(HEAD)
    for settings in wanted:
        if args.print_only:
            (record,) = records.all_found(RESULTS, [settings])
        else:
            record = records.measured(
                RESULTS,
                settings,
                lambda at=settings: measure(args.model, at["trained"], at["lr"]),  # type: ignore[misc]
            )
        for row in rows(record):
            print(row, flush=True)


if __name__ == "__main__":
    main()
