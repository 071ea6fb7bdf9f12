"""Rankers: which prompts will have long responses, from the prompt alone. YAML names a ranker by
its `class_path`.

Hides features, models and processes; the length predictor only sees numbers.
"""
# ruff: noqa: F401 (type checkers and editors read the imports)

from typing import TYPE_CHECKING

from lrl.system.imports import lazy_names

if TYPE_CHECKING:
    from lrl.routing.rankers.language_model import LanguageModelRanker
    from lrl.routing.rankers.ngrams import NgramRanker, Ranker

__all__, __getattr__, __dir__ = lazy_names(__name__)
