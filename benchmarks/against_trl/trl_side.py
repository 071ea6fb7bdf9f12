"""TRL's side: one run of GRPOTrainer in TRL's own environment. `__main__` starts it; its argument
is a `Job` as JSON.

Of lrl it imports the task, the reward and the formula of the learning rate; none of them needs
lrl's dependencies.

`loss_type="dapo"` with one batch per optimizer step is the sum of token losses over all response
tokens of the step, end tokens included, as in lrl. TRL's rate would start at 0 and its optimizer be
another object; so both are made here.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from datasets import Dataset
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.against_trl import settings
from benchmarks.against_trl.settings import Clock, Job, finish_reason
from lrl.quickstart.task import correct
from lrl.training.schedule import lr_factor


class Reward:
    """lrl's reward under TRL's signature; counts its responses.

    Args:
        eos: The end token.
    """

    __name__ = "correct"

    def __init__(self, eos: int) -> None:
        self.eos = eos
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
        return [
            correct(prompt, completion, answer=right, finish_reason=finish_reason(ids, self.eos))
            for prompt, completion, ids, right in zip(
                prompts, completions, completion_ids, answer, strict=True
            )
        ]


class Measure(TrainerCallback):
    """Keeps the time of every step, and policies."""

    def __init__(self, job: Job, reward: Reward) -> None:
        self.job = job
        self.reward = reward
        self.clock = Clock(job)
        self._counted = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.clock.start(psutil.Process().create_time())

    def on_step_end(
        self, args: Any, state: Any, control: Any, model: Any, processing_class: Any, **_: Any
    ) -> None:
        self.clock.step_done(state.global_step, self.reward.seen - self._counted)
        self._counted = self.reward.seen
        if self.job.is_checkpoint(state.global_step):
            folder = self.job.checkpoint(state.global_step)
            model.save_pretrained(folder)
            processing_class.save_pretrained(folder)


def config(
    job: Job,
    groups: int = settings.GROUPS,
    rollouts: int = settings.ROLLOUTS,
    answer_tokens: int = settings.ANSWER_TOKENS,
    pieces: int = 1,
) -> GRPOConfig:
    """Returns the trainer's settings; a whole step is one batch, written at once and trained in so
    many pieces."""
    return GRPOConfig(
        output_dir=job.folder,
        use_cpu=True,
        bf16=False,
        seed=job.seed,
        max_steps=job.steps,
        per_device_train_batch_size=groups * rollouts // pieces,
        gradient_accumulation_steps=pieces,
        gradient_checkpointing=False,
        num_generations=rollouts,
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
    if tokenizer(text=[row["prompt"] for row in rows])["input_ids"] != [
        row["token_ids"] for row in rows
    ]:
        raise ValueError(
            f"TRL's tokens of a prompt in {job.prompts} are not lrl's; the comparison would not be "
            "fair."
        )
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=settings.LR, betas=settings.BETAS, weight_decay=settings.WEIGHT_DECAY
    )
    factor = partial(lr_factor, settings.SCHEDULE, settings.WARMUP_STEPS, job.steps)
    reward = Reward(tokenizer.eos_token_id)
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=config(job),
        train_dataset=Dataset.from_list(
            [{"prompt": row["prompt"], "answer": row["answer"]} for row in rows]
        ),
        processing_class=tokenizer,
        callbacks=[Measure(job, reward)],
        optimizers=(optimizer, LambdaLR(optimizer, factor)),
    )
    trainer.train()


if __name__ == "__main__":
    train(Job.read(sys.argv[1]))
