"""What is held against a generator: old weights, and never its own rounding."""

from __future__ import annotations

import numpy as np
import pytest
from lrl.weights.tolerance import TOLERATED_NOISES, ProbeTolerance

TOKENS = 63
START = -2.0 * np.ones(TOKENS)


class Policy:
    """Log-probs that move with every step, and what a generator with rounding makes of them."""

    def __init__(self, step: float, noise: float, seed: int = 0) -> None:
        self.random = np.random.default_rng(seed)
        self.step = step
        self.noise = noise
        self.logprobs = START.copy()

    def move(self) -> list[float]:
        self.logprobs += self.step * self.random.normal(size=TOKENS)
        return self.logprobs.tolist()

    def seen(self, logprobs: list[float]) -> list[float]:
        """Rounding that varies as was measured: a few tokens carry most of it."""
        size = self.noise * self.random.lognormal(sigma=0.2)
        return (logprobs + size * self.random.standard_t(df=3, size=TOKENS)).tolist()


@pytest.mark.parametrize("step", [0.0, 1e-5, 1e-3, 0.05])
@pytest.mark.parametrize(
    ("dtype", "noise"), [("float32", 5e-7), ("bfloat16", 7e-4), ("bfloat16", 0.03)]
)
def test_no_sync_of_thousands_fails_for_rounding_alone(
    dtype: str, noise: float, step: float
) -> None:
    policy, tolerance = Policy(step, noise), ProbeTolerance(dtype)
    for _ in range(5000):
        now = policy.move()
        assert tolerance.fault(now, policy.seen(now)) is None


def test_noise_that_grows_as_the_policy_moves_is_followed() -> None:
    policy, tolerance = Policy(0.01, 1e-3), ProbeTolerance("bfloat16")
    for _ in range(5000):
        now = policy.move()
        assert tolerance.fault(now, policy.seen(now)) is None
        policy.noise *= 1.0006
    assert tolerance.noise is not None and tolerance.noise > 0.01


@pytest.mark.parametrize("step", [1e-4, 1e-3, 0.01])
@pytest.mark.parametrize("from_the_start", [True, False])
def test_a_generator_that_stays_behind_is_found_even_if_its_rounding_hides_a_single_step(
    step: float, from_the_start: bool
) -> None:
    policy, tolerance = Policy(step, 1e-3), ProbeTolerance("bfloat16")
    for _ in range(1 if from_the_start else 200):
        behind = policy.move()
        assert tolerance.fault(behind, policy.seen(behind)) is None
    for _ in range(20_000):
        if fault := tolerance.fault(now := policy.move(), policy.seen(behind)):
            break
    assert fault is not None and "is allowed" in fault
    assert np.abs(np.subtract(now, behind)).mean() < 3 * TOLERATED_NOISES * 1e-3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_log_probs_that_an_update_did_not_change_are_those_of_the_weights_before(
    dtype: str,
) -> None:
    policy, tolerance = Policy(3e-5, 7e-4 if dtype == "bfloat16" else 5e-7), ProbeTolerance(dtype)
    for _ in range(5):
        found = policy.seen(now := policy.move())
        assert tolerance.fault(now, found) is None
    assert tolerance.fault(now, found) is None  # the same version once more
    fault = tolerance.fault(policy.move(), found)
    assert fault is not None and "those of the weights before" in fault


def test_tokens_that_are_almost_certain_may_keep_their_log_prob() -> None:
    policy, tolerance = Policy(1e-4, 7e-4), ProbeTolerance("bfloat16")
    for _ in range(1000):
        now = policy.move()
        found = policy.seen(now)
        now[:50], found[:50] = [-1e-7 * abs(logprob) for logprob in now[:50]], [0.0] * 50
        assert tolerance.fault(now, found) is None


def test_no_generator_is_at_fault_before_the_policy_has_moved_enough() -> None:
    policy, tolerance = Policy(4e-6, 5e-7), ProbeTolerance("float32")
    found = policy.seen(now := policy.move())
    assert tolerance.fault(now, found) is None
    assert tolerance.fault(policy.move(), found) is None
    assert any(tolerance.fault(policy.move(), found) for _ in range(100))


@pytest.mark.parametrize("first", [True, False])
def test_a_tensor_that_is_missing_is_seen_at_any_proof(first: bool) -> None:
    policy, tolerance = Policy(1e-3, 0.03), ProbeTolerance("bfloat16")
    for _ in range(0 if first else 5):
        now = policy.move()
        assert tolerance.fault(now, policy.seen(now)) is None
    now = policy.move()
    assert tolerance.fault(now, [logprob - 0.75 for logprob in now])
    assert tolerance.fault(now, [float("nan")] * TOKENS)
