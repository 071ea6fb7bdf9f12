"""Costs of a run before it starts: a search over plans, a simulator, and costs fitted to measured
runs.

Hides data sheets, rooflines, the virtual clock and the fit; `costs` is the interface between them.
"""
