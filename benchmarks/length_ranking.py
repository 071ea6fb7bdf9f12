"""How well the longest answers are known before they are written, on real prompts and without a generator.

    python -m benchmarks.length_ranking --rows ../shared/data/gsm8k/train.jsonl

The answers are the data set's own solutions. Every prompt comes once, in steps, and each is expected before its length
is learnt, as in the first epoch of a run. Beside it stand chance, the bare length of the prompt, and table 4 of
StreamRL (2504.15930), whose prompts, answers and ranker are others.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.records import append, rounded
from lrl.data import Group, Prompt, Rollout
from lrl.rollouts.lengths import TAILS, Lengths, recall

PAPER = {"StreamRL, Qwen2.5-7B": (0.87, 0.82, 0.76), "StreamRL, Qwen2.5-1.5B": (0.81, 0.75, 0.68)}
WORDS = re.compile(r"\d|[^\W\d]+|\S")
"""Words, single digits and signs: what stands for tokens when no tokenizer is given."""


def main() -> None:
    """Learn step by step and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, required=True, help="JSON lines, one a prompt")
    parser.add_argument("--prompt", default="question", help="column (%(default)s)")
    parser.add_argument("--answer", default="answer", help="column (%(default)s)")
    parser.add_argument("--tokenizer", help="name or folder of a Hugging Face tokenizer; default: words and signs")
    parser.add_argument("--step", type=int, default=64, help="prompts of a step (%(default)s)")
    parser.add_argument("--learn-first", type=int, default=1024, help="prompts that are not counted (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the order (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/length_ranking.jsonl"))
    settings = parser.parse_args()
    groups = read(settings.rows, settings.prompt, settings.answer, tokens_of(settings.tokenizer))
    random.Random(settings.seed).shuffle(groups)
    found, times = learn(groups, settings.step, settings.learn_first)
    for name, row in (found | PAPER).items():
        print(f"{name:<24}", *(f"{share:6.2f}" for share in row))
    print(*(f"{name} {value:.3g}" for name, value in times.items()), sep=", ")
    record = {"rows": settings.rows.name, "tokenizer": settings.tokenizer, "seed": settings.seed, "groups": len(groups)}
    append(settings.out, record | {"recall": found, "tails": TAILS} | {n: rounded(v) for n, v in times.items()})


def tokens_of(tokenizer: str | None) -> Callable[[str], list[int]]:
    """Text to token ids."""
    if tokenizer is not None:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(tokenizer).encode
    ids: dict[str, int] = {}
    return lambda text: [ids.setdefault(word, len(ids)) for word in WORDS.findall(text)]


def read(path: Path, prompt: str, answer: str, encode: Callable[[str], list[int]]) -> list[Group]:
    """A group with one answer of the right length for each row."""
    groups = []
    for index, line in enumerate(path.read_text().splitlines()):
        row = json.loads(line)
        asked = Prompt(id=index, token_ids=encode(row[prompt]), text=row[prompt])
        rollout = Rollout(token_ids=encode(row[answer]), finish_reason="stop")
        groups.append(Group(index=index, prompt=asked, rollouts=[rollout]))
    return groups


def learn(groups: list[Group], step: int, learn_first: int) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Expect and learn, step by step.

    Returns:
        Recall of the longest 20, 10 and 5 % by the way of ranking; medians of the processor's microseconds for a guess
        and milliseconds for learning a step.
    """
    lengths, expected = Lengths(), []
    guesses, fits = [], []
    for start in range(0, len(groups), step):
        part = groups[start : start + step]
        began = time.process_time()
        expected += [lengths.expected(group.prompt) for group in part]
        guesses.append((time.process_time() - began) / len(part) * 1e6)
        began = time.process_time()
        lengths.end_step(part)
        fits.append((time.process_time() - began) * 1e3)
    counted = groups[learn_first:]
    truth = np.array([float(group.num_tokens) for group in counted])
    ways = {
        "length of the prompt": np.array([float(len(group.prompt.token_ids)) for group in counted]),
        "lrl": np.array(expected[learn_first:]),
    }
    found = {name: [recall(guess, truth, tail / 100) for tail in TAILS] for name, guess in ways.items()}
    found["chance"] = [tail / 100 for tail in TAILS]
    return found, {"guess_us": median(guesses[1:]), "learn_ms": median(fits)}


if __name__ == "__main__":
    main()
