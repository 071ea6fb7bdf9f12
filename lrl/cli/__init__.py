"""The command line, one file per command; hides LightningCLI and jsonargparse."""
