"""The features of the n-gram ranker."""

import numpy as np
import pytest

from lrl.routing.rankers import NgramRanker
from lrl.routing.rankers.ngrams import BUCKETS, MAX_PROMPT_TOKENS, features


def test_similar_prompts_have_similar_features_and_long_ones_bounded_features() -> None:
    (places, values), (others, _) = features([5, 6, 7, 8]), features([5, 6, 7, 9])
    # Three words, two pairs, the length.
    assert len(places) == 8 and len(set(places) & set(others)) == 6
    assert places.max() < BUCKETS and np.linalg.norm(values[:-1]) == pytest.approx(1)
    assert (
        len(features(list(range(10 * MAX_PROMPT_TOKENS)))[0]) <= 2 * MAX_PROMPT_TOKENS
        and len(features([])[0]) == 1
    )


def test_a_setting_outside_its_range_is_named() -> None:
    with pytest.raises(ValueError, match="data.length_predictor.ranker.fitted_prompts is 0"):
        NgramRanker(fitted_prompts=0)
    with pytest.raises(ValueError, match="data.length_predictor.ranker.penalty is 0"):
        NgramRanker(penalty=0.0)
