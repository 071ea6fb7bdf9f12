"""The command line, one file per command. Hides LightningCLI and jsonargparse: their help, errors
and defaults."""
