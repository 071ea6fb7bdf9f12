"""Lightning callbacks that a user names under `trainer.callbacks`, one per file, and the base of
callbacks that read the policy's weights.

Hides the callbacks that every run has (`default_callbacks`).
"""
# ruff: noqa: F401 (type checkers and editors read the imports)

from typing import TYPE_CHECKING

from lrl.system.imports import lazy_names

if TYPE_CHECKING:
    from lrl.callbacks.base import OnRankZero
    from lrl.callbacks.elastic import Elastic
    from lrl.callbacks.evaluation import Evaluation
    from lrl.callbacks.export import Export
    from lrl.callbacks.health import Health
    from lrl.callbacks.progress import Progress
    from lrl.callbacks.rollout_file import RolloutFile
    from lrl.callbacks.rollout_log import RolloutLog
    from lrl.callbacks.summary import Summary
    from lrl.callbacks.throughput import Throughput
    from lrl.callbacks.timeline import Timeline
    from lrl.callbacks.weight_sync import WeightSync

__all__, __getattr__, __dir__ = lazy_names(__name__)
