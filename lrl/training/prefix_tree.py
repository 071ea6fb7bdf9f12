"""What is trained: samples, and the trees in which samples of a group share their beginning.

The responses of a group begin with the same prompt, and episodes often with the same observation.
In a tree these tokens stand once, and each sample continues behind them:

    prompt of 75 tokens, without its last one | its last token, response 1 | its last token, response 2 | ...

A token attends to the shared tokens and to its own branch. The last shared token stands in every
branch, because it predicts another first token in each. Nothing that is trained is shared, so
advantages, versions and log-probs stay with their sample (2511.18871: shared-prompt attention).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # `lrl plan` does without torch
    from torch import Tensor

    from lrl.types import Group, Rollout

LEAST_SAVING = 0.05
"""Share of the cost that trees must save. Trees pack worse, and with their mask attention computes
what lies above the diagonal, too: with prompts of 4 tokens and responses of 64, trees that saved 1
% made a step 1.4 times as long."""


@dataclass(slots=True)
class TrainingSample:
    """One rollout after its prompt, or one branch of it, with the inputs of its loss."""

    group: int
    """`Group.index`."""
    prompt: list[int]
    rollout: Rollout
    advantages: Tensor
    """float32 [tokens of the rollout], or [] for all of them."""
    trained: list[bool]
    """For each token of the sample, whether it is in the loss."""
    places: Sequence[int] | None = None
    """The tokens of the rollout that the sample has (`Branch.places`); None for all."""
    trained_elsewhere: int = 0
    """Trained tokens that other samples have of the same rollout."""

    @property
    def partial(self) -> bool:
        """Whether only some of the policy's own tokens are trained."""
        return any(self.trained) and sum(self.trained) < sum(self.rollout.mask)

    @property
    def trained_places(self) -> list[int]:
        """The places in the rollout of the trained tokens."""
        places = range(len(self.trained)) if self.places is None else self.places
        return [place for place, own in zip(places, self.trained, strict=True) if own]

    @property
    def token_ids(self) -> list[int]:
        """Prompt and response."""
        written = self.rollout.token_ids
        own = written if self.places is None else [written[place] for place in self.places]
        return self.prompt + own

    @property
    def untrained(self) -> int:
        """Tokens before the one that predicts the first trained token."""
        return len(self.prompt) - 1 + sum(1 for _ in takewhile(lambda one: not one, self.trained))

    def __len__(self) -> int:
        return len(self.prompt) + len(self.trained)


def samples_of(
    group: Group, rollout: Rollout, advantages: Tensor, trained: Sequence[bool]
) -> list[TrainingSample]:
    """Returns the samples of a rollout: one, or one for each branch, except those without a trained
    token. A token that several have is trained in the first of them."""
    found = []
    for places, shared in rollout.branches:
        own = [trained[place] for place in places[shared:]]
        if any(own):
            sample = TrainingSample(
                group.index,
                group.prompt.token_ids,
                rollout=rollout,
                advantages=advantages,
                trained=[False] * shared + own,
                places=places if rollout.forks else None,
                trained_elsewhere=sum(trained) - sum(own),
            )
            found.append(sample)
    return found


@dataclass(slots=True)
class PrefixTree:
    """Samples of one group that share their first tokens; often a single one, which shares none."""

    samples: list[TrainingSample]
    shared: int = 0
    """First tokens of every sample that stand once."""

    @property
    def group(self) -> int:
        """`Group.index`."""
        return self.samples[0].group

    def __len__(self) -> int:
        branches = sum(len(sample) - self.shared for sample in self.samples)
        return self.shared + branches


def prefix_trees(
    samples: Sequence[TrainingSample], longest: int, attention_tokens: int
) -> list[PrefixTree]:
    """Returns trees of the samples of a group, as many as cost least; one for each sample if they
    have nothing to share. The other arguments are those of `divided`."""
    shared = _shared(samples) if attention_tokens else 0
    parts = divided([len(sample) for sample in samples], shared, longest, attention_tokens)
    return [
        PrefixTree([samples[one] for one in part], shared if len(part) > 1 else 0) for part in parts
    ]


def _shared(samples: Sequence[TrainingSample]) -> int:
    """Returns how many first tokens all share before one that predicts a trained token."""
    if len(samples) < 2:
        return 0
    most = min(sample.untrained for sample in samples)
    columns = zip(*(sample.token_ids[:most] for sample in samples), strict=True)
    return sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, columns))


# ---- their cost


def attention_tokens_of(hidden: int) -> int:
    """Returns the length of a row at which attention takes as long as all other layers.

    In products: a token takes 4 x length x hidden with its row, and about 24 x hidden^2 in the
    matrices of a layer.
    """
    return 6 * hidden


def cheapest_trees(samples: int, shared: int, branches: float, attention_tokens: int) -> int:
    """Returns the number of trees with the least cost, of `samples` responses with `shared` first
    tokens in common and `branches` others in all.

    More trees read the shared tokens more often; longer trees cost more attention. A row is as long
    as the longest tree, so all count as long as the one with the most responses: 15 trees of 16
    responses would be a pair, and 14 responses padded to its length.
    """

    def cost(trees: int) -> float:
        most = math.ceil(samples / trees)
        length = shared + branches / samples * most
        return trees * length * (1 + length / attention_tokens)

    best = min(range(1, samples + 1), key=cost)
    return best if cost(best) < (1 - LEAST_SAVING) * cost(samples) else samples


def divided(
    lengths: Sequence[int], shared: int, longest: int, attention_tokens: int
) -> list[list[int]]:
    """Returns the responses of each tree, as many trees as cost least; one for each response if
    there is nothing to share, or `attention_tokens` is 0. The longest response comes first, and
    each goes to the shortest tree.

    `lengths` include the `shared` tokens; a tree of several has at most `longest`.
    """
    count = len(lengths)
    if not shared or not attention_tokens or count < 2:
        return [[one] for one in range(count)]
    branches = [length - shared for length in lengths]
    order = sorted(range(count), key=lambda one: branches[one], reverse=True)
    number = cheapest_trees(count, shared, sum(branches), attention_tokens)
    while True:
        trees: list[list[int]] = [[] for _ in range(number)]
        sizes = [0] * number
        for one in order:
            tree = sizes.index(min(sizes))
            trees[tree].append(one)
            sizes[tree] += branches[one]
        if number == count or shared + max(sizes) <= longest:
            return trees
        number += 1


def tree_lengths(
    lengths: Sequence[int], shared: int, longest: int, attention_tokens: int
) -> list[int]:
    """Returns the tokens of each tree. See `divided` for the arguments."""
    trees = divided(lengths, shared, longest, attention_tokens)
    return [sum(lengths[one] for one in tree) - shared * (len(tree) - 1) for tree in trees]
