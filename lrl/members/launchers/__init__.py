"""Launchers: they start members away from the trainer.

A scheduler places; the processes join at rank 0, which watches and replaces them
(`lrl.members.launched`). Without a launcher the run starts its generators itself
(`lrl.generators.server`), and scores and plays in processes of its own.
"""
# ruff: noqa: F401 (type checkers and editors read the imports)

from typing import TYPE_CHECKING

from lrl.system.lazy_names import lazy_names

if TYPE_CHECKING:
    from lrl.members.launchers.base import Command, Given, Job, Launcher, Local, Slurm
    from lrl.members.launchers.ray import Ray

__all__, __getattr__, __dir__ = lazy_names(__name__)
