"""The command line: one file per command, and what the settings of `fit` and `validate` need.

Hides LightningCLI and jsonargparse: their help, their errors, their defaults.
"""
