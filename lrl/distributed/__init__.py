"""The ranks of the trainer: how they meet, what rank 0 tells them, and how a lost machine is
noticed.

Hides torch.distributed and the network between the nodes.
"""
