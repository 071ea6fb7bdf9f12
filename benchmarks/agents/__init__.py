"""Agents of other people's libraries, as programs for `benchmarks.other_agents`. Each runs in an
environment of its own and imports nothing of lrl."""
