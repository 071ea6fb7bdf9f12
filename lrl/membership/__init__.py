"""Membership of generators that other processes start: they join or leave a run (`lrl serve --join`, `--leave`).

Hides how run and joining process find and trust each other, and the HTTP through which they communicate.
"""
