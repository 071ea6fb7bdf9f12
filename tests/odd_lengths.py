"""A reward that a random policy earns in different amounts; importable, since reward workers are processes."""


def brevity(prompt: str, response: str, *, num_tokens: int, **columns: object) -> float:
    """Shorter is better."""
    return -num_tokens / 64
