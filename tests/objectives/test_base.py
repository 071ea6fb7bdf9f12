"""The metrics of a step, over all tokens and for every lag."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lrl.objectives import AIPO, PPO, Diagnostics
from lrl.objectives.base import MAX_LAG_SHOWN
from tests.objectives.responses import VERSION, Response, Token, groups, tokens_of


def result(responses: list[Response], objective: AIPO | PPO) -> dict[str, float]:
    diagnostics = Diagnostics(VERSION)
    diagnostics.add(objective, tokens_of(responses))
    return diagnostics.result()


@settings(max_examples=50, deadline=None)
@given(groups(), st.integers(0, 12))
def test_diagnostics_do_not_depend_on_micro_batches(responses: list[Response], cut: int) -> None:
    parts = Diagnostics(VERSION)
    for part in (responses[:cut], responses[cut:]):
        if part:
            parts.add(AIPO(2.0), tokens_of(part))
    assert parts.result() == pytest.approx(result(responses, AIPO(2.0)), rel=1e-4, abs=1e-6)


def test_diagnostics_have_their_defined_values() -> None:
    # One token of lag 2 whose ratio 3 is cut to 2, and one of lag 0 on which both programs agree.
    lagging, fresh = Token(0.0, -math.log(3), -0.5, 2), Token(-1.0, -1.0, -1.0, 0)
    responses = [Response(0, 1.0, [lagging, fresh, Token(-9, 0, 0, 0, trained=False)])]
    assert result(responses, AIPO(2.0)) == pytest.approx(
        {
            "ratio_mean": 2.0,
            "ratio_max": 3.0,
            "clip_fraction": 0.5,
            "ess": 4.0**2 / (2 * 10.0),
            "kl_behaviour": (3 - 1 - math.log(3)) / 2,
            "lag_mean": 1.0,
            "lag_max": 2.0,
            "kl_reference": (math.exp(-0.5) - 1 + 0.5) / 2,
            "mismatch_kl": 0.0,
            "mismatch_mean": 0.0,
            "mismatch_max": 0.0,
            "by_lag/0/ratio_mean": 1.0,
            "by_lag/0/ratio_max": 1.0,
            "by_lag/0/clip_fraction": 0.0,
            "by_lag/0/ess": 1.0,
            "by_lag/0/kl_behaviour": 0.0,
            "by_lag/0/share": 0.5,
            "by_lag/2/ratio_mean": 3.0,
            "by_lag/2/ratio_max": 3.0,
            "by_lag/2/clip_fraction": 1.0,
            "by_lag/2/ess": 1.0,
            "by_lag/2/kl_behaviour": 3 - 1 - math.log(3),
            "by_lag/2/share": 0.5,
        },
        abs=1e-6,
    )


def test_mismatch_is_measured_where_the_policy_wrote_the_token_itself() -> None:
    responses = [Response(0, 1.0, [Token(-1.0, -1.25, 0.0, 0), Token(-1.0, -5.0, 0.0, 1)])]
    found = result(responses, AIPO())
    assert found["mismatch_max"] == pytest.approx(0.25)
    assert found["mismatch_mean"] == pytest.approx(0.25)
    assert found["mismatch_kl"] == pytest.approx(math.exp(0.25) - 1.25)
    assert "mismatch_max" not in result([Response(0, 1.0, [Token(-1.0, -5.0, 0.0, 1)])], AIPO())


def test_large_lags_share_a_row() -> None:
    lags = (MAX_LAG_SHOWN, MAX_LAG_SHOWN + 3, 1)
    found = result([Response(0, 1.0, [Token(-1.0, -1.0, 0.0, lag) for lag in lags])], AIPO())
    assert found[f"by_lag/{MAX_LAG_SHOWN}/share"] == pytest.approx(2 / 3)
    assert found["lag_max"] == MAX_LAG_SHOWN + 3
    assert not any(name.startswith(f"by_lag/{MAX_LAG_SHOWN + 3}/") for name in found)
