"""Every objective a second time, from its formula: value and derivative per token, in Python floats
and plain loops.

Each function takes the responses of a micro-batch and returns, for every trained token in order,
its loss and the derivative of the sum of all losses by its log-prob. Weights that a paper detaches
are constants here.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from tests.objectives.responses import Response, Token

Pair = tuple[float, float]
Formula = Callable[[list[Response]], list[Pair]]


def weighted(weight: Callable[[Response, Token], float]) -> Formula:
    """A policy gradient with a weight for each token."""

    def formula(responses: list[Response]) -> list[Pair]:
        found = []
        for response in responses:
            for token in response.trained:
                scale = -weight(response, token) * response.advantage
                found.append((scale * token.pi, scale))
        return found

    return formula


def ratio(token: Token) -> float:
    return math.exp(token.pi) / math.exp(token.mu)


def response_ratio(response: Response) -> float:
    """Product of the tokens' ratios, clamped to e^+-20 as in the code."""
    log = sum(token.pi - token.mu for token in response.trained)
    return math.exp(min(max(log, -20.0), 20.0))


def clip(u: float, advantage: float, low: float, high: float) -> Pair:
    """PPO's loss and its derivative by log u."""
    held = min(max(u, 1 - low), 1 + high)
    if u * advantage <= held * advantage:
        return -u * advantage, -u * advantage
    return -held * advantage, 0.0


def ppo(responses: list[Response], low: float, high: float) -> list[Pair]:
    return [
        clip(ratio(token), response.advantage, low, high)
        for response in responses
        for token in response.trained
    ]


def decoupled_ppo(
    responses: list[Response], low: float, high: float, max_weight: float
) -> list[Pair]:
    found = []
    for response in responses:
        for token in response.trained:
            share = 1.0 if token.lag == 0 else 1 - 1 / token.lag
            proximal = token.mu + share * (token.pi - token.mu)
            weight = math.exp(proximal - token.mu)
            if weight > max_weight:
                weight = 0.0
            loss, derivative = clip(math.exp(token.pi - proximal), response.advantage, low, high)
            found.append((weight * loss, weight * derivative))
    return found


def gspo(responses: list[Response], low: float, high: float) -> list[Pair]:
    found = []
    for response in responses:
        length = len(response.trained)
        if not length:
            continue
        s = math.exp(sum(token.pi - token.mu for token in response.trained) / length)
        # Each of the `length` tokens carries the loss, and d s / d log pi_t is s / length: they
        # cancel.
        found += [clip(s, response.advantage, low, high)] * length
    return found


def tba(responses: list[Response], beta: float) -> list[Pair]:
    """Uses advantages for rewards: they differ by a number that the group shares, and the mean of c
    removes it."""
    found = []
    for response in responses:
        mates = [other for other in responses if other.group == response.group and other.trained]
        if not response.trained:
            continue
        minus_c = {
            id(mate): sum(token.pi - token.ref for token in mate.trained) - mate.advantage / beta
            for mate in mates
        }
        imbalance = minus_c[id(response)] - sum(minus_c.values()) / len(mates)
        # The paper's square times beta / 2; as often as the response has tokens.
        pair = (beta / 2 * imbalance**2, len(response.trained) * beta * imbalance)
        found += [pair] * len(response.trained)
    return found
