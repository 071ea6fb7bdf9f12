"""What becomes of keys and values at a sync, on a real vLLM server: what is computed again, and by
which weights.

Covers lrl/weights/sync.py.
"""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from lrl.generators.generator import Generator, KeysAndValues
from lrl.routing.dispatch import Request
from lrl.types import Prompt, Rollout, Sampling
from lrl.weights.shared_memory import SharedMemory
from tests.lent_server import LentServer, metric
from tests.tiny_policies import response_logprobs
from tests.weights.scene import Scene
from tests.weights.whole_weights import WholeWeights

PROMPTS = [Prompt(id=number, token_ids=[5 + number] * 40, text="") for number in range(3)]
SAMPLING = Sampling(n=4, max_tokens=96)
PREEMPTIONS = "num_preemptions_total"
LATE = 16
"""Tokens of a response that may come after the answer to a pause, which they were sent before."""
CLOSE = 2e-3
"""Nats between two programs that compute the same in float32; other keys and values make more than
ten times that."""


class OneGenerator(Scene):
    def __init__(self, server: LentServer, keys_and_values: KeysAndValues) -> None:
        self.server = server
        self.keeps = keys_and_values == "keep"
        self.generator = Generator(server, 64)
        super().__init__(
            [self.generator],
            WholeWeights(lambda: iter(())),
            SharedMemory,
            name="keys",
            keys_and_values=keys_and_values,
        )

    def sync(self, model: Any, version: int) -> None:
        self.syncs.transport.policy = WholeWeights(model.named_parameters)
        assert self.syncs.sync_now(version) == {}
        assert self.syncs.wait() == {}

    def ask(self, prompt: Prompt, rollouts: list[Rollout]) -> Any:
        request = Request(prompt, rollouts, priority=0, sampling=SAMPLING, deadline_s=60.0)
        return self.loop.submit(self.generator.write(request))


@pytest.fixture
def one(lent_server: LentServer, request: pytest.FixtureRequest) -> Iterator[OneGenerator]:
    generator = OneGenerator(lent_server, request.param)
    yield generator
    generator.close()


@pytest.fixture(scope="module")
def models(policy_folder: Path) -> tuple[Any, Any]:
    """Two versions, some tenths of a nat apart."""
    old = AutoModelForCausalLM.from_pretrained(policy_folder)
    new = copy.deepcopy(old)
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in new.parameters():
            if weight.dim() > 1:
                weight += 0.1 * weight.std() * torch.randn_like(weight)
    return old, new


@pytest.mark.parametrize("one", ["recompute", "keep"], indirect=True)
def test_a_response_written_over_a_sync_continues_on_the_keys_and_values_that_the_setting_names(
    one: OneGenerator, models: tuple[Any, Any]
) -> None:
    old, new = models
    keeps, version, before = one.keeps, itertools.count(), metric(one.server, PREEMPTIONS)
    rollouts: list[list[Rollout]] = []
    end = time.monotonic() + 60
    while not (carried := [one for one in chain(*rollouts) if len(set(one.versions)) == 2]):
        assert time.monotonic() < end, "no sync fell between first and last token of an answer"
        one.sync(old, next(version))
        one.syncs.recomputed_tokens = 0
        rollouts = [[Rollout() for _ in range(SAMPLING.n)] for _ in PROMPTS]
        writing = [one.ask(prompt, group) for prompt, group in zip(PROMPTS, rollouts, strict=True)]
        while not all(rollout.token_ids for rollout in chain(*rollouts)):
            time.sleep(0.001)
        one.sync(new, newest := next(version))
        for future in writing:
            future.result(60)

    read_again = 0
    for prompt, group in zip(PROMPTS, rollouts, strict=True):
        for rollout in group:
            place = [*rollout.versions, newest].index(newest)
            found = torch.tensor(rollout.logprobs)
            assert (found - logprobs(old, prompt, rollout))[:place].abs().max() < CLOSE
            if place < len(rollout.token_ids):
                read_again += len(prompt.token_ids) + place
                expected = logprobs(new, prompt, rollout)[place:]
                if keeps:
                    expected = mixed(old, new, prompt, rollout, place)
                assert (found[place:] - expected).abs().max() < CLOSE

    assert metric(one.server, PREEMPTIONS) - before == (0 if keeps else len(carried))
    ended = len(PROMPTS) * SAMPLING.n - len(carried)  # the news of it may have been on its way
    slack = LATE * len(carried) + (len(PROMPTS[0].token_ids) + SAMPLING.max_tokens) * ended
    if keeps:
        read_again = slack = 0
    assert abs(one.syncs.recomputed_tokens - read_again) <= slack


@pytest.mark.parametrize("one", ["keep"], indirect=True)
def test_a_new_response_starts_on_no_keys_and_values_of_older_weights(
    one: OneGenerator, models: tuple[Any, Any]
) -> None:
    for version, model in enumerate(models):
        one.sync(model, version)
        rollouts = [Rollout() for _ in range(SAMPLING.n)]
        one.ask(PROMPTS[0], rollouts).result(60)
        for rollout in rollouts:
            found = torch.tensor(rollout.logprobs)
            assert (found - logprobs(model, PROMPTS[0], rollout)).abs().max() < CLOSE


@torch.no_grad()
def logprobs(model: Any, prompt: Prompt, rollout: Rollout) -> Tensor:
    """[T], of all of its tokens."""
    return response_logprobs(model, prompt.token_ids, rollout.token_ids)


@torch.no_grad()
def mixed(old: Any, new: Any, prompt: Prompt, rollout: Rollout, place: int) -> Tensor:
    """[T - place], of the tokens from `place` on: `new` over the keys and values of `old`."""
    tokens, first = prompt.token_ids + rollout.token_ids, len(prompt.token_ids) + place - 1
    past = old(torch.tensor([tokens[:first]]), use_cache=True).past_key_values
    logits = new(torch.tensor([tokens[first:]]), past_key_values=past).logits[0, :-1]
    response = rollout.token_ids[place:]
    return logits.log_softmax(-1)[range(len(response)), response]
