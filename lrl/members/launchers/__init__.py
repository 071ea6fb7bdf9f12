"""Launchers: they start generators and scorers away from the trainer.

A scheduler places; the processes join at rank 0, which watches and replaces them
(`lrl.members.launched`). Without a launcher the run starts its generators itself
(`lrl.generators.server`), and scores in processes of its own.
"""

from lrl.members.launchers.base import Job, Launcher
from lrl.members.launchers.given import Given
from lrl.members.launchers.local import Local
from lrl.members.launchers.ray import Ray
from lrl.members.launchers.slurm import Slurm

__all__ = ["Given", "Job", "Launcher", "Local", "Ray", "Slurm"]
