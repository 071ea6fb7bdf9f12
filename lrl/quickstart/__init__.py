"""The quickstart: a task, a reward and a small policy that need no download and no GPU.

`task` stays apart from `warmup`: reward workers import the one, and must not import torch for it.
"""
