"""How tensors travel into generators, and the proof that they arrived: one sync (`sync`), one file
per transport."""
