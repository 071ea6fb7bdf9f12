"""Rollouts: prompts, their groups and pacing, and the packing of finished groups into the trainer's
step stream.

Hides the states of groups and the order of prompts; the trainer sees a loader of steps.
"""
