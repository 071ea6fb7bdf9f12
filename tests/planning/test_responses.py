"""Sampled response lengths."""

from statistics import median

import numpy as np
import pytest

from lrl.planning.responses import Lognormal


def test_a_length_depends_only_on_prompt_group_and_seed() -> None:
    lengths, same = (Lognormal(100, 1.0, 10_000, seed=3) for _ in range(2))
    for number in (5, 2, 5):
        assert lengths.of(number, number, 4) == same.of(number, number, 4)
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
