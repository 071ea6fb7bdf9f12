"""Profiles of real runs: timelines, what the trainer waited for, and the costs fitted to them."""
