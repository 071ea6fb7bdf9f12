"""Packing of groups into micro-batches by token budget, while groups are still arriving.

Only lengths decide which rollouts share a micro-batch, and which a row. A row is as long as the
longest sequence of its round, and shorter sequences share rows by best-fit decreasing. A round is a
micro-batch for each rank. It is made as soon as the waiting sequences fill the token budgets of all
ranks; it takes the longest ones, and leaves the shortest, which fit anywhere, for later. With whole
groups a round takes as many groups as fit the budgets, and at least one.

Ranks wait for one another at the end of a step, so they get equal work: none has more rows of a
round than an equal share, rounded up, and the sums of squared lengths, which are the cost of
attention, become equal.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass

from lrl.advantages import Advantages
from lrl.training.collate import blank, fill_rows
from lrl.training.prefix_tree import PrefixTree, TrainingSample, prefix_trees, samples_of
from lrl.types import ENVIRONMENT, Group, MicroBatch

Rows = list[list[PrefixTree]]
Round = list[MicroBatch | None]
"""Micro-batches that train at the same time: one for each rank, None or a blank for a rank that
gets none."""


@dataclass(eq=False)
class BinPacker:
    """Sequences that wait to become micro-batches for `ranks`; it reads only their lengths and
    groups. Other settings are `Packer`'s."""

    micro_batch_tokens: int
    whole_groups: bool = False
    ranks: int = 1
    share_rows: bool = True

    def __post_init__(self) -> None:
        self.squares = [0] * self.ranks
        """Sum of the squared lengths of each rank's sequences so far."""
        self.budget = self.micro_batch_tokens * self.ranks
        """Tokens that fill a round."""
        self._waiting: list[PrefixTree] = []

    def add(self, sequence: PrefixTree) -> None:
        self._waiting.append(sequence)

    def full(self) -> Iterator[list[Rows]]:
        """Yields each full round as the rows of every rank; those not taken stay."""
        while sum(map(len, self._waiting)) >= self.budget:
            yield self._round()

    def flush(self) -> Iterator[list[Rows]]:
        while self._waiting:
            yield self._round()

    def _round(self) -> list[Rows]:
        if self.whole_groups:
            groups = self._first_groups()
            shares = self._divide(groups, most=len(groups))
            sequences = [[sequence for group in share for sequence in group] for share in shares]
            return [self._fit(each, max_rows=len(each))[0] for each in sequences]
        most = max(1, self.micro_batch_tokens // max(map(len, self._waiting)))
        rows, self._waiting = self._fit(self._waiting, max_rows=most * self.ranks)
        return self._divide(rows, most=-(-len(rows) // self.ranks))

    def _divide(self, parts: list[list[PrefixTree]], most: int) -> list[Rows]:
        """Divides `parts` among the ranks, at most `most` each: the heaviest first, to the rank
        with the least work."""
        shares: list[Rows] = [[] for _ in self.squares]
        squares = ((sum(len(sequence) ** 2 for sequence in part), part) for part in parts)
        for square, part in sorted(squares, key=lambda one: one[0], reverse=True):
            free = [rank for rank, share in enumerate(shares) if len(share) < most]
            rank = min(free, key=self.squares.__getitem__)
            shares[rank].append(part)
            self.squares[rank] += square
        return shares

    def _first_groups(self) -> list[list[PrefixTree]]:
        """Takes the oldest waiting groups that fit the budgets together, at least one."""
        groups: dict[int, list[PrefixTree]] = {}
        for sequence in self._waiting:
            groups.setdefault(sequence.group, []).append(sequence)
        chosen, taken = list[list[PrefixTree]](), list[PrefixTree]()
        for members in groups.values():
            taken += members
            # In shared rows only the tokens are counted, as if there were no padding.
            tokens = sum(map(len, taken)) if self.share_rows else len(taken) * max(map(len, taken))
            if chosen and tokens > self.budget:
                break
            chosen.append(members)
        later = list(groups.values())[len(chosen) :]
        self._waiting = [sequence for members in later for sequence in members]
        return chosen

    def _fit(self, sequences: list[PrefixTree], max_rows: int) -> tuple[Rows, list[PrefixTree]]:
        """Packs by best-fit decreasing into at most `max_rows` rows as long as the longest
        sequence; returns them, and the sequences that did not fit."""
        longest = max(map(len, sequences), default=0)
        rows: Rows = []
        # (free tokens, row), sorted: the first that is large enough fits best.
        free: list[tuple[int, int]] = []
        left = []
        for sequence in sorted(sequences, key=len, reverse=True):
            best = bisect_left(free, (len(sequence), 0))
            if best < len(free):
                space, row = free.pop(best)
            elif len(rows) < max_rows:
                space, row = longest, len(rows)
                rows.append([])
            else:
                left.append(sequence)
                continue
            rows[row].append(sequence)
            if self.share_rows:
                insort(free, (space - len(sequence), row))
        return rows, left


@dataclass(eq=False)
class Packer:
    """Packs the groups of one step; its counts are the step's.

    Args:
        micro_batch_tokens: Budget of a micro-batch: rows x row length, padding included. A single
            longer rollout gets a micro-batch of its own.
        advantages: The group baseline.
        temperature: Of the sampling.
        oldest_version: Older tokens are masked out of the loss; None trains every token.
        whole_groups: Whether a group goes into one micro-batch, whatever its size.
        mask_truncated: Whether cut responses have no token in the loss; the baseline still counts
            them (overlong filtering: DAPO, 2503.14476, section 3.4).
        data_parallel_size: Micro-batches of a round, of equal work.
        share_rows: Whether several responses may lie in one row.
        blanks: Whether a rank that gets none gets a blank, because its weights are sharded.
        attention_tokens: See `lrl.training.prefix_tree.prefix_trees`; 0 gives each sample its own
            copy of the tokens it shares.
        masks: Whether every micro-batch says who reads what (`lrl.training.trials.Shared`).
    """

    micro_batch_tokens: int
    advantages: Advantages
    temperature: float
    oldest_version: int | None = None
    whole_groups: bool = False
    mask_truncated: bool = False
    data_parallel_size: int = 1
    share_rows: bool = True
    blanks: bool = False
    attention_tokens: int = 0
    masks: bool = False

    def __post_init__(self) -> None:
        self.tokens = 0
        """Response tokens in the loss so far: the step's denominator once every group is in."""
        self.sequences = 0
        """Responses with a token in the loss so far."""
        self.masked_tokens = 0
        """Response tokens out of the loss: too old, or of a response that was cut."""
        self.discarded_rollouts = 0
        """Responses without a reward, and responses of discarded groups."""
        self.discarded_groups: list[int] = []
        """`Group.index` of each group with too few scored responses for a baseline."""
        self.samples: list[TrainingSample] = []
        """Samples with a token in the loss: responses, or their branches."""
        self.on_first_rank: list[list[TrainingSample]] = []
        """For each micro-batch of rank 0, its samples in the order of `MicroBatch.sequence_ids`."""
        self._slots = self._padded = 0
        self._copied = self._saved = 0
        self._bins = BinPacker(
            self.micro_batch_tokens, self.whole_groups, self.data_parallel_size, self.share_rows
        )

    @property
    def padding(self) -> float:
        """Share of the tokens in all micro-batches so far that is padding."""
        return self._padded / max(1, self._slots)

    @property
    def shared(self) -> float:
        """Share of the tokens of prompts and responses that were read as another response's."""
        return self._saved / max(1, self._copied)

    def add(self, group: Group, replayed: bool = False) -> Iterator[Round]:
        """Adds a finished group; returns an iterator over the rounds that are full by now. Tokens
        of a replayed group are trained whatever their age."""
        scored = group.scored
        self.discarded_rollouts += len(group.rollouts) - len(scored)
        if len(scored) < self.advantages.min_rollouts:
            self.discarded_rollouts += len(scored)
            self.discarded_groups.append(group.index)
            return iter(())
        samples = []
        of_policy = ENVIRONMENT + 1
        oldest = of_policy if replayed or self.oldest_version is None else self.oldest_version
        for rollout, advantages in zip(scored, self.advantages.of(scored), strict=True):
            masked = self.mask_truncated and rollout.cut
            trained = [not masked and version >= oldest for version in rollout.versions]
            self.tokens += sum(trained)
            self.masked_tokens += sum(rollout.mask) - sum(trained)
            if any(trained):
                self.sequences += 1
                samples += samples_of(group, rollout, advantages, trained)
        self.samples += samples
        for tree in prefix_trees(samples, self.micro_batch_tokens, self.attention_tokens):
            copied = sum(map(len, tree.samples))
            self._copied += copied
            self._saved += copied - len(tree)
            self._bins.add(tree)
        return map(self._filled, self._bins.full())

    def flush(self) -> Iterator[Round]:
        return map(self._filled, self._bins.flush())

    def _filled(self, each: list[Rows]) -> Round:
        if trees := [tree for row in each[0] for tree in row]:
            self.on_first_rank.append([sample for tree in trees for sample in tree.samples])
        filled = [fill_rows(rows, self.temperature, self.masks) if rows else None for rows in each]
        for micro in filter(None, filled):
            self._slots += micro.input_ids.numel()
            self._padded += int((micro.sequence_ids < 0).sum())
        return [blank() if micro is None and self.blanks else micro for micro in filled]
