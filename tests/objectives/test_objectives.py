"""Every objective against its formula in plain arithmetic, on the examples of Hypothesis.

Covers lrl/objectives/base.py, aipo.py, cispo.py, decoupled_ppo.py, gspo.py, icepop.py, ppo.py,
reinforce.py, tba.py, tis.py, topr.py.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import example, given, settings

from lrl.errors import ConfigError
from lrl.objectives import (
    AIPO,
    CISPO,
    GSPO,
    PPO,
    REINFORCE,
    TBA,
    TIS,
    TOPR,
    DecoupledPPO,
    IcePop,
    Objective,
    Tokens,
)
from tests import made
from tests.objectives import formulas
from tests.objectives.formulas import ratio, response_ratio, weighted
from tests.objectives.responses import VERSION, Response, Token, columns, groups
from tests.policies import pack

CASES: dict[str, tuple[Objective, formulas.Formula]] = {
    "AIPO": (AIPO(2.0), weighted(lambda _, token: min(ratio(token), 2.0))),
    "REINFORCE": (REINFORCE(), weighted(lambda *_: 1.0)),
    "PPO": (PPO(0.2, 0.28), partial(formulas.ppo, low=0.2, high=0.28)),
    "DecoupledPPO": (
        DecoupledPPO(0.2, 0.3, max_weight=5.0),
        partial(formulas.decoupled_ppo, low=0.2, high=0.3, max_weight=5.0),
    ),
    "TIS": (TIS(3.0), weighted(lambda _, token: min(ratio(token), 3.0))),
    "TIS by sequence": (
        TIS(3.0, "sequence"),
        weighted(lambda response, _: min(response_ratio(response), 3.0)),
    ),
    "IcePop": (
        IcePop(0.5, 5.0),
        weighted(lambda _, token: ratio(token) if 0.5 <= ratio(token) <= 5.0 else 0.0),
    ),
    "CISPO": (CISPO(0.4, 1.5), weighted(lambda _, token: min(max(ratio(token), 0.6), 2.5))),
    "GSPO": (GSPO(0.1, 0.2), partial(formulas.gspo, low=0.1, high=0.2)),
    "TOPR": (
        TOPR(),
        weighted(lambda one, _: min(response_ratio(one), 1.0) if one.advantage < 0 else 1.0),
    ),
    "TBA": (TBA(0.5), partial(formulas.tba, beta=0.5)),
}
GRID = [
    Response(0, advantage, [Token(-4.0, -4.0 - 0.21 * step, -3.0, lag=step % 4)])
    for step in range(-18, 19)
    for advantage in (-1.0, 1.0)
]
"""Responses of one token with log-ratios from -3.8 to 3.8: on both sides of every bound."""


def gradient(objective: Objective, responses: list[Response]) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns losses of the trained tokens, and the gradient of their sum by their log-probs. What
    is masked has no gradient, though it is NaN."""
    logprobs, micro = columns(responses)
    losses = objective.token_losses(Tokens.select(logprobs, micro, VERSION))
    losses.sum().backward()
    assert not logprobs.grad[~micro.mask].any()
    return losses.detach(), logprobs.grad[micro.mask]


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=60, deadline=None)
@given(responses=groups())
@example(responses=GRID)
@example(responses=[Response(0, 1.0, [])])
def test_value_and_gradient_are_the_formula(name: str, responses: list[Response]) -> None:
    objective, formula = CASES[name]
    expected = formula(responses)
    losses, slopes = gradient(objective, responses)
    assert losses.tolist() == pytest.approx([loss for loss, _ in expected], rel=2e-4, abs=1e-4)
    assert slopes.tolist() == pytest.approx([slope for _, slope in expected], rel=2e-4, abs=1e-4)


@pytest.mark.parametrize("name", CASES)
def test_an_extreme_ratio_stays_finite(name: str) -> None:
    objective = CASES[name][0]
    responses = [
        Response(0, 1.0, [Token(0.0, -300.0, -1.0, 3), Token(-300.0, 0.0, -1.0, 0)]),
        Response(0, -1.0, [Token(-300.0, 0.0, -1.0, 1), Token(0.0, -300.0, -1.0, 2)]),
    ]
    assert all(torch.isfinite(each).all() for each in gradient(objective, responses))


@pytest.mark.parametrize("name", CASES)
def test_a_response_without_its_old_tokens_is_weighed_token_by_token_or_not_at_all(
    name: str,
) -> None:
    objective = CASES[name][0]
    numbers = {"logprobs": [-1.0, -1.2, -1.4, -1.6], "reference_logprobs": [-1.0] * 4}
    cut = made.rollout([5, 6, 7, 8], 0.0, versions=[0, 0, 1, 1], **numbers)
    group = made.group(0, cut, made.rollout([5, 6, 7, 8], 1.0, version=1, **numbers))

    def losses(oldest_version: int | None) -> list[list[float]]:
        """Returns the losses of each response, under a policy that has moved by half a nat a
        token."""
        (micro,) = pack([group], 99, oldest_version=oldest_version, whole_groups=True)
        tokens = Tokens.select(micro.behaviour_logprobs + 0.5, micro, 2)
        found = objective.token_losses(tokens)
        return [found[tokens.responses == response].tolist() for response in range(2)]

    whole = losses(None)
    if objective.whole_responses:
        with pytest.raises(
            ConfigError, match=r"data\.stragglers mask has left out .* set data\.stragglers to wait"
        ):
            losses(1)
    else:
        assert losses(1) == [whole[0][2:], whole[1]]
