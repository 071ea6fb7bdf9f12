"""The quickstart: a task, a reward and a small policy that need no download and no GPU.

`task` is separate from `warmup`, since reward workers import it and must not import torch.
"""
