"""A language model as a reward: what it is asked, how its answer is read, and where answers stay."""
