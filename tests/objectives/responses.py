"""Responses as plain Python numbers, and the micro-batch that holds them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from hypothesis import strategies as st

from lrl.objectives import Tokens
from lrl.training.collate import blank, fill_rows
from lrl.training.prefix_tree import PrefixTree, samples_of
from lrl.types import ENVIRONMENT, MicroBatch
from tests import made

VERSION = 20
EMPTY = replace(blank(), reference_logprobs=torch.zeros(1, 2))


@dataclass
class Token:
    """One sampled token; log-probs in nats."""

    pi: float
    mu: float
    ref: float
    lag: int
    trained: bool = True


@dataclass
class Response:
    """One response of a group."""

    group: int
    advantage: float
    tokens: list[Token]

    @property
    def trained(self) -> list[Token]:
        return [token for token in self.tokens if token.trained]


def columns(responses: list[Response]) -> tuple[torch.Tensor, MicroBatch]:
    """Returns the policy's log-probs [R, L], a leaf, NaN where no token is trained, and a micro-batch
    with a response a row."""
    rows = []
    for response in responses:
        rollout = made.rollout(
            len(response.tokens),
            logprobs=[token.mu for token in response.tokens],
            reference_logprobs=[token.ref for token in response.tokens],
            versions=[VERSION - one.lag if one.trained else ENVIRONMENT for one in response.tokens],
        )
        advantage = torch.tensor(response.advantage)
        samples = samples_of(made.group(response.group), rollout, advantage, rollout.mask)
        rows += [[PrefixTree([sample])] for sample in samples]
    micro = fill_rows(rows, temperature=1.0) if rows else EMPTY
    logprobs = torch.full(micro.mask.shape, math.nan)
    logprobs[micro.mask] = torch.tensor([one.pi for each in responses for one in each.trained])
    return logprobs.requires_grad_(), micro


def tokens_of(responses: list[Response]) -> Tokens:
    logprobs, micro = columns(responses)
    return Tokens.select(logprobs, micro, VERSION)


logprob = st.floats(-8, 0, width=32)
sampled = st.builds(
    Token, pi=logprob, mu=logprob, ref=logprob, lag=st.integers(0, 5), trained=st.booleans()
)


@st.composite
def groups(draw: st.DrawFn) -> list[Response]:
    """Draws groups of one to four responses, also empty ones and equal rewards, with group-mean
    advantages."""
    found = []
    for group in range(draw(st.integers(1, 3))):
        rewards = draw(st.lists(st.sampled_from([0.0, 0.5, 1.0, 7.0]), min_size=1, max_size=4))
        for reward in rewards:
            tokens = draw(st.lists(sampled, max_size=5))
            found.append(Response(group, reward - sum(rewards) / len(rewards), tokens))
    return found
