"""What a run costs before it is paid for: costs of work, a simulator that adds them up, and a search over plans."""
