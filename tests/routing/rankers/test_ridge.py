"""Ridge regression on sparse rows."""

import numpy as np
import torch

from lrl.routing.rankers.ridge import SMALLEST_RESIDUAL, fit


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

    weights, intercept = fit(rows, numbers.tolist(), columns, penalty)

    centred = whole - whole.mean(0)
    equations = centred.T @ centred + penalty * torch.eye(columns, dtype=torch.float64)
    exact = torch.linalg.solve(equations, centred.T @ (numbers - numbers.mean()))
    assert (weights - exact).norm() < 3 * SMALLEST_RESIDUAL * exact.norm()
    assert abs(intercept - offset) < 0.01 * offset


def test_equal_numbers_are_the_intercept() -> None:
    row = np.array([1, 2], np.int16), np.array([1.0, 1.0], np.float32)
    weights, intercept = fit([row, row], [3.0, 3.0], 4, 1.0)
    assert not weights.any() and intercept == 3.0
