"""Rankers: which prompts will have long responses, from the prompt alone. YAML names a ranker by
its `class_path`.

Hides features, models and processes; the length predictor only sees numbers.
"""

from lrl.routing.rankers.base import Ranker
from lrl.routing.rankers.language_model import LanguageModelRanker
from lrl.routing.rankers.ngrams import NgramRanker

__all__ = ["LanguageModelRanker", "NgramRanker", "Ranker"]
