"""TRL's side of the comparison of speed, in TRL's own environment. `speed` starts it; its argument
is a `SpeedJob`.

The trainer's settings are those of the comparison of learning. TRL ends a response at the end token
alone, so that token is forbidden before a response's drawn length and forced at it: every response
has as many tokens as lrl's.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LogitsProcessor,
    LogitsProcessorList,
    TrainerCallback,
)
from trl import GRPOTrainer

from benchmarks.against_trl.settings import SpeedJob
from benchmarks.against_trl.trl_side import config
from benchmarks.random_policy import hashed


class Exactly(LogitsProcessor):
    """Ends each response at its drawn length.

    Args:
        prompt_tokens: Of the padded prompts.
        lengths: Tokens of each response, the end token included.
        eos: The end token.
    """

    def __init__(self, prompt_tokens: int, lengths: list[int], eos: int) -> None:
        self.prompt_tokens = prompt_tokens
        self.lengths = torch.tensor(lengths)
        self.eos = eos

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        scores[:, self.eos] = -torch.inf
        last = self.lengths == input_ids.shape[1] - self.prompt_tokens + 1
        scores[last] = -torch.inf
        scores[last, self.eos] = 0.0
        return scores


class Reward:
    """lrl's reward under TRL's signature."""

    __name__ = "hashed"

    def __call__(self, prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        return [
            hashed(prompt, completion)
            for prompt, completion in zip(prompts, completions, strict=True)
        ]


class Timed(GRPOTrainer):
    """TRL's trainer with the job's response lengths; keeps the seconds of writing."""

    def force(self, lengths: list[list[int]]) -> None:
        self.written_s = 0.0
        self.tokens = 0
        arriving = iter(lengths)
        generate = self.model.generate

        def forced(input_ids: torch.Tensor, **more: Any) -> Any:
            exact = Exactly(input_ids.shape[1], next(arriving), self.processing_class.eos_token_id)
            started = time.monotonic()
            found = generate(
                input_ids=input_ids, logits_processor=LogitsProcessorList([exact]), **more
            )
            self.written_s = time.monotonic() - started
            return found

        self.model.generate = forced

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        found = super()._generate_and_score_completions(inputs)
        self.tokens = int(found["completion_mask"].sum())
        return found


class Measure(TrainerCallback):
    """Writes a line for each step: its seconds, the seconds of writing responses, and their
    tokens."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.trainer: Any = None
        self._since = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._since = self._since or time.monotonic()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        now, trainer = time.monotonic(), self.trainer
        line = {"step": now - self._since, "writing": trainer.written_s, "tokens": trainer.tokens}
        self._since = now
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def train(job: SpeedJob) -> None:
    tokenizer = AutoTokenizer.from_pretrained(job.policy)
    model = AutoModelForCausalLM.from_pretrained(job.policy, dtype=torch.float32)
    rows = [json.loads(line) for line in Path(job.prompts).read_text().splitlines()]
    lengths = json.loads(Path(job.lengths).read_text())
    measure = Measure(job.clock)
    trainer = Timed(
        model=model,
        reward_funcs=Reward(),
        args=config(
            job, job.groups, job.rollouts, answer_tokens=max(map(max, lengths)), pieces=job.pieces
        ),
        train_dataset=Dataset.from_list([{"prompt": row["prompt"]} for row in rows]),
        processing_class=tokenizer,
        callbacks=[measure],
        optimizers=(torch.optim.AdamW(model.parameters(), lr=job.lr), None),
    )
    measure.trainer = trainer
    trainer.force(lengths)
    trainer.train()


if __name__ == "__main__":
    train(SpeedJob.read(sys.argv[1]))
