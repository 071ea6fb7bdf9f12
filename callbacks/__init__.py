"""Lightning callbacks that a user names under `trainer.callbacks`, one per file, and the base of
callbacks that read the policy's weights.

Hides the callbacks that every run has (`default_callbacks`).
"""

from lrl.callbacks.base import OnRankZero
from lrl.callbacks.elastic import Elastic
from lrl.callbacks.evaluation import Evaluation
from lrl.callbacks.export import Export
from lrl.callbacks.health import Health
from lrl.callbacks.progress import Progress
from lrl.callbacks.rollout_log import RolloutLog
from lrl.callbacks.summary import Summary
from lrl.callbacks.throughput import Throughput
from lrl.callbacks.timeline import Timeline
from lrl.callbacks.weight_sync import WeightSync

__all__ = [
    "Elastic",
    "Evaluation",
    "Export",
    "Health",
    "OnRankZero",
    "Progress",
    "RolloutLog",
    "Summary",
    "Throughput",
    "Timeline",
    "WeightSync",
]
