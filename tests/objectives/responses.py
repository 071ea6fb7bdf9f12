"""Responses as plain Python numbers, and the micro-batch that holds them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from lrl.objectives import Tokens
from lrl.types import MicroBatch

VERSION = 20


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
    """Returns the policy's log-probs [R, L], a leaf, and a micro-batch with a response a row;
    NaN elsewhere."""
    shape = (len(responses), 1 + max((len(response.tokens) for response in responses), default=0))
    numbers = {name: torch.full(shape, math.nan) for name in ("pi", "mu", "ref", "advantage")}
    whole = {name: torch.full(shape, -1) for name in ("version", "sequence", "group")}
    mask = torch.zeros(shape, dtype=torch.bool)
    for row, response in enumerate(responses):
        for column, token in enumerate(response.tokens):
            whole["sequence"][row, column], whole["group"][row, column] = row, response.group
            if token.trained:
                mask[row, column] = True
                numbers["pi"][row, column], numbers["mu"][row, column] = token.pi, token.mu
                numbers["ref"][row, column] = token.ref
                numbers["advantage"][row, column] = response.advantage
                whole["version"][row, column] = VERSION - token.lag
    zeros = torch.zeros(shape, dtype=torch.int64)
    micro = MicroBatch(
        input_ids=zeros,
        position_ids=zeros,
        labels=zeros,
        mask=mask,
        behaviour_logprobs=numbers["mu"],
        advantages=numbers["advantage"],
        versions=whole["version"],
        sequence_ids=whole["sequence"],
        group_ids=whole["group"],
        trained_elsewhere=zeros,
        temperature=1.0,
        reference_logprobs=numbers["ref"],
    )
    return numbers["pi"].requires_grad_(), micro


def tokens_of(responses: list[Response]) -> Tokens:
    logprobs, micro = columns(responses)
    return Tokens.select(logprobs, micro, VERSION)


logprob = st.floats(-8, 0, width=32)
sampled = st.builds(
    Token, pi=logprob, mu=logprob, ref=logprob, lag=st.integers(0, 5), trained=st.booleans()
)


def groups_of(token: st.SearchStrategy[Token]) -> st.SearchStrategy[list[Response]]:
    """Draws groups of one to four responses, also empty ones and equal rewards, with group-mean
    advantages."""
    rewards = st.one_of(
        st.lists(st.sampled_from([0.0, 0.5, 1.0, 7.0]), min_size=1, max_size=4),
        st.integers(1, 4).map(lambda n: [1.0] * n),
    )

    def group(number: int) -> st.SearchStrategy[list[Response]]:
        return rewards.flatmap(
            lambda found: st.tuples(*(st.lists(token, max_size=5) for _ in found)).map(
                lambda lists: [
                    Response(number, reward - sum(found) / len(found), list(tokens))
                    for reward, tokens in zip(found, lists, strict=True)
                ]
            )
        )

    return st.integers(1, 3).flatmap(
        lambda n: st.tuples(*map(group, range(n))).map(
            lambda lists: [response for one in lists for response in one]
        )
    )
