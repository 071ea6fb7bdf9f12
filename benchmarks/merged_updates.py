"""What a generator in 16 bits gets of the policy's updates, by step, learning rate, and way of rounding.

    python -m benchmarks.merged_updates MODEL                 measure and print
    python -m benchmarks.merged_updates MODEL --print-only    print what is there

MODEL is a folder whose files are in bfloat16. Its policy is trained in float32 for ten steps of AdamW by random
advantages, all weights or adapters alone. After some of them its weights are rounded to bfloat16: to the nearest
number, or as adapters are merged (`lrl.weights.adapters.rounded`). Then the log-probs of other texts are computed with
them, in float32, which shows what the weights carry, and in bfloat16, as such a generator computes. A move is the
change of these log-probs since step 0, for the policy in float32, for the generator in its own format.
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
from benchmarks.probe_noise import step
from lrl.training.model import label_logprobs, open_network, text_as_micro_batch
from lrl.weights.adapters import merged, rounded

RESULTS = Path(__file__).parent / "results" / "merged_updates.jsonl"
TRAINED = ("adapters", "weights")
LEARNING_RATES = (1e-6, 1e-5, 1e-4)
STEPS = (1, 3, 10)
WAYS = ("nearest", "drawn")
FORMATS = ("float32", "bfloat16")
RANK = 16
HEAD = (
    "| trained | lr | step | policy moved (nats) | rounding | weights that changed | cosine in float32 | length "
    "| off the policy (nats) | cosine in bfloat16 | off the policy (nats) |\n" + "|---" * 11 + "|"
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
        return policy.named_weights()
    return merged(files.items(), dict(policy.sent_weights()), torch.float32)


@torch.no_grad()
def logprobs(network: Any, texts: list[list[int]]) -> Tensor:
    """Returns the log-probs of all tokens but the first of each text, float32, in nats."""
    micros = [text_as_micro_batch(text, network.device) for text in texts]
    return torch.cat([label_logprobs(network, micro, chunk_tokens=512)[micro.mask] for micro in micros])


def compared(policy: Tensor, generator: Tensor, before: tuple[Tensor, Tensor]) -> dict[str, float | None]:
    """Compares the generator's move with the policy's; `before` has their log-probs at step 0."""
    moves = policy - before[0], generator - before[1]
    return {
        "cosine": records.rounded(cosine_similarity(*moves, dim=0).item()),
        "length": records.rounded((moves[1].norm() / moves[0].norm()).item()),
        "off": records.rounded((generator - policy).abs().mean().item()),
    }


def measure(folder: str, trained: str, lr: float) -> dict[str, Any]:
    """Trains a policy and returns what the generators would have of it."""
    random.seed(0)
    torch.manual_seed(0)
    policy = lrl.PolicyModule(folder, lora=lrl.LoRA(rank=RANK) if trained == "adapters" else None)
    policy.configure_model()
    sums = [policy.tokenizer.encode(f"{a}+{b}={a + b}") for a in range(10, 99, 7) for b in range(10, 99, 7)]
    random.shuffle(sums)
    texts, batches = sums[:24], [torch.tensor([tokens]) for tokens in sums[24:]]
    files = {name: weight for file in Path(folder).glob("*.safetensors") for name, weight in load_file(file).items()}
    networks = {name: open_network(folder, name, None, False) for name in FORMATS}
    before = {name: (logprobs(policy.network, texts), logprobs(networks[name], texts)) for name in FORMATS}
    optimizer = torch.optim.AdamW(
        [weight for weight in policy.parameters() if weight.requires_grad], lr=lr, betas=(0.9, 0.95), weight_decay=0.0
    )
    found: dict[str, Any] = {}
    for number in range(1, max(STEPS) + 1):
        step(policy.network, optimizer, batches)
        if number not in STEPS:
            continue
        now = logprobs(policy.network, texts)
        line: dict[str, Any] = {"moved": records.rounded((now - before["float32"][0]).abs().mean().item())}
        for way in (nearest, drawn):
            changed = loaded(networks, weights_of(policy, files), way, files)
            each = {name: compared(now, logprobs(networks[name], texts), before[name]) for name in FORMATS}
            line[way.__name__] = each | {"changed": records.rounded(changed)}
        found[str(number)] = line
    return {"steps": found}


@torch.no_grad()
def loaded(
    networks: dict[str, Any],
    weights: Iterator[tuple[str, Tensor]],
    way: Callable[[str, Tensor], Tensor],
    files: dict[str, Tensor],
) -> float:
    """Gives the networks rounded weights; returns the share of numbers in matrices that are not those of the files."""
    into = {name: dict(network.named_parameters()) for name, network in networks.items()}
    changed = total = 0
    for name, weight in weights:
        weight = way(name, weight) if weight.dim() > 1 else weight
        for parameters in into.values():
            parameters[name].copy_(weight)
        if weight.dim() > 1 and "embed" not in name:
            changed += int((weight != files[name]).sum())
            total += weight.numel()
    return changed / total


def rows(record: dict[str, Any]) -> Iterator[str]:
    """Yields the lines of a table."""
    for number, line in record["steps"].items():
        for way in WAYS:
            exact, half = line[way]["float32"], line[way]["bfloat16"]
            cells = (
                *(record["trained"], f"{record['lr']:g}", number, f"{line['moved']:.2g}", way),
                *(f"{line[way]['changed']:.2%}", f"{exact['cosine']:.3f}", f"{exact['length']:.2f}"),
                *(f"{exact['off']:.2g}", f"{half['cosine']:.2f}", f"{half['off']:.2g}"),
            )
            yield f"| {' | '.join(cells)} |"


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.merged_updates", description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a folder in Hugging Face format, in bfloat16")
    parser.add_argument("--print-only", action="store_true", help="print what was measured")
    args = parser.parse_args()
    name = Path(args.model).name
    wanted = [{"model": name, "trained": trained, "lr": lr} for trained in TRAINED for lr in LEARNING_RATES]
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
