"""How well the longest responses are predicted before they are written, on real prompts and without
a generator.

    python -m benchmarks.length_ranking --rows FOLDER/gsm8k/train.jsonl
    python -m benchmarks.length_ranking --rows FOLDER/gsm8k/train.jsonl --model Qwen/Qwen2.5-0.5B
    python -m benchmarks.length_ranking --rows FOLDER/gsm8k/train.jsonl --model random --lr 1e-3

The responses are the data set's own solutions. Every prompt comes once, in steps, and is predicted
before its length is learnt, as in the first epoch of a run. The table also has chance, the length
of the prompt alone, and table 4 of StreamRL (2504.15930), with other prompts, responses and another
ranker.

With `--model`, n-grams and this language model rank together (`LanguageModelRanker`), and the
benchmark waits for the model after each step. `random` is a model of 0.9 million random weights: it
learns from the lengths alone.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks import arguments
from benchmarks.random_policy import make_tokenizer
from benchmarks.records import append, rounded
from lrl.routing.length_predictor import TAILS, LengthPredictor, recall
from lrl.routing.rankers import LanguageModelRanker, NgramRanker, Ranker
from lrl.types import Group, Prompt, Rollout

PAPER: dict[str, tuple[float, ...]] = {
    "StreamRL, Qwen2.5-7B": (0.87, 0.82, 0.76),
    "StreamRL, Qwen2.5-1.5B": (0.81, 0.75, 0.68),
}
RANDOM: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
RANDOM |= {"num_key_value_heads": 4, "max_position_embeddings": 1024, "tie_word_embeddings": True}
"""Shape of the made-up model."""
WORDS = re.compile(r"\d|[^\W\d]+|\S")
"""Words, single digits and signs: the tokens when no tokenizer is given."""


def main() -> None:
    """Learns step by step and prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=Path, required=True, help="JSON lines, one a prompt")
    parser.add_argument("--prompt", default="question", help="column (%(default)s)")
    parser.add_argument("--answer", default="answer", help="column (%(default)s)")
    parser.add_argument(
        "--tokenizer", help="name or folder of a Hugging Face tokenizer; default: words and signs"
    )
    parser.add_argument(
        "--model", help="of the ranker: a hub name, a folder, or random; default: n-grams alone"
    )
    parser.add_argument(
        "--device", help="of that model; default: the first CUDA device, else the CPU"
    )
    parser.add_argument("--lr", type=float, default=2e-5, help="of that model (%(default)s)")
    parser.add_argument("--passes", type=int, default=2, help="of that model (%(default)s)")
    parser.add_argument("--step", type=int, default=64, help="prompts of a step (%(default)s)")
    parser.add_argument(
        "--learn-first", type=int, default=1024, help="prompts that are not counted (%(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the order (%(default)s)")
    arguments.add_out(parser, "length_ranking")
    settings = parser.parse_args()
    groups = read(settings.rows, settings.prompt, settings.answer, tokens_of(settings.tokenizer))
    random.Random(settings.seed).shuffle(groups)
    with TemporaryDirectory() as folder, closing(make_ranker(settings, groups, folder)) as ranker:
        ranker.start()
        found, times = learn(groups, settings.step, settings.learn_first, ranker)
    for name, row in (found | PAPER).items():
        print(f"{name:<24}", *(f"{share:6.2f}" for share in row))
    print(*(f"{name} {value:.3g}" for name, value in times.items()), sep=", ")
    record = {
        "rows": settings.rows.name,
        "tokenizer": settings.tokenizer,
        "seed": settings.seed,
        "groups": len(groups),
    }
    if settings.model:
        record |= {name: getattr(settings, name) for name in ("model", "device", "lr", "passes")}
    append(
        settings.out,
        record | {"recall": found, "tails": TAILS} | {n: rounded(v) for n, v in times.items()},
    )


def tokens_of(tokenizer: str | None) -> Callable[[str], list[int]]:
    """Returns the function from text to token ids."""
    if tokenizer is not None:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(tokenizer).encode
    ids: dict[str, int] = {}
    return lambda text: [ids.setdefault(word, len(ids)) for word in WORDS.findall(text)]


def read(path: Path, prompt: str, answer: str, encode: Callable[[str], list[int]]) -> list[Group]:
    """Returns a group with one response of the right length for each row."""
    groups = []
    for index, line in enumerate(path.read_text().splitlines()):
        row = json.loads(line)
        asked = Prompt(id=index, token_ids=encode(row[prompt]), text=row[prompt])
        rollout = Rollout(token_ids=encode(row[answer]), finish_reason="stop")
        groups.append(Group(index=index, prompt=asked, rollouts=[rollout]))
    return groups


def make_ranker(settings: argparse.Namespace, groups: list[Group], folder: str) -> Ranker:
    """Returns the ranker of these settings; a made-up model goes to `folder`."""
    if settings.model is None:
        return NgramRanker()
    if settings.model != "random":
        return LanguageModelRanker(settings.model, settings.device, settings.lr, settings.passes)
    tokenizer = make_tokenizer([group.prompt.text for group in groups], 4096)
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **RANDOM)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return LanguageModelRanker(folder, settings.device, settings.lr, settings.passes)


def learn(
    groups: list[Group], step: int, learn_first: int, ranker: Ranker
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Predicts and learns, step by step.

    Returns:
        Recall of the longest 20, 10 and 5 % by the way of ranking; medians of the processor's
            microseconds for a guess
        and milliseconds for learning a step, in this process; with a language model also of its
            seconds a step, and the
        last correlations of both guesses with what was found.
    """
    lengths, expected = LengthPredictor(ranker=ranker), []
    guesses = []
    fits = []
    waits = []
    for start in tqdm(range(0, len(groups), step), unit="step", disable=None):
        part = groups[start : start + step]
        lengths.look_ahead([group.prompt for group in part])
        waits.append(wait_for(ranker))
        began = time.process_time()
        expected += [lengths.expected(group.prompt) for group in part]
        guesses.append((time.process_time() - began) / len(part) * 1e6)
        began = time.process_time()
        lengths.end_step(part)
        fits.append((time.process_time() - began) * 1e3)
        waits[-1] += wait_for(ranker)
    times = {"guess_us": median(guesses[1:]), "learn_ms": median(fits)}
    if isinstance(ranker, LanguageModelRanker):
        times |= {"model_s": median(waits[1:])} | ranker.metrics()
    return recalls(groups[learn_first:], expected[learn_first:]), times


def wait_for(ranker: Ranker) -> float:
    """Waits until a language model has learned everything it was given; returns the seconds."""
    began = time.perf_counter()
    if isinstance(ranker, LanguageModelRanker):
        ranker.wait(3600)
    return time.perf_counter() - began


def recalls(counted: list[Group], expected: list[float]) -> dict[str, list[float]]:
    """Returns the recall of each way of ranking; `expected` is lrl's."""
    truth = np.array([float(group.num_tokens) for group in counted])
    ways = {
        "length of the prompt": np.array([float(len(group.prompt.token_ids)) for group in counted]),
        "lrl": np.array(expected),
    }
    found = {
        name: [recall(guess, truth, tail / 100) for tail in TAILS] for name, guess in ways.items()
    }
    found["chance"] = [tail / 100 for tail in TAILS]
    return found


if __name__ == "__main__":
    main()
