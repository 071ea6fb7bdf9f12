"""A game of several turns, a tiny policy that plays it, and training on it in one process.

The policy guesses a number below 64: three tokens a turn, two digits and an end. After each guess
it reads the bounds that are left, four digits, so the state is in the text. Six turns suffice for
63 of the 64 numbers. The reward is 1 in the turn that finds the number. There is no generator: the
policy itself writes the episodes of a step, in the trainer's process.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
import transformers
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import PreTrainedModel

import lrl
from lrl.advantages import Advantages
from lrl.rollouts.packing import Packer
from lrl.types import ENVIRONMENT, Group, MicroBatch, Prompt, Rollout

NUMBERS, TURNS = 64, 6
BEGIN, END, DIGIT_0, VOCABULARY = 0, 1, 2, 12
OWN, ANSWER = 3, 4
TURN = OWN + ANSWER
MICRO_BATCH_TOKENS = 100_000


def digits(numbers: Tensor) -> Tensor:
    """Returns the two tokens of each number: int64 [n, 2]."""
    return torch.stack([numbers // 10, numbers % 10], 1) + DIGIT_0


def answers(secret: Tensor, bounds: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the bounds after a guess, [n, 2], and whether it has found the number, [n].

    Args:
        secret: int64 [n].
        bounds: The least and the greatest number that are possible, int64 [n, 2].
        tokens: The turn, int64 [n, 3].
    """
    guess = (tokens[:, 0] - DIGIT_0) * 10 + tokens[:, 1] - DIGIT_0
    valid = (tokens[:, :2] >= DIGIT_0).all(1) & (tokens[:, 2] == END)
    valid &= (guess >= bounds[:, 0]) & (guess <= bounds[:, 1])
    low = torch.where(valid & (guess < secret), guess + 1, bounds[:, 0])
    high = torch.where(valid & (guess > secret), guess - 1, bounds[:, 1])
    return torch.stack([low, high], 1), valid & (guess == secret)


def shown(bounds: Tensor) -> Tensor:
    """Returns the tokens of bounds: int64 [n, 4]."""
    return torch.cat([digits(bounds[:, 0]), digits(bounds[:, 1])], 1)


def first_bounds(count: int) -> Tensor:
    """Returns the bounds before the first turn."""
    return torch.tensor([[0, NUMBERS - 1]]).repeat(count, 1)


def prompts(count: int) -> Tensor:
    """Returns the prompts of so many episodes, which are alike: int64 [n, 5]."""
    begin = torch.full((count, 1), BEGIN)
    return torch.cat([begin, shown(first_bounds(count))], 1)


def examples(count: int) -> tuple[Tensor, Tensor]:
    """Returns episodes of players who guess any number that is possible, and which of their tokens
    are to be learnt: [n, tokens] each."""
    secret, bounds = torch.randint(NUMBERS, (count,)), first_bounds(count)
    ids, own = [prompts(count)], [torch.zeros(count, 5, dtype=torch.bool)]
    playing = torch.ones(count, dtype=torch.bool)
    for _ in range(TURNS):
        width = bounds[:, 1] - bounds[:, 0] + 1
        guess = bounds[:, 0] + (torch.rand(count) * width).long()
        tokens = torch.cat([digits(guess), torch.full((count, 1), END)], 1)
        bounds, found = answers(secret, bounds, tokens)
        ids += [tokens, shown(bounds)]
        own += [playing[:, None].expand(-1, OWN), torch.zeros(count, ANSWER, dtype=torch.bool)]
        playing = playing & ~found
    return torch.cat(ids, 1), torch.cat(own, 1)


def make_policy(folder: Path, seed: int) -> str:
    """Makes a policy of 0.2 million parameters that plays like `examples`, unless the folder has it;
    returns the folder."""
    if (folder / "config.json").exists():
        return str(folder)
    torch.manual_seed(1000 + seed)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.06,
    )
    model = transformers.LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(400):
        optimizer.param_groups[0]["lr"] = 2e-3 * min(1, step / 20) * (1 - 0.95 * step / 400)
        ids, own = examples(64)
        logits = model(ids[:, :-1]).logits[own[:, 1:]]
        loss = torch.nn.functional.cross_entropy(logits, ids[:, 1:][own[:, 1:]])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.save_pretrained(folder)
    vocabulary = {f"t{number}": number for number in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="t0"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return str(folder)


@torch.no_grad()
def play(network: PreTrainedModel, secret: Tensor, version: int = 0) -> list[Rollout]:
    """Returns an episode of the policy for each number, int64 [n]."""
    count, bounds = len(secret), first_bounds(len(secret))
    rollouts = [Rollout(reward=0.0, finish_reason="turns") for _ in range(count)]
    cache, read = transformers.DynamicCache(config=network.config), prompts(count)
    playing = torch.ones(count, dtype=torch.bool)
    for turn in range(TURNS):
        tokens, logprobs = [], []
        for _ in range(OWN):
            logits = network(read, past_key_values=cache, use_cache=True).logits[:, -1]
            found = logits.log_softmax(-1)
            read = torch.multinomial(found.exp(), 1)
            tokens.append(read)
            logprobs.append(found.gather(1, read))
        written = torch.cat(tokens, 1)
        bounds, hit = answers(secret, bounds, written)
        answer = shown(bounds)
        read = torch.cat([read, answer], 1)
        probabilities = torch.cat(logprobs, 1).tolist()
        for number in playing.nonzero()[:, 0].tolist():
            record = rollouts[number]
            record.token_ids += written[number].tolist()
            record.logprobs += probabilities[number]
            record.versions += [version] * OWN
            record.turn_ends.append(len(record.token_ids))
            record.turn_rewards.append(float(hit[number]))
            if hit[number]:
                record.reward, record.finish_reason = 1.0, "stop"
            elif turn + 1 < TURNS:
                record.token_ids += answer[number].tolist()
                record.logprobs += [0.0] * ANSWER
                record.versions += [ENVIRONMENT] * ANSWER
        playing = playing & ~hit
    return rollouts


def groups_of(network: PreTrainedModel, groups: int, n: int, version: int = 0) -> list[Group]:
    """Returns groups of n episodes; a group has one number."""
    secret = torch.randint(NUMBERS, (groups,))
    rollouts = play(network, secret.repeat_interleave(n), version)
    row = prompts(1)[0].tolist()
    return [
        Group(
            index=version * groups + number,
            prompt=Prompt(id=0, token_ids=row, text=""),
            rollouts=rollouts[number * n : number * n + n],
        )
        for number in range(groups)
    ]


def wins(network: PreTrainedModel, episodes: int = 1024) -> float:
    """Returns the share of sampled episodes that find their number; the numbers are all alike
    often."""
    rollouts = play(network, torch.arange(NUMBERS).repeat(episodes // NUMBERS))
    return sum(one.reward or 0.0 for one in rollouts) / len(rollouts)


class Step:
    """One optimizer step, whose episodes are written when it is trained.

    Args:
        policy: The policy.
        advantages: The advantages.
        size: Groups of the step, and episodes of a group.
        replay: Older groups that it trains again.
    """

    def __init__(
        self,
        policy: lrl.PolicyModule,
        advantages: Advantages,
        size: tuple[int, int],
        replay: lrl.Replay | None,
    ) -> None:
        self.policy = policy
        self.size = size
        self.replay = replay
        self.fresh: list[Group] = []
        self.packer = Packer(MICRO_BATCH_TOKENS, advantages, 1.0)

    def __iter__(self) -> Iterator[MicroBatch]:
        version = self.policy.trainer.global_step
        for group in self.replay.draw(version) if self.replay else ():
            yield from self._packed(group, replayed=True)
        self.fresh = groups_of(self.policy.network, *self.size, version)
        for group in self.fresh:
            yield from self._packed(group)
        yield from _alone(self.packer.flush())

    def _packed(self, group: Group, replayed: bool = False) -> Iterator[MicroBatch]:
        self.policy.prepare(group, 1.0, MICRO_BATCH_TOKENS)
        return _alone(self.packer.add(group, replayed))

    @property
    def num_tokens(self) -> int:
        """See `lrl.types.Step`."""
        return self.packer.tokens

    @property
    def num_sequences(self) -> int:
        """See `lrl.types.Step`."""
        return self.packer.sequences

    def finish(self) -> None:
        """Gives the fresh groups to the replay."""
        if self.replay is not None:
            self.replay.add(self.policy.trainer.global_step - 1, self.fresh)


def _alone(rounds: Iterator[list[MicroBatch | None]]) -> Iterator[MicroBatch]:
    return (micro for each in rounds for micro in each if micro is not None)


class Steps:
    """The loader of a training: each step is made when Lightning asks for it."""

    def __init__(self, count: int, *step: Any) -> None:
        self.count = count
        self.step = step

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Step]:
        return (Step(*self.step) for _ in range(self.count))


def train(
    policy: lrl.PolicyModule,
    advantages: Advantages,
    steps: int,
    size: tuple[int, int],
    replay: lrl.Replay | None = None,
    callbacks: Sequence[L.Callback] = (),
) -> None:
    """Trains a policy for so many steps, with AdamW and schedule as in every run of lrl."""
    trainer = L.Trainer(
        accelerator="cpu",
        max_steps=steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=list(callbacks),
    )
    trainer.fit(policy, Steps(steps, policy, advantages, size, replay))
