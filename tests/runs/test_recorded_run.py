"""Learning is the same as when it was recorded: nobody changes it without meaning to."""

from __future__ import annotations

import json

import pytest

from tests.runs.recorded_run import LEARNERS, RECORD, STEPS, run


@pytest.mark.parametrize("learner", LEARNERS)
def test_a_recorded_learning_run_gives_the_same_losses_again(learner: str) -> None:
    recorded = json.loads(RECORD.read_text())[learner]
    found = run(learner)
    assert len(found) == len(recorded) == STEPS
    for (loss, norm), (loss_then, norm_then) in zip(found, recorded, strict=True):
        assert loss == pytest.approx(loss_then, rel=1e-4, abs=1e-6)
        assert norm == pytest.approx(norm_then, rel=1e-4)
