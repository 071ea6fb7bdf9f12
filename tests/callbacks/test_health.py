"""`Health` on a real Trainer, with a module that logs what a script says."""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import lrl
from lrl.callbacks import Health
from lrl.callbacks.health import RULES, in_words
from tests.callbacks.scripted import Metrics, Scripted, fit

Lines = Callable[..., list[str]]

METRICS = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Lines:
    """Runs the rows under a `Health`; returns its lines, with their level in front."""
    caplog.set_level(logging.INFO, logger="lrl.callbacks.health")

    def run(rows: list[Metrics], health: Health | None = None) -> list[str]:
        caplog.clear()
        fit(rows, health or Health(), log_every_n_steps=50)
        records = [record for record in caplog.records if record.name == "lrl.callbacks.health"]
        return [f"{record.levelname} {record.getMessage()}" for record in records]

    return run


def ess(*values: float) -> list[Metrics]:
    return [{"policy/ess": value} for value in values]


def test_a_figure_is_warned_of_once_in_a_run_in_a_short_line(lines: Lines) -> None:
    low, high = [0.3, 0.32, 0.31], [0.6, 0.6, 0.65]
    health = Health()
    (text,) = lines(ess(0.9, *low, 0.2, *high, *low, *high, *low), health)
    assert text == (
        "WARNING step 3: policy/ess is 0.31 (healthy: at least 0.5). Lower data.max_lag or "
        "model.lr."
    )
    assert health.outside == {"policy/ess": 10}, "the summary counts them"
    ranges: Any = {"policy/ess": (0.2, None), "policy/kl_behaviour": None}
    row = {"policy/ess": 0.1, "policy/kl_behaviour": 9.0}
    (text,) = lines([row], Health(ranges=ranges, steps=1))
    assert text.startswith("WARNING step 0: policy/ess is 0.1 (healthy: at least 0.2).")


def test_equal_rewards_are_no_news_while_a_teacher_rewards_each_token(
    lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"reward/std": 0.0}] * 3
    monkeypatch.setattr(Scripted, "reference", lrl.Teacher("any"), raising=False)
    assert lines(rows) == []
    monkeypatch.setattr(Scripted, "reference", lrl.Reference())
    assert "reward/std is 0" in lines(rows)[0]


TOLD = {
    "noise": (ess(*[0.9, 0.3, 0.3] * 4), []),
    "steps that do not log it": ([*ess(0.3, 0.3), {}, {}, {}], []),
    "steps between that do not": ([*ess(0.3, 0.3), {}, {}, *ess(0.3)], ["4: policy/ess"]),
    "no number": ([{"policy/kl_behaviour": float("nan")}] * 3, ["2: policy/kl_behaviour"]),
    "its time, in a short run": (
        [{"generators/paused": 0.5, "trainer/probe": 0.5, "policy/ess": 0.3, "time/step": 75.0}]
        * 3,
        ["2: policy/ess"],
    ),
    "its time, once a run has lasted": (
        [{"generators/paused": 0.5, "time/step": 100.0}] * 8,
        ["4: generators/paused"],
    ),
}
"""Metrics of steps, and the steps and metrics of the warnings."""


@pytest.mark.parametrize("case", TOLD)
def test_a_figure_is_told_of_after_several_steps_that_log_it(case: str, lines: Lines) -> None:
    rows, told = TOLD[case]
    health = Health()
    found = lines(rows, health)
    assert [line.partition(" is ")[0] for line in found] == [f"WARNING step {one}" for one in told]
    assert list(health.outside) == [one.split()[1] for one in told], "the summary has no other"


def test_every_rule_speaks_outside_of_its_bound_and_not_within(lines: Lines) -> None:
    within, outside = {"time/step": 300.0}, {"time/step": 300.0}
    for metric, ((low, high), _) in RULES.items():
        bound, outwards = (low, -0.001) if high is None else (high, 0.001)
        assert bound is not None
        within[metric], outside[metric] = bound - outwards, bound + outwards
    assert lines([within] * 4) == []
    told = lines([outside] * 4)
    assert [line.split(": ")[1].split(" is ")[0] for line in told] == list(RULES)
    assert max(map(len, told)) <= 2 * 80, "two lines of a narrow terminal"


def test_the_settings_that_the_advice_names_exist() -> None:
    owners = {"data": lrl.RolloutDataModule, "model": lrl.PolicyModule}
    advice = " ".join(text for _, text in RULES.values())
    named = set(re.findall(r"\b(data|model)\.(\w+)", advice))
    assert {("data", "max_lag"), ("model", "lr")} <= named
    for owner, name in named:
        assert name in inspect.signature(owners[owner]).parameters, f"{owner}.{name}"


def test_the_page_has_the_ranges_of_the_rules() -> None:
    section = METRICS.split("\n## Health\n")[1].split("\n## ")[0]
    rows = {
        tag: healthy
        for tags, healthy in re.findall(r"^\| (`.*`) \| ([^|]+) \|", section, re.MULTILINE)
        for tag in re.findall(r"`([^`]+)`", tags)
    }
    assert rows == {metric: in_words(healthy) for metric, (healthy, _) in RULES.items()}
