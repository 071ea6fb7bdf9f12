"""Profiles of runs: the timeline and the costs fitted to it.

Hides the timeline's file format, the sampling of generators and the least-squares fit.
"""
