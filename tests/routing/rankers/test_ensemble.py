"""The weighted sum of two guesses.

Covers lrl/routing/rankers/language_model.py.
"""

import numpy as np
import pytest

from lrl.routing.rankers.language_model import MIN_GUESSES, Ensemble, LanguageModelRanker
from tests.checkpoints.through_files import through_a_file

DRAW = np.random.default_rng(0)
FOUND, NOISE = DRAW.normal(size=300), DRAW.normal(size=300)


def judged(first: np.ndarray, second: np.ndarray, count: int = 300) -> Ensemble:
    blend = Ensemble()
    blend.judge(list(zip(first.tolist(), second.tolist(), FOUND.tolist(), strict=True))[:count])
    return blend


def test_each_guess_has_weight_by_its_accuracy() -> None:
    assert judged(NOISE, 0.5 * FOUND)(7.0, 0.5) == pytest.approx(1.0)
    assert judged(FOUND + 1.0, NOISE)(3.0, 7.0) == pytest.approx(2.0)


def test_two_guesses_with_independent_errors_are_better_than_either() -> None:
    first, second = FOUND + NOISE, FOUND + DRAW.normal(size=300)
    blend = judged(first, second)
    both = [blend(*pair) for pair in zip(first, second, strict=True)]
    alone = blend.correlations()
    assert alone is not None and min(alone) == pytest.approx(0.7, abs=0.1)
    assert np.corrcoef(both, FOUND)[0, 1] > max(alone) + 0.05


def test_the_first_guess_counts_alone_if_the_second_is_missing_or_has_few_judgements() -> None:
    assert judged(NOISE, FOUND)(5.0, None) == 5.0
    few = judged(NOISE, FOUND, MIN_GUESSES - 1)
    assert few(5.0, 1.0) == 5.0 and few.correlations() is None


def test_a_second_guess_without_information_does_no_harm() -> None:
    blend = judged(FOUND, np.zeros(300))
    assert blend(1.5, 0.0) == pytest.approx(1.5) and blend.correlations() == pytest.approx(
        (1.0, 0.0)
    )


def test_judgements_come_back_from_a_checkpoint() -> None:
    blend, resumed = judged(NOISE, FOUND), Ensemble()
    resumed.load_state_dict(through_a_file({"state": blend.state_dict()})["state"])
    assert resumed(1.0, 2.0) == pytest.approx(blend(1.0, 2.0), abs=1e-5)
    empty = Ensemble()
    empty.load_state_dict(Ensemble().state_dict())
    assert empty(1.0, 2.0) == 1.0


def test_judgements_of_another_models_guesses_are_not_restored() -> None:
    first = LanguageModelRanker("a/model", device="cpu")
    first._ensemble.judge(list(zip(NOISE.tolist(), FOUND.tolist(), FOUND.tolist(), strict=True)))
    state = through_a_file(first.state_dict())
    for model, knows in (("a/model", True), ("another/model", False)):
        resumed = LanguageModelRanker(model, device="cpu")
        resumed.load_state_dict(state)
        assert (resumed.metrics() != {}) == knows
