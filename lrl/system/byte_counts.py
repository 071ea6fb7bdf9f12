"""Numbers of bytes in messages."""

GIB = 2**30


def in_gib(*counts: float) -> list[str]:
    """Returns numbers of bytes in GiB, with four digits."""
    return [f"{count / GIB:.4g}" for count in counts]
