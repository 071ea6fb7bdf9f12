"""Asynchronous reinforcement learning of language models on PyTorch Lightning and vLLM."""
