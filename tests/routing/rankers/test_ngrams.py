"""The features of the n-gram ranker."""

import numpy as np
import pytest
import torch

from lrl.routing.rankers.ngrams import (
    BUCKETS,
    MAX_PROMPT_TOKENS,
    SMALLEST_RESIDUAL,
    features,
    fit_ridge,
)


def test_similar_prompts_have_similar_features_and_long_ones_bounded_features() -> None:
    (places, values), (others, _) = features([5, 6, 7, 8]), features([5, 6, 7, 9])
    # Three words, two pairs, the length.
    assert len(places) == 8 and len(set(places) & set(others)) == 6
    assert places.max() < BUCKETS and np.linalg.norm(values[:-1]) == pytest.approx(1)
    long, _ = features(list(range(10 * MAX_PROMPT_TOKENS)))
    assert len(long) <= 2 * MAX_PROMPT_TOKENS and len(features([])[0]) == 1


def test_the_fit_solves_the_normal_equations_and_does_not_penalise_the_intercept() -> None:
    columns, penalty, offset = 40, 0.5, 100.0
    random = np.random.default_rng(0)
    places = [
        random.choice(columns, size, replace=False).astype(np.int16)
        for size in random.integers(1, 8, 300)
    ]
    rows = [(place, random.standard_normal(len(place)).astype(np.float32)) for place in places]
    whole = torch.zeros(len(rows), columns, dtype=torch.float64)
    for number, (place, values) in enumerate(rows):
        whole[number, torch.from_numpy(place).long()] = torch.from_numpy(values).double()
    numbers = whole @ torch.from_numpy(random.standard_normal(columns)) + offset

    weights, intercept = fit_ridge(rows, numbers.tolist(), columns, penalty)

    centred = whole - whole.mean(0)
    equations = centred.T @ centred + penalty * torch.eye(columns, dtype=torch.float64)
    exact = torch.linalg.solve(equations, centred.T @ (numbers - numbers.mean()))
    assert (weights - exact).norm() < 3 * SMALLEST_RESIDUAL * exact.norm()
    assert abs(intercept - offset) < 0.01 * offset
