"""Rewards that check a response by rules, without a model and without running code."""
