"""The ranks of the trainer: how they meet, what rank 0 tells them, and how a lost machine is
noticed."""
