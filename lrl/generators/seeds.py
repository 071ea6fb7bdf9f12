"""Seeds of the generators.

vLLM seeds every server with 0 by default. Two generators then draw the same numbers: they wrote
equal responses to one prompt. So each start of each generator has a seed of its own, which follows
from the run's.
"""

import os

from numpy.random import SeedSequence

SEED_VARIABLE = "PL_GLOBAL_SEED"
"""Lightning's `seed_everything` sets it."""


def run_seed(steps_done: int) -> int:
    """Returns the generators' seed of a run that resumes after `steps_done` optimizer steps.

    A resumed run has another one: the same would draw the numbers of its first steps again.
    """
    return _mixed(int(os.environ.get(SEED_VARIABLE, "0")), steps_done)


def generator_seed(of_run: int, number: int, starts: int) -> int:
    """Returns the seed of generator `number` after it was started `starts` times before; below
    2^31."""
    return _mixed(of_run, number, starts)


def _mixed(*parts: int) -> int:
    # Not their sum: with it generator 1 of a run with seed 0 draws what generator 0 of a run with
    # seed 1 draws.
    return int(SeedSequence(parts).generate_state(1)[0]) >> 1
