"""Launchers: what starts the processes of generators and reward hosts somewhere else than beside the trainer.

A scheduler places; the processes join at rank 0, which watches and replaces them (`lrl.membership.keeper`). Without a
launcher the run starts its generators itself (`lrl.generators.server`), and scores in processes of its own.
"""

from lrl.generators.launchers.base import Job, Launcher
from lrl.generators.launchers.given import Given
from lrl.generators.launchers.ray import Ray
from lrl.generators.launchers.slurm import Slurm

__all__ = ["Given", "Job", "Launcher", "Ray", "Slurm"]
