"""What matters of a run on one page: the layout of TensorBoard's tab "Custom Scalars"."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

Layout = dict[str, dict[str, list[object]]]
"""Category -> chart -> its kind and tags, as `SummaryWriter.add_custom_scalars` takes it."""

CHARTS = {
    "effective sample size (0 to 1)": ("policy/ess",),
    "where the trainer's time goes (s)": ("time/step", "time/wait", "time/train", "time/sync"),
    "response length (tokens)": ("rollouts/length_mean",),
    "lag (versions)": ("policy/lag_mean", "policy/lag_max"),
}
"""Charts below the reward and the accuracies, and the tags that each of them shows."""


def overview(logged: Collection[str], datasets: Iterable[str]) -> Layout:
    """The layout for a run.

    Args:
        logged: Tags that the run logs; charts of others are left out.
        datasets: Names of the data sets that are evaluated: a chart of the accuracy with its interval for each.
    """
    accuracies = {f"accuracy on {name}, with its 95 % interval": _margin(f"eval/{name}/accuracy") for name in datasets}
    lines = {title: _lines(tag for tag in tags if tag in logged) for title, tags in CHARTS.items()}
    reward = {"reward": _lines(tag for tag in ("reward/mean",) if tag in logged)}
    return {"Overview": {title: chart for title, chart in (reward | accuracies | lines).items() if chart[1]}}


def _margin(tag: str) -> list[object]:
    return ["Margin", [tag, f"{tag}_low", f"{tag}_high"]]


def _lines(tags: Iterable[str]) -> list[object]:
    # TensorBoard takes them for regular expressions, and for the beginning of a tag.
    return ["Multiline", [f"^{re.escape(tag)}$" for tag in tags]]
