"""How far trainer and generator differ by rounding, beside what the policy alone says of it
(`lrl.weights.tolerance`).

    python -m benchmarks.agreement                        the quickstart's policy and random ones
    python -m benchmarks.agreement --folders FOLDER       others, in Hugging Face format
    python -m benchmarks.agreement --print-only           print what is there

The policy computes the log-probs of a text in float32, and once more with errors of the size of the
generator's rounding. A real vLLM server computes them in its format, and writes responses. All
differences are means of their sizes in nats a token.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import torch

import lrl
from benchmarks import arguments, records
from benchmarks.lent_server import lent_server
from benchmarks.quickstart_run import policy_of
from benchmarks.tiny_families import save_tiny
from lrl.generators.client import GENERATE, GeneratorClient
from lrl.quickstart.warmup import make_model, make_tokenizer
from lrl.training.rounding import Rounded
from lrl.types import Sampling
from lrl.weights.probe import Text
from lrl.weights.tolerance import MAX_TOLERANCE_NATS, mean_difference, rounding_tolerance

FAMILIES = ("llama", "gemma2", "qwen3_moe", "granite", "phi3")
TOKENS = 256
"""Of the text; fewer where the model has fewer positions."""
RESPONSE_TOKENS, RESPONSES = 32, 8
STORY = (
    "A farmer has 3 fields with 12 cows each. He sells 7 cows at the market on Monday and buys 2 "
    "goats on his way. How many cows has he left? On Tuesday his neighbour asks him for half of "
    "them, and pays with a horse, a cart and 40 kg of seed. The first field is the largest, since "
    "it lies beside the river, where the grass grows all summer. What would he have to sell in "
    "order to buy a second horse, if a horse costs as much as 4 cows or 9 goats? Write down how "
    "you have found the answer, step by step, and put it at the end behind the words 'the answer "
    "is'. A train leaves the town at a quarter past eight and needs 55 minutes; when does it "
    "arrive if it waits 10 minutes twice?"
)
HEAD = (
    "| policy | generator | tokens | log-prob, mean | difference | by the "
    "policy alone | ratio | limit | largest difference | of sampled tokens |\n" + "|---" * 10 + "|"
)


def folder_of(policy: str, folder: Path) -> Path:
    """Returns the folder of a policy; makes it if it is a random one."""
    if policy == "quickstart":
        return policy_of(0)
    if policy in FAMILIES:
        sizes: dict[str, Any] = {
            "hidden_size": 128,
            "max_position_embeddings": 1024,
            "vocab_size": 64,
        }
        if policy not in ("granite", "phi3"):
            sizes["head_dim"] = 32  # as theirs; vLLM's CPU build has no smaller ones
        save_tiny(policy, folder / policy, 4.0, **sizes, tie_word_embeddings=policy == "gemma2")
        make_tokenizer().save_pretrained(folder / policy)
    elif policy == "quickstart, random":
        torch.manual_seed(0)
        make_model().save_pretrained(folder / "random")
        make_tokenizer().save_pretrained(folder / "random")
        return folder / "random"
    else:
        return Path(policy)
    return folder / policy


def text_of(policy: str, module: lrl.PolicyModule, count: int) -> list[int]:
    """Returns a text of the kind that the policy is asked for."""
    if policy in FAMILIES:
        draw = torch.Generator().manual_seed(0)
        return torch.randint(3, 64, (count,), generator=draw).tolist()
    sums = "".join(f"{a}+{b}={a + b}" for a in range(10, 99, 7) for b in range(10, 99, 5))
    return module.tokenizer.encode(sums if "quickstart" in policy else STORY)[:count]


Response = tuple[list[int], list[float]]
"""Tokens and their log-probs."""


async def ask(
    server: Any, tokens: list[int], prompt: list[int]
) -> tuple[list[float], list[Response]]:
    """Returns the generator's log-probs of the text, and responses to its beginning."""
    client = GeneratorClient(server.url, server.name, server.token)
    found = []
    parameters = Sampling(max_tokens=RESPONSE_TOKENS).as_vllm(n=1, written=0)
    try:
        logprobs = await client.prompt_logprobs(tokens, salt="text", deadline_s=600.0)
        for _ in range(RESPONSES):
            body = {"token_ids": prompt, "sampling_params": parameters}
            (choice,) = (await client.post(GENERATE, body, deadline_s=600.0))["choices"]
            found.append(
                (choice["token_ids"], [entry["logprob"] for entry in choice["logprobs"]["content"]])
            )
    finally:
        await client.close()
    return logprobs, found


def measure(policy: str, dtype: Rounded, folder: Path) -> dict[str, Any]:
    """Measures one policy with one generator."""
    made = folder_of(policy, folder)
    module = lrl.PolicyModule(str(made), attention="eager" if policy == "gemma2" else None)
    module.configure_model()
    positions = module.network.config.get_text_config().max_position_embeddings
    tokens = text_of(policy, module, min(TOKENS, positions - RESPONSE_TOKENS))
    text = Text(module.prompt_logprobs, tokens, [dtype])
    prompt = tokens[: len(tokens) // 4]
    settings = lrl.ServerSettings(
        max_model_len=len(tokens) + RESPONSE_TOKENS,
        max_num_seqs=RESPONSES,
        dtype=dtype,
        kv_cache_gib=0.3,
    )
    with lent_server(made, settings, folder) as server:
        server.start()
        server.wait_ready()
        found, responses = asyncio.run(ask(server, tokens, prompt))
    sampled = [
        abs(own - theirs)
        for written, logprobs in responses
        for own, theirs in zip(
            module.prompt_logprobs(prompt + written)[len(prompt) - 1 :], logprobs, strict=True
        )
    ]
    spread = text.spread(dtype)
    assert spread is not None, "it was measured"
    return {
        "tokens": len(tokens),
        "logprob": records.rounded(sum(text.expected) / len(text.expected)),
        "difference": records.rounded(mean_difference(text.expected, found)),
        "spread": records.rounded(spread),
        "limit": records.rounded(rounding_tolerance(dtype, spread)),
        "largest": records.rounded(
            max(abs(a - b) for a, b in zip(text.expected, found, strict=True))
        ),
        "sampled": records.rounded(sum(sampled) / len(sampled)),
        "sampled_tokens": len(sampled),
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Returns the table in Markdown."""
    lines = [HEAD]
    for row in rows:
        numbers = [f"{row[name]:.2g}" for name in ("logprob", "difference", "spread")]
        ratio = f"{row['difference'] / row['spread']:.2g}"
        rest = [f"{row[name]:.2g}" for name in ("limit", "largest", "sampled")]
        name = Path(row["policy"]).name
        lines.append(
            f"| {' | '.join([name, row['dtype'], str(row['tokens']), *numbers, ratio, *rest])} |"
        )
    return "\n".join(lines)


def make_parser() -> argparse.ArgumentParser:
    """Returns the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.agreement", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "--folders", nargs="*", default=[], help="policies of your own, in Hugging Face format"
    )
    dtypes = [dtype for dtype in get_args(Rounded) if dtype in MAX_TOLERANCE_NATS]
    parser.add_argument(
        "--dtypes", nargs="+", choices=dtypes, default=["bfloat16"], help="of the generator"
    )
    arguments.add_print_only(parser, "agreement")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Measures what the records lack, and prints the table."""

    def runs_of(args: argparse.Namespace) -> list[dict[str, Any]]:
        policies = [*FAMILIES, "quickstart, random", "quickstart", *args.folders]
        return [{"policy": policy, "dtype": dtype} for policy in policies for dtype in args.dtypes]

    def measure_all(args: argparse.Namespace, command: str) -> None:
        for run in runs_of(args):
            row = records.measured(
                args.out,
                run,
                lambda run=run: measure(**run, folder=args.folder) | {"command": command},
            )  # type: ignore[misc]
            logging.info("%s", row)

    return arguments.measure_and_print(make_parser(), argv, measure_all, runs_of, table)


if __name__ == "__main__":
    raise SystemExit(main())
