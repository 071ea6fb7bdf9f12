"""What a chaos benchmark calls lost or twice, and how it proves which weights wrote a token."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.chaos.journal import surviving, trained
from benchmarks.chaos.sync import TokenRecorder
from tests import made

PROMPTS = 4


def step(number: int, launched: int, indices: list[int]) -> dict[str, Any]:
    # Another order in each epoch.
    prompts = [(index * 3 + index // PROMPTS) % PROMPTS for index in indices]
    return {"step": number, "launch": launched, "indices": indices, "prompts": prompts}


def two_epochs(launched: int = 0) -> list[dict[str, Any]]:
    return [step(number, launched, [2 * number, 2 * number + 1]) for number in range(4)]


END = {"done_through": 8, "done_ahead": [], "open": [], "skipped": []}


# ---- what counts as lost


def test_a_step_counts_for_the_last_launch_that_trained_it() -> None:
    first, second = two_epochs(0), two_epochs(1)
    second[1]["indices"], second[2]["indices"] = [3, 4], [2, 5]
    lineage = surviving([*first[:3], *second[1:]])
    assert [line["launch"] for line in lineage] == [0, 1, 1, 1]
    assert trained(lineage, END)["prompts"] == 8


def in_place_of_another() -> list[dict[str, Any]]:
    lines = two_epochs()
    lines[1] = step(1, 0, [1, 3])
    return lines


def twice_under_two_indices() -> list[dict[str, Any]]:
    lines = two_epochs()
    lines[1]["prompts"] = lines[0]["prompts"]
    return lines


@pytest.mark.parametrize(
    ("lines", "untold", "twice", "epochs_whole"),
    [
        (two_epochs(), [], [], 2),
        (in_place_of_another(), [2], [1], 1),
        (twice_under_two_indices(), [], [], 1),
    ],
)
def test_every_epoch_trains_every_row_once(
    lines: list[dict[str, Any]], untold: list[int], twice: list[int], epochs_whole: int
) -> None:
    found = trained(lines, END, PROMPTS)
    assert (found["prompts"], found["lost"]) == (8, [])
    assert (found["untold"], found["twice"]) == (untold, twice)
    assert found["epochs_whole"] == epochs_whole


@pytest.mark.parametrize(
    ("change", "lost", "untold"),
    [
        ({}, [], []),
        ({"open": [3, 6]}, [5], []),
        ({"done_ahead": []}, [4], [4]),
        ({"done_through": 4, "done_ahead": [], "open": [5, 6]}, [4], [3, 4]),
    ],
)
def test_a_difference_between_ledger_and_journal_is_named(
    change: dict[str, Any], lost: list[int], untold: list[int]
) -> None:
    end = {"done_through": 3, "done_ahead": [4], "open": [3, 5, 6], "skipped": []} | change
    report = trained([step(0, 0, [0, 2]), step(1, 0, [1, 4])], end)
    assert (report["lost"], report["untold"], report["twice"]) == (lost, untold, [])


# ---- the proof of every trained token


class Fixed(torch.nn.Module):
    """Gives token 0 a logit and token 1 none, everywhere."""

    def __init__(self, logit: float) -> None:
        super().__init__()
        self.logits = torch.nn.Parameter(torch.tensor([logit, 0.0]))

    def forward(self, ids: torch.Tensor) -> Any:
        return SimpleNamespace(logits=self.logits.expand(*ids.shape, 2))


def logprob(logit: float) -> float:
    return logit - math.log(math.exp(logit) + 1.0)


def recorder(*written: tuple[float, int]) -> TokenRecorder:
    """A response of token 0, written at each of these logits under the version that it names; a
    version's own logit is its number."""
    tokens = TokenRecorder()
    tokens.weights = {version: Fixed(float(version)).state_dict() for version in range(3)}
    logits, versions = zip(*written, strict=True)
    how = {"logprobs": [*map(logprob, logits)], "versions": [*versions]}
    rollout = made.rollout([0] * len(written), **how)
    tokens.groups = [(2, made.group(0, rollout, prompt=[1, 1]))]
    return tokens


@pytest.mark.parametrize("logit", [1.0, 0.5, 2.0])
def test_a_token_agrees_with_the_version_it_names_and_with_no_other(logit: float) -> None:
    """Half-updated weights, or a newer version, may have written the second one."""
    proof = recorder((0.0, 0), (logit, 1), (2.0, 2)).verify(Fixed(0.0), 1.0)
    assert (proof.tokens, proof.largest_lag, proof.missing) == (3, 2, 0)
    assert proof.difference == pytest.approx(abs(logprob(1.0) - logprob(logit)), abs=1e-5)
