"""Prompts of a run: the rows of a source, each made into tokens, in shuffled epochs without end."""

from lrl.rollouts.prompts.data_set import Prompts, TooLong

__all__ = ["Prompts", "TooLong"]
