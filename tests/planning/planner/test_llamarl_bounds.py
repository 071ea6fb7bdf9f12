"""LlamaRL's theorem on random instances, and closed-form optima of both problems."""

from __future__ import annotations

import random
from math import inf

import pytest

from lrl.planning.planner.llamarl_bounds import Problem, Side

INSTANCES = 10_000
SIZES = (1, 2)


def side(
    fixed: float, per_sample: float, floor: float, slope: float, saturated: float = inf
) -> Side:
    """tau = (floor + slope / min(b, saturated)) / m^0.9: falls strictly in b up to `saturated`,
    then not at all."""
    speed = {m: m**0.9 for m in SIZES}
    return Side(
        fixed=lambda m: fixed,
        per_sample=lambda m: per_sample,
        sample_s=lambda b, m: (floor + slope / min(b, saturated)) / speed[m],
    )


def instance(
    draw: random.Random, sizes: tuple[int, ...] = SIZES, saturated: float = inf
) -> Problem:
    """Weights of 1 to 60 % of the memory of one or two devices, samples of 0.1 to 5 % of it."""
    sides = [
        side(
            draw.uniform(0.01, 0.6),
            draw.uniform(0.001, 0.05),
            draw.uniform(0.1, 2),
            draw.uniform(0.1, 9),
            saturated,
        )
        for _ in range(2)
    ]
    return Problem(
        devices=8, samples=64, memory=1.0, sizes=sizes, trainer=sides[0], generator=sides[1]
    )


def test_asynchronous_is_never_slower_and_strictly_faster_if_memory_binds() -> None:
    draw, feasible = random.Random(0), 0
    for _ in range(INSTANCES):
        problem = instance(draw, sizes=draw.choice(((1,), (2,), SIZES)))
        together, apart = problem.synchronous_s(), problem.asynchronous_s()
        assert apart <= together
        if together < inf:
            feasible += 1
            # Tau falls strictly everywhere, so the constraint binds.
            assert apart < together * (1 - 1e-6)
    assert feasible > INSTANCES * 0.5


def test_both_optima_are_equal_if_memory_does_not_bind() -> None:
    draw = random.Random(1)
    for _ in range(200):
        roomy = instance(draw, sizes=(1,), saturated=1.0)  # one sample is as good as many
        if roomy.synchronous_s() < inf:
            assert roomy.asynchronous_s() == pytest.approx(roomy.synchronous_s())


def test_if_the_sides_fit_only_apart_only_asynchronous_is_feasible() -> None:
    half = side(0.6, 0.01, 1, 1)
    problem = Problem(devices=8, samples=64, memory=1.0, sizes=(1,), trainer=half, generator=half)
    assert problem.synchronous_s() == inf and problem.asynchronous_s() < inf


def test_shared_memory_is_divided_at_the_stationary_point() -> None:
    trainer, generator = side(0.1, 0.01, 1, 4), side(0.2, 0.01, 1, 1)
    problem = Problem(
        devices=1, samples=1, memory=1.0, sizes=(1,), trainer=trainer, generator=generator
    )
    # 70 samples fit together; 4 / b_t + 1 / b_g is least at b_t : b_g = 2 : 1
    assert problem.synchronous_s() == pytest.approx(2 + 4 / (70 * 2 / 3) + 1 / (70 / 3), rel=1e-7)
    assert problem.asynchronous_s() == pytest.approx((1 + 4 / 90) + (1 + 1 / 80))


def test_seconds_scale_with_samples_over_devices() -> None:
    one = side(0.1, 0.01, 1, 1)
    small = Problem(devices=1, samples=1, memory=1.0, sizes=(1,), trainer=one, generator=one)
    large = Problem(devices=16, samples=64, memory=1.0, sizes=(1,), trainer=one, generator=one)
    assert large.synchronous_s() == pytest.approx(4 * small.synchronous_s())
    assert large.asynchronous_s() == pytest.approx(4 * small.asynchronous_s())
