"""How many trees the responses to a prompt make in training (`lrl.training.prefix_tree`): the
arithmetic, also for the planner."""


def attention_tokens_of(hidden: int) -> int:
    """Returns the length of a row at which attention takes as long as all other layers, for a
    hidden state of that size.

    Counted in products, a token takes 4 x length x hidden with its row, and about 24 x hidden^2 in
    the matrices of a layer.
    """
    return 6 * hidden


def cheapest_trees(samples: int, shared: int, branches: float, attention_tokens: int) -> int:
    """Returns the number of trees with the least cost.

    Every tree that is added reads the shared tokens once more, and every tree that is longer costs
    more attention, which grows with its square.

    Args:
        samples: Responses.
        shared: Tokens that all of them share.
        branches: All their other tokens.
        attention_tokens: Length of a row at which attention takes as long as all else.
    """

    def cost(trees: int) -> float:
        length = shared + branches / trees
        return trees * length * (1 + length / attention_tokens)

    return min(range(1, samples + 1), key=cost)
