"""Packing of groups into micro-batches by token budget, while groups are still arriving.

Responses differ tenfold in length, so a fixed number of them per micro-batch would mostly be
padding. Only lengths decide which rollouts share a micro-batch (`lrl.rollouts.bin_packing`), but an
objective may ask for whole groups.

Rollouts with an advantage of exactly 0 are packed like others. Under AIPO they have no gradient,
under other objectives they may.
"""

from collections.abc import Iterator

from lrl.advantages import Advantages
from lrl.rollouts.bin_packing import BinPacker, Rows
from lrl.training.collate import blank, fill_rows
from lrl.training.prefix_tree import PrefixTree, TrainingSample, prefix_trees, samples_of
from lrl.types import ENVIRONMENT, Group, MicroBatch, Rollout

Round = list[MicroBatch | None]
"""Micro-batches that train at the same time: one for each rank, None or a blank for a rank that
gets none."""


class Packer:
    """Packs the groups of one step; its counts are the step's.

    Args:
        micro_batch_tokens: Budget of a micro-batch: rows x row length, padding included. A single
            longer rollout gets a micro-batch of its own.
        advantages: The group baseline.
        temperature: Sampling temperature of the responses.
        oldest_version: Tokens written by an older version are masked out of the loss (trainer
            version - max_lag); None trains every token.
        whole_groups: Whether all trained rollouts of a group go into one micro-batch, whatever its
            size.
        mask_truncated: Whether responses that were cut at the token limit have no token in the
            loss; the baseline still counts them (overlong filtering: DAPO, 2503.14476, section
            3.4).
        data_parallel_size: Micro-batches of a round, of equal work.
        share_rows: Whether several responses may lie in one row; not with a model in which they
            would see each other.
        blanks: Whether a rank that gets none gets a blank, because its weights are sharded.
        attention_tokens: For samples of a group that share their first tokens
            (`lrl.training.prefix_tree.prefix_trees`); 0 gives each its own copy.
        masks: Whether every micro-batch says who reads what (`lrl.training.trials.Shared`).
    """

    def __init__(
        self,
        micro_batch_tokens: int,
        advantages: Advantages,
        temperature: float,
        oldest_version: int | None = None,
        whole_groups: bool = False,
        mask_truncated: bool = False,
        data_parallel_size: int = 1,
        share_rows: bool = True,
        blanks: bool = False,
        attention_tokens: int = 0,
        masks: bool = False,
    ) -> None:
        self._masks = masks
        self.advantages = advantages
        self.micro_batch_tokens = micro_batch_tokens
        self.temperature = temperature
        self.oldest_version = oldest_version
        self.mask_truncated = mask_truncated
        self._blanks = blanks
        self.attention_tokens = attention_tokens
        self.tokens = 0
        """Response tokens in the loss so far: the step's denominator once every group is in."""
        self.sequences = 0
        """Responses with at least one token in the loss so far."""
        self.masked_tokens = 0
        """Response tokens left out of the loss because they were too old or their response was
        cut."""
        self.cut_rollouts = 0
        """Responses without a token in the loss because they were cut."""
        self.old_rollouts = 0
        """Responses without a token in the loss because all of theirs were too old."""
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
        self._bins = BinPacker[PrefixTree](
            micro_batch_tokens, whole_groups, data_parallel_size, share_rows
        )

    @property
    def budget(self) -> int:
        """Tokens that fill a round."""
        return self._bins.budget

    @property
    def padding(self) -> float:
        """Share of the tokens in all micro-batches so far that is padding."""
        return self._padded / max(1, self._slots)

    @property
    def shared(self) -> float:
        """Share of the tokens of prompts and responses that were read as another response's."""
        return self._saved / max(1, self._copied)

    def add(self, group: Group, replayed: bool = False) -> Iterator[Round]:
        """Adds a finished group, and returns an iterator over the rounds that are full by now.

        Rounds that are not taken from the iterator stay for the next `add` or `flush`. The tokens
        of a replayed group are trained whatever their age.
        """
        scored = group.scored
        self.discarded_rollouts += len(group.rollouts) - len(scored)
        if len(scored) < self.advantages.min_rollouts:
            self.discarded_rollouts += len(scored)
            self.discarded_groups.append(group.index)
            return iter(())
        samples = []
        for rollout, advantages in zip(scored, self.advantages.of(scored), strict=True):
            trained = self._trained(rollout, None if replayed else self.oldest_version)
            self.tokens += sum(trained)
            self.masked_tokens += sum(rollout.mask) - sum(trained)
            if any(trained):
                self.sequences += 1
                samples += samples_of(group, rollout, advantages, trained)
            elif self._is_cut(rollout):
                self.cut_rollouts += 1
            elif any(rollout.mask):
                self.old_rollouts += 1
        self.samples += samples
        for tree in prefix_trees(samples, self.micro_batch_tokens, self.attention_tokens):
            copied = sum(map(len, tree.samples))
            self._copied += copied
            self._saved += copied - len(tree)
            self._bins.add(tree)
        return map(self._filled, self._bins.full())

    def flush(self) -> Iterator[Round]:
        """Returns the rounds of all rollouts that still wait."""
        return map(self._filled, self._bins.flush())

    def why_empty(self) -> str:
        """Returns why no token is in the loss, in the words of the settings."""
        causes = {
            "were cut at data.max_response_tokens, and data.mask_truncated "
            "leaves those out": self.cut_rollouts,
            "have no reward, or too few of their group have one": self.discarded_rollouts,
            "are older than data.max_lag (data.stragglers: mask)": self.old_rollouts,
        }
        found = [f"{count} responses {cause}" for cause, count in causes.items() if count]
        return ", ".join(found) or "no response has a token"

    def _is_cut(self, rollout: Rollout) -> bool:
        return self.mask_truncated and rollout.cut

    def _filled(self, each: list[Rows[PrefixTree]]) -> Round:
        if trees := [tree for row in each[0] or () for tree in row]:
            self.on_first_rank.append([sample for tree in trees for sample in tree.samples])
        filled = [fill_rows(rows, self.temperature, self._masks) if rows else None for rows in each]
        for micro in filled:
            if micro is not None:
                self._slots += micro.input_ids.numel()
                self._padded += int((micro.sequence_ids < 0).sum())
        return [blank() if micro is None and self._blanks else micro for micro in filled]

    def _trained(self, rollout: Rollout, oldest_version: int | None) -> list[bool]:
        """Returns for each token of a rollout whether it is in the loss; an environment's never
        is."""
        if self._is_cut(rollout):
            return [False] * len(rollout.versions)
        oldest = ENVIRONMENT + 1 if oldest_version is None else oldest_version
        return [version >= oldest for version in rollout.versions]
