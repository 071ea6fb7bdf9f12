"""Tiny models, groups and steps for tests that open a policy or train one without generators."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedTokenizerFast

from lrl.advantages import Advantages, GroupMean
from lrl.objectives.base import denominator
from lrl.policy import PolicyModule
from lrl.rollouts.packing import Packer
from lrl.types import Group, MicroBatch
from tests import made

SIZES = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


def save_model(folder: Path, config: PreTrainedConfig) -> str:
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    vocab = {f"t{i}": i for i in range(32)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="t0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="t0").save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Runs a file on one thread: its tensors are so small that two threads take four times as
    long."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def opened(model: str, **settings: Any) -> PolicyModule:
    policy = PolicyModule(model, **settings)
    policy.configure_model()
    return policy


def adapted(policy: PolicyModule) -> PolicyModule:
    """Gives the policy's adapters, if it has any, weights that change what it computes."""
    torch.manual_seed(3)
    for name, weight in policy.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(weight, std=0.1)
    return policy


def response_logprobs(
    network: Any, prompt: list[int], response: list[int], temperature: float = 1.0
) -> torch.Tensor:
    """The log-probs of a response behind its prompt, [T], by a plain pass of a model of
    transformers."""
    tokens = torch.tensor([prompt + response])
    logits = network(input_ids=tokens, use_cache=False).logits[0, len(prompt) - 1 : -1]
    return (logits / temperature).log_softmax(-1)[range(len(response)), response]


def make_group(index: int, responses: int = 4, version: int = 0) -> Group:
    rng = random.Random(index)
    rollouts = []
    for n in [rng.randrange(1, 12) for _ in range(responses)]:
        token_ids = [rng.randrange(1, 32) for _ in range(n)]
        logprobs = [-8 * rng.random() for _ in range(n)]
        reward = float(rng.randrange(3))
        rollouts.append(made.rollout(token_ids, reward, version, logprobs=logprobs))
    prompt = [rng.randrange(1, 32) for _ in range(rng.randrange(1, 6))]
    return made.group(index, *rollouts, prompt=prompt)


def random_group(
    lengths: Sequence[int], prompt: Sequence[int], seed: int = 0, tokens: int = 259, index: int = 0
) -> Group:
    """Returns a group with a response of each length, without special tokens (below 3), rewarded by
    its number."""
    draw, rollouts = random.Random(seed), []
    for number, length in enumerate(lengths):
        token_ids = [draw.randrange(3, tokens) for _ in range(length)]
        rollouts.append(made.rollout(token_ids, float(number), logprobs=[-5.5] * length))
    return made.group(index, *rollouts, prompt=prompt)


GROUPS = [make_group(i) for i in range(4)]


def pack(
    groups: list[Group],
    budget: int = 64,
    temperature: float = 1.0,
    whole_groups: bool = False,
    advantages: Advantages | None = None,
    attention_tokens: int = 0,
) -> list[MicroBatch]:
    packer = Packer(
        budget,
        advantages or GroupMean(),
        temperature,
        whole_groups=whole_groups,
        attention_tokens=attention_tokens,
    )
    return packed(packer, groups)


def sizes(budget: int = 10_000, temperature: float = 1.0, attention_tokens: int = 0) -> Packer:
    """Returns a packer for the sizes of a policy's passes."""
    return Packer(budget, GroupMean(), temperature, attention_tokens=attention_tokens)


def packed(packer: Packer, groups: Sequence[Group]) -> list[MicroBatch]:
    """Returns all micro-batches of some groups."""
    rounds = [each for group in groups for each in packer.add(group)]
    return [micro for each in (*rounds, *packer.flush()) for micro in each if micro is not None]


@dataclass
class FakeStep:
    batches: list[MicroBatch]

    def __iter__(self) -> Iterator[MicroBatch]:
        yield from self.batches

    @property
    def num_tokens(self) -> int:
        return sum(batch.num_tokens for batch in self.batches)

    @property
    def num_sequences(self) -> int:
        return sum(batch.num_sequences for batch in self.batches)

    def finish(self) -> None:
        """Does nothing."""


def trainer(saves_in: Path | None = None, **settings: Any) -> L.Trainer:
    """Returns a quiet trainer that saves `step=N.ckpt` behind every step, if a folder is given."""
    if saves_in is not None:
        saving = ModelCheckpoint(saves_in, "{step}", every_n_train_steps=1, save_top_k=-1)
        settings |= {"callbacks": [saving], "enable_checkpointing": True}
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return L.Trainer(**{"accelerator": "cpu", "max_steps": 1, **quiet, **settings})


class Steps:
    """A loader with a length, like the data module's; Lightning would take a list for several
    loaders."""

    def __init__(self, steps: list[FakeStep]) -> None:
        self.steps = steps

    def __len__(self) -> int:
        return len(self.steps)

    def __iter__(self) -> Iterator[FakeStep]:
        yield from self.steps


def fit(
    policy: PolicyModule, steps: list[FakeStep], ckpt_path: str | None = None, **settings: Any
) -> L.Trainer:
    running = trainer(max_steps=len(steps), **settings)
    running.fit(policy, Steps(steps), ckpt_path=ckpt_path, weights_only=True)
    return running


def gradient(policy: PolicyModule, batches: list[MicroBatch]) -> torch.Tensor:
    """Returns the gradient of one step on `batches`, before clipping."""
    policy.zero_grad()
    for batch in batches:
        policy.compute_loss(batch).backward()
    divisor = denominator(policy.normalise_by, FakeStep(batches))
    gradients = [parameter.grad for parameter in policy.parameters() if parameter.requires_grad]
    return torch.cat([each.flatten() for each in gradients if each is not None]) / divisor
