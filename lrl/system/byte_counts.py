"""Numbers of bytes in messages that compare them."""

GIB = 2**30
MAX_DECIMALS = 9


def in_gib(*counts: float) -> list[str]:
    """Returns numbers of bytes in GiB, with as many decimals as tell them from each other and 0.

    Otherwise a message says that 0.01 GiB are free and 0.01 are needed.
    """
    different = len({*counts, 0.0})
    for decimals in range(1, MAX_DECIMALS):
        texts = [f"{count / GIB:.{decimals}f}" for count in (*counts, 0.0)]
        if len(set(texts)) == different:
            break
    return texts[:-1]
