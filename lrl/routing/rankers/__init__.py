"""Rankers: which prompts will have long responses, from the prompt alone.

A ranker learns a number for each answered prompt and guesses it for others: the length of its
responses relative to all responses of that time, in log tokens. It only ranks.
"""

from lrl.routing.rankers.language_model import LanguageModelRanker
from lrl.routing.rankers.ngrams import NgramRanker, Ranker

__all__ = ["LanguageModelRanker", "NgramRanker", "Ranker"]
