"""Which prompts will have long responses, from the prompt alone. One class a way, named in YAML by its `class_path`."""

from lrl.routing.rankers.base import Ranker
from lrl.routing.rankers.language_model import LanguageModelRanker
from lrl.routing.rankers.ngrams import NgramRanker

__all__ = ["LanguageModelRanker", "NgramRanker", "Ranker"]
