"""lrl's optimizer step beside a plain forward and backward pass over the very same rows, and beside
the core's matrix products.

    python -m benchmarks.trainer_ceiling                    the policy of 5 million parameters
    python -m benchmarks.trainer_ceiling --model MODEL      a folder in Hugging Face format

One thread, float32, responses that are ready. After each of lrl's steps its micro-batches go through
the same model once more: transformers' forward pass, torch's cross-entropy of the sampled tokens,
backward, clipping and AdamW, with no objective, no diagnostics and no Lightning. The seconds are
those of the thread on its core. The plain pass has logits for every position; lrl has them for
trained positions alone, so it can be the faster one.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_

import lrl
from benchmarks import arguments, records, timed_run
from benchmarks.few_shot import write
from benchmarks.forced_lengths import equal
from benchmarks.gpu.trainer import flops
from benchmarks.ready_responses import ReadyResponses
from benchmarks.timed_run import LENGTHS, MICRO_BATCH_TOKENS, quiet_trainer
from lrl.training.attention_masks import masks_of
from lrl.training.model import open_tokenizer
from lrl.types import MicroBatch

WARM_UP = 2
"""Steps that do not count: AdamW makes its state."""
MATRIX = 512
"""Rows and columns of the matrices whose product is timed; both fit a core's own cache."""
PRODUCTS = 40
MAX_PROMPT_TOKENS = 512
HEAD = (
    "| model | prompt | responses | lrl (s) | plain (s) | lrl beside plain | lrl's tokens/s "
    "| share of the core's products |\n" + "|---" * 8 + "|"
)


class Beside(lrl.PolicyModule):
    """A policy that repeats each step in the plain way; keeps the seconds of both."""

    def on_fit_start(self) -> None:
        """Makes the plain optimizer, which moves nothing."""
        super().on_fit_start()
        self.kept: list[MicroBatch] = []
        self.lrl_s: list[float] = []
        self.plain_s: list[float] = []
        self.tokens = self.response_tokens = 0
        self.plain = torch.optim.AdamW(self.network.parameters(), lr=0.0, weight_decay=0.0)

    def compute_loss(self, micro: MicroBatch) -> torch.Tensor:
        """See `lrl.PolicyModule.compute_loss`."""
        self.kept.append(micro)
        return super().compute_loss(micro)

    def training_step(self, step: Any, batch_idx: int) -> None:
        """See `lrl.PolicyModule.training_step`."""
        self.kept = []
        started = time.thread_time()
        super().training_step(step, batch_idx)
        between = time.thread_time()
        self._plain_step()
        self.lrl_s.append(between - started)
        self.plain_s.append(time.thread_time() - between)
        self.tokens = sum(int((micro.sequence_ids >= 0).sum()) for micro in self.kept)
        self.response_tokens = sum(int(micro.mask.sum()) for micro in self.kept)

    def _plain_step(self) -> None:
        for micro in self.kept:
            found = self.network(
                input_ids=micro.input_ids,
                position_ids=micro.position_ids,
                use_cache=False,
                **masks_of(self.network, micro),
            )
            labels = micro.labels.masked_fill(~micro.mask, -100)
            loss = functional.cross_entropy(
                found.logits.flatten(0, 1), labels.flatten(), reduction="sum"
            )
            (loss / micro.mask.sum()).backward()
        clip_grad_norm_(self.network.parameters(), 1.0)
        self.plain.step()
        self.plain.zero_grad()


def products_per_s() -> float:
    """Returns the floating-point operations a second of this thread's float32 matrix products."""
    left, right = torch.randn(MATRIX, MATRIX), torch.randn(MATRIX, MATRIX)
    left @ right
    started = time.thread_time()
    for _ in range(PRODUCTS):
        left @ right
    return PRODUCTS * 2.0 * MATRIX**3 / (time.thread_time() - started)


def measure(args: argparse.Namespace, lengths: str, examples: int) -> dict[str, Any]:
    """Returns the medians of one shape of steps."""
    torch.set_num_threads(1)
    model = args.model or timed_run.policy_5m(args.folder)
    tokenizer = open_tokenizer(str(model))
    prompts = lrl.Prompts(str(write(examples, args.folder)), shuffle=False)
    prompts.load(tokenizer, MAX_PROMPT_TOKENS)
    data = ReadyResponses(
        prompts,
        len(tokenizer),
        LENGTHS[lengths] if lengths in LENGTHS else equal(int(lengths)),
        groups=args.groups,
        responses=args.responses,
        micro_batch_tokens=args.micro_batch_tokens,
    )
    policy = Beside(str(model), lr=timed_run.LR, dtype="float32")
    trainer = quiet_trainer(WARM_UP + args.steps, args.folder, callbacks=[data.supervisor])
    trainer.fit(policy, data)
    lrl_s = median(policy.lrl_s[WARM_UP:])
    plain_s = median(policy.plain_s[WARM_UP:])
    wanted = flops(policy.network.config, policy.tokens, policy.response_tokens)
    return {
        "prompt_tokens": len(prompts[0].token_ids),
        "lrl_s": records.rounded(lrl_s),
        "plain_s": records.rounded(plain_s),
        "tokens_per_s": records.rounded(policy.tokens / lrl_s),
        "share_of_products": records.rounded(wanted / lrl_s / products_per_s()),
    }


def described(args: argparse.Namespace, lengths: str, examples: int) -> dict[str, Any]:
    """Returns the fields by which a record is found."""
    return {
        "model": args.model.name if args.model else "5m",
        "lengths": lengths,
        "examples": examples,
        "groups": args.groups,
        "responses": args.responses,
        "micro_batch_tokens": args.micro_batch_tokens,
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Returns a line a shape in Markdown."""
    lines = [HEAD]
    for row in rows:
        cells = (
            row["model"],
            row["prompt_tokens"],
            row["lengths"],
            f"{row['lrl_s']:.2f}",
            f"{row['plain_s']:.2f}",
            f"{row['lrl_s'] / row['plain_s']:.2f}",
            f"{row['tokens_per_s']:.0f}",
            f"{row['share_of_products']:.2f}",
        )
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Measures what the records lack, then prints."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.trainer_ceiling", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--model", type=Path, help="(the random policy of 5 million parameters)")
    parser.add_argument("--lengths", nargs="+", default=list(LENGTHS), help="(%(default)s)")
    parser.add_argument("--examples", nargs="+", type=int, default=[0, 9, 39], help="(%(default)s)")
    parser.add_argument("--steps", type=int, default=5, help="that count (%(default)s)")
    parser.add_argument("--groups", type=int, default=timed_run.GROUPS, help="(%(default)s)")
    parser.add_argument("--responses", type=int, default=timed_run.RESPONSES, help="(%(default)s)")
    parser.add_argument("--micro-batch-tokens", type=int, default=MICRO_BATCH_TOKENS)
    arguments.add_print_only(parser, "trainer_ceiling")

    def shapes(args: argparse.Namespace) -> list[tuple[str, int]]:
        return [(lengths, examples) for lengths in args.lengths for examples in args.examples]

    def measure_missing(args: argparse.Namespace, command: str) -> None:
        for shape in shapes(args):
            if records.find(records.read(args.out), described(args, *shape)) is None:
                found = described(args, *shape) | measure(args, *shape) | {"command": command}
                records.append(args.out, found)

    return arguments.measure_and_print(
        parser,
        argv,
        measure_missing,
        lambda args: [described(args, *shape) for shape in shapes(args)],
        table,
    )


if __name__ == "__main__":
    raise SystemExit(main())
