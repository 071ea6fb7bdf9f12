"""Processes that run a user's code, rewards or an environment, and can be killed alone.

`worker` runs in the process, `process` is its other end and keeps those of one machine, `remote`
lends those of others to rank 0, and `pool` chooses. No module here imports torch.
"""
