"""Every objective once more: value and derivative per token, in Python floats and plain loops, from the formula.

Each function takes the responses of a micro-batch and gives, for every trained token in order, its loss and the
derivative of the sum of all losses by its log-prob. Weights that a paper holds fixed are fixed here.
"""

from __future__ import annotations

import math

from tests.objectives.responses import Answer, Token

Pair = tuple[float, float]


def weighted(responses: list[Answer], weight) -> list[Pair]:  # type: ignore[no-untyped-def]
    found = []
    for answer in responses:
        for token in answer.trained:
            w = weight(answer, token)
            found.append((-w * answer.advantage * token.pi, -w * answer.advantage))
    return found


def ratio(token: Token) -> float:
    return math.exp(token.pi) / math.exp(token.mu)


def answer_ratio(answer: Answer) -> float:
    """Product of the tokens' ratios, held in e^+-20 as the code holds it."""
    log = sum(token.pi - token.mu for token in answer.trained)
    return math.exp(min(max(log, -20.0), 20.0))


def reinforce(responses: list[Answer]) -> list[Pair]:
    return weighted(responses, lambda answer, token: 1.0)


def truncated(responses: list[Answer], cap: float) -> list[Pair]:
    return weighted(responses, lambda answer, token: min(ratio(token), cap))


def truncated_by_sequence(responses: list[Answer], cap: float) -> list[Pair]:
    return weighted(responses, lambda answer, token: min(answer_ratio(answer), cap))


def masked(responses: list[Answer], low: float, high: float) -> list[Pair]:
    return weighted(responses, lambda answer, token: ratio(token) if low <= ratio(token) <= high else 0.0)


def clipped_weight(responses: list[Answer], low: float, high: float) -> list[Pair]:
    return weighted(responses, lambda answer, token: min(max(ratio(token), 1 - low), 1 + high))


def tapered(responses: list[Answer]) -> list[Pair]:
    return weighted(responses, lambda answer, token: min(answer_ratio(answer), 1.0) if answer.advantage < 0 else 1.0)


def clip(u: float, advantage: float, low: float, high: float) -> Pair:
    """PPO's loss and its derivative by log u."""
    held = min(max(u, 1 - low), 1 + high)
    if u * advantage <= held * advantage:
        return -u * advantage, -u * advantage
    return -held * advantage, 0.0


def ppo(responses: list[Answer], low: float, high: float) -> list[Pair]:
    return [clip(ratio(token), answer.advantage, low, high) for answer in responses for token in answer.trained]


def decoupled_ppo(responses: list[Answer], low: float, high: float, max_weight: float) -> list[Pair]:
    found = []
    for answer in responses:
        for token in answer.trained:
            share = 1.0 if token.lag == 0 else 1 - 1 / token.lag
            proximal = token.mu + share * (token.pi - token.mu)
            weight = math.exp(proximal - token.mu)
            if weight > max_weight:
                weight = 0.0
            loss, derivative = clip(math.exp(token.pi - proximal), answer.advantage, low, high)
            found.append((weight * loss, weight * derivative))
    return found


def gspo(responses: list[Answer], low: float, high: float) -> list[Pair]:
    found = []
    for answer in responses:
        length = len(answer.trained)
        if not length:
            continue
        s = math.exp(sum(token.pi - token.mu for token in answer.trained) / length)
        # Each of the `length` tokens carries the loss, and d s / d log pi_t is s / length: they cancel.
        found += [clip(s, answer.advantage, low, high)] * length
    return found


def tba(responses: list[Answer], beta: float) -> list[Pair]:
    """An advantage is a reward less a number that its group shares, and the mean of c takes that away again."""
    found = []
    for answer in responses:
        mates = [other for other in responses if other.group == answer.group and other.trained]
        if not answer.trained:
            continue
        minus_c = {
            id(mate): sum(token.pi - token.ref for token in mate.trained) - mate.advantage / beta for mate in mates
        }
        imbalance = minus_c[id(answer)] - sum(minus_c.values()) / len(mates)
        # The paper's square times beta / 2; as often as the response has tokens.
        pair = (beta / 2 * imbalance**2, len(answer.trained) * beta * imbalance)
        found += [pair] * len(answer.trained)
    return found
