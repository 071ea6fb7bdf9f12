"""Two runs of `benchmarks.lag_sweep` side by side, a healthy and a sick one, from their records.

python -m benchmarks.healthy_and_sick
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks import records

RECORDS = Path("benchmarks/results/lag_sweep.jsonl")
PICTURE = Path("docs/healthy_and_sick.png")
RUNS: dict[str, dict[str, Any]] = {
    "healthy: AIPO, max_lag 1": {"objective": "AIPO", "max_lag": 1, "seed": 0},
    "sick: REINFORCE, max_lag 8": {"objective": "REINFORCE", "max_lag": 8, "seed": 0},
}
PANELS = {"ess": "policy/ess", "kl_behaviour": "policy/kl_behaviour"}
HEALTHY = {"ess": 0.5, "kl_behaviour": 0.1}
"""Bounds of `lrl.callbacks.Health`."""


def main() -> None:
    """Draws the picture."""
    figure = Figure(figsize=(9, 6), layout="constrained")
    axes = figure.subplots(1 + len(PANELS), len(RUNS), sharex=True, sharey="row")
    for column, (title, settings) in enumerate(RUNS.items()):
        run = records.find(records.read(RECORDS), settings)
        assert run is not None, f"{RECORDS} has the run"
        top = axes[0, column]
        top.set_title(title)
        top.plot(run["series"]["reward"], color="tab:gray", label="reward/mean")
        steps = [found["step"] for found in run["evaluations"]]
        accuracies = [found["accuracy"] for found in run["evaluations"]]
        top.plot(steps, accuracies, marker="o", label="eval/held_out/accuracy")
        for panel, (name, tag) in zip(axes[1:, column], PANELS.items(), strict=True):
            panel.plot(run["series"][name], label=tag)
            panel.axhline(HEALTHY[name], color="tab:red", linestyle=":", label="bound of Health")
        axes[-1, column].set_xlabel("optimizer steps")
    for panel in axes.flat:
        panel.grid(alpha=0.3)
    for panel in axes[:, 0]:
        panel.legend(fontsize=8)
    figure.savefig(PICTURE, dpi=90)


if __name__ == "__main__":
    main()
