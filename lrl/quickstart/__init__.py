"""The quickstart: tasks and small policies that need no GPU and no hub.

The tasks `task` and `word_problems` are separate from their policies, `warmup` and `smollm2`, since
reward workers may import them and must not import torch.
"""
