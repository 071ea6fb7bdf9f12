"""Sampled response lengths."""

from statistics import median

import numpy as np
import pytest

from lrl.planning.simulator.length_sampling import Lognormal, ObservedLengths


def test_a_length_depends_only_on_prompt_group_and_seed() -> None:
    lengths = Lognormal(100, 1.0, 10_000, seed=3)
    assert [lengths.of(n, n, 4) for n in (5, 2, 5)] == [
        Lognormal(100, 1.0, 10_000, seed=3).of(n, n, 4) for n in (5, 2, 5)
    ]
    assert lengths.of(5, 5, 4) != Lognormal(100, 1.0, 10_000, seed=4).of(5, 5, 4)
    # Another epoch's responses to the same prompt.
    assert lengths.of(5, 5, 4) != lengths.of(5, 6, 4)


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_the_variance_between_prompts_has_its_share(share: float) -> None:
    lengths = Lognormal(1e6, 1.0, 10**9, prompt_share=share)
    logs = np.log([lengths.of(prompt, prompt, 2) for prompt in range(3000)])
    assert np.corrcoef(logs.T)[0, 1] == pytest.approx(share, abs=0.06)
    next_epoch = np.log([lengths.of(prompt, 3000 + prompt, 1)[0] for prompt in range(3000)])
    assert np.corrcoef(logs[:, 0], next_epoch)[0, 1] == pytest.approx(share, abs=0.06)


def test_lengths_follow_their_distribution() -> None:
    drawn = [length for n in range(2000) for length in Lognormal(100, 1.0, 800).of(n, n, 4)]
    assert median(drawn) == pytest.approx(100, rel=0.05) and max(drawn) == 800 and min(drawn) >= 1
    seen = [
        length for n in range(2000) for length in ObservedLengths([1, 7, 7, 50], seed=1).of(n, n, 4)
    ]
    assert set(seen) == {1, 7, 50} and sum(length == 7 for length in seen) / 8000 == pytest.approx(
        0.5, abs=0.05
    )


@pytest.mark.parametrize(
    "wrong", [{"median": 0}, {"median": 900}, {"sigma": -1.0}, {"prompt_share": 1.5}]
)
def test_an_impossible_distribution_is_an_error(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Lognormal(**{"median": 100, "sigma": 1.0, "longest": 800} | wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="there must be some"):
        ObservedLengths([])
