"""TRL's side: one run of GRPOTrainer in TRL's own environment; its argument is a `Job` as JSON.

Of lrl it imports the task and the reward; neither needs lrl's dependencies.

`loss_type="dapo"` with one batch per optimizer step is the sum of token losses over all response
tokens of the step, end tokens included, as in lrl. TRL's rate would start at 0 and its optimizer be
another object; so both are made here.

In a run that is only timed every response has as many tokens as lrl's: TRL ends a response at the
end token alone, so that token is forbidden before a response's drawn length and forced at it.
"""

from __future__ import annotations

import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from datasets import Dataset
from torch.optim.lr_scheduler import LambdaLR
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LogitsProcessor,
    LogitsProcessorList,
    TrainerCallback,
)
from trl import GRPOConfig, GRPOTrainer

from benchmarks.against_trl import settings
from benchmarks.against_trl.settings import Clock, Job, finish_reason
from benchmarks.random_policy import hashed
from lrl.quickstart.task import correct


def lr_factor(step: int, steps: int) -> float:
    """The same as `lrl.training.optimizers.lr_factor` of a linear schedule."""
    warmup = settings.WARMUP_STEPS
    if step < warmup:
        return (step + 1) / warmup
    return 1.0 - min(1.0, (step - warmup) / max(1, steps - warmup))


class Reward:
    """lrl's reward under TRL's signature; counts its responses."""

    __name__ = "reward"

    def __init__(self, eos: int, timed: bool) -> None:
        self.eos = eos
        self.timed = timed
        self.seen = 0

    def __call__(
        self,
        prompts: list[str],
        completions: list[str],
        completion_ids: list[list[int]],
        answer: list[str],
        **_: Any,
    ) -> list[float]:
        self.seen += len(completions)
        if self.timed:
            return list(map(hashed, prompts, completions))
        return [
            correct(prompt, completion, answer=right, finish_reason=finish_reason(ids, self.eos))
            for prompt, completion, ids, right in zip(
                prompts, completions, completion_ids, answer, strict=True
            )
        ]


class Exactly(LogitsProcessor):
    """Ends each response at its drawn length, the end token included."""

    def __init__(self, prompt_tokens: int, lengths: list[int], eos: int) -> None:
        self.prompt_tokens = prompt_tokens
        self.lengths = torch.tensor(lengths)
        self.eos = eos

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        last = self.lengths == input_ids.shape[1] - self.prompt_tokens + 1
        scores = scores.clone()
        scores[last] = -torch.inf
        scores[:, self.eos] = torch.where(last, 0.0, -torch.inf)
        return scores


class Trainer(GRPOTrainer):
    """TRL's trainer; it may write drawn lengths, and keeps the seconds and tokens of writing."""

    writing = 0.0
    tokens = 0

    def force(self, lengths: list[list[int]]) -> None:
        arriving = iter(lengths)
        generate = self.model.generate

        def forced(input_ids: torch.Tensor, **more: Any) -> Any:
            exact = Exactly(input_ids.shape[1], next(arriving), self.processing_class.eos_token_id)
            started = time.monotonic()
            found = generate(
                input_ids=input_ids, logits_processor=LogitsProcessorList([exact]), **more
            )
            self.writing = time.monotonic() - started
            return found

        self.model.generate = forced

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        found = super()._generate_and_score_completions(inputs)
        self.tokens = int(found["completion_mask"].sum())
        return found


class Measure(TrainerCallback):
    """Keeps the time of every step, and policies."""

    def __init__(self, job: Job, reward: Reward) -> None:
        self.job = job
        self.reward = reward
        self.clock = Clock(job)
        self.trainer: Any = None
        self._counted = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.clock.start(psutil.Process().create_time())

    def on_step_end(
        self, args: Any, state: Any, control: Any, model: Any, processing_class: Any, **_: Any
    ) -> None:
        written = {"writing": self.trainer.writing, "tokens": self.trainer.tokens}
        self.clock.step_done(state.global_step, self.reward.seen - self._counted, **written)
        self._counted = self.reward.seen
        if self.job.is_checkpoint(state.global_step):
            folder = self.job.checkpoint(state.global_step)
            model.save_pretrained(folder)
            processing_class.save_pretrained(folder)


def config(job: Job, answer_tokens: int) -> GRPOConfig:
    """Returns the trainer's settings; a whole step is one batch, written at once and trained in its
    pieces."""
    return GRPOConfig(
        output_dir=job.folder,
        use_cpu=True,
        bf16=False,
        seed=job.seed,
        max_steps=job.steps,
        per_device_train_batch_size=job.groups * job.rollouts // job.pieces,
        gradient_accumulation_steps=job.pieces,
        gradient_checkpointing=False,
        num_generations=job.rollouts,
        num_iterations=1,
        shuffle_dataset=False,
        max_completion_length=answer_tokens,
        temperature=settings.TEMPERATURE,
        top_p=1.0,
        top_k=0,
        beta=0.0,
        scale_rewards="none",
        loss_type="dapo",
        max_grad_norm=settings.MAX_GRAD_NORM,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def train(job: Job) -> None:
    tokenizer = AutoTokenizer.from_pretrained(job.policy)
    model = AutoModelForCausalLM.from_pretrained(job.policy, dtype=torch.float32)
    rows = [json.loads(line) for line in Path(job.prompts).read_text().splitlines()]
    lengths = json.loads(Path(job.lengths).read_text()) if job.lengths else []
    known = [row["token_ids"] for row in rows if "token_ids" in row]
    if known and tokenizer(text=[row["prompt"] for row in rows])["input_ids"] != known:
        raise ValueError(
            f"TRL's tokens of a prompt in {job.prompts} are not lrl's; the comparison would not be "
            "fair."
        )
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=job.lr, betas=settings.BETAS, weight_decay=settings.WEIGHT_DECAY
    )
    factor = partial(lr_factor, steps=job.steps)
    reward = Reward(tokenizer.eos_token_id, timed=bool(lengths))
    measure = Measure(job, reward)
    measure.trainer = trainer = Trainer(
        model=model,
        reward_funcs=reward,
        args=config(job, max(map(max, lengths), default=settings.ANSWER_TOKENS)),
        train_dataset=Dataset.from_list(
            [{"prompt": row["prompt"], "answer": row["answer"]} for row in rows]
        ),
        processing_class=tokenizer,
        callbacks=[measure],
        optimizers=(optimizer, LambdaLR(optimizer, factor)),
    )
    if lengths:
        trainer.force(lengths)
    trainer.train()


if __name__ == "__main__":
    train(Job(**json.loads(sys.argv[1])))
