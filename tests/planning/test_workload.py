"""Distributions of lengths."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lrl.planning.workload import parse_lengths

LOGNORMAL = "lognormal:mean=2000,max=8000"


@settings(deadline=None)
@given(st.floats(2, 5000), st.floats(1.05, 50), st.floats(0.05, 2.5))
def test_a_lognormal_has_its_mean_after_the_cut(mean: float, times: float, sigma: float) -> None:
    lengths = parse_lengths(f"lognormal:mean={mean},max={mean * times},sigma={sigma}")
    assert lengths.mean == pytest.approx(mean, rel=1e-3)
    assert lengths.longest <= mean * times and min(lengths.values) >= 1


def test_a_steps_lengths_have_the_distributions_mean_and_the_longest_grows_with_their_number() -> (
    None
):
    lengths = parse_lengths(LOGNORMAL)
    assert np.mean(lengths.of(2048)) == pytest.approx(lengths.mean, rel=0.01)
    assert lengths.of(4)[-1] < lengths.of(64)[-1] <= lengths.of(4096)[-1] == 8000


@pytest.mark.parametrize("ending", ["jsonl", "csv"])
def test_measured_lengths_are_read_from_a_file(ending: str, tmp_path: Path) -> None:
    texts = {"csv": "id,length\n0,7\n1,3\n2,5\n"}
    texts["jsonl"] = "\n".join(json.dumps({"length": length}) for length in (7, 3, 5))
    file = tmp_path / f"lengths.{ending}"
    file.write_text(texts[ending])
    assert parse_lengths(str(file)).values == (3, 5, 7)


@pytest.mark.parametrize(
    "text", ["normal:mean=3", "lognormal:mean=2000", "lognormal:mean=9000,max=8000", "fixed:0"]
)
def test_a_wrong_distribution_is_an_error_with_the_setting(text: str) -> None:
    with pytest.raises(ValueError, match="--lengths is "):
        parse_lengths(text)


@pytest.mark.parametrize("text", ["", '{"length": 0}', '{"length": 3}\n{"words": 3}', "{"])
def test_a_file_without_lengths_is_an_error_with_its_name(text: str, tmp_path: Path) -> None:
    file = tmp_path / "lengths.jsonl"
    file.write_text(text)
    with pytest.raises(ValueError, match=r"lengths\.jsonl.*length"):
        parse_lengths(str(file))
    with pytest.raises(FileNotFoundError, match="none.csv"):
        parse_lengths(str(tmp_path / "none.csv"))
