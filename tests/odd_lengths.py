"""A reward that a random policy earns in different amounts; importable, since reward workers are
processes."""

import time


def brevity(prompt: str, response: str, *, num_tokens: int, **columns: object) -> float:
    """Shorter is better."""
    return -num_tokens / 64


def slow_brevity(prompt: str, response: str, *, num_tokens: int, **columns: object) -> float:
    """The same, for a run that shall leave the cores to others."""
    time.sleep(0.25)
    return -num_tokens / 64


def variety(prompt: str, response: str, **columns: object) -> float:
    """The more different characters the better: responses that all reach the limit differ in it,
    too."""
    return len(set(response)) / 64


def odd_lengths_of_even_sums(
    prompt: str, response: str, *, answer: str, **columns: object
) -> float:
    """Where the answer is an even number the number of characters if it is odd, else no reward at
    all; where it is odd all answers are worth the same."""
    if int(answer) % 2:
        return 0.0
    return float(len(response)) if len(response) % 2 else float("nan")
