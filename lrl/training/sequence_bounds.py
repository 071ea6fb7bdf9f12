"""The bounds of the sequences in a micro-batch, found from positions and readers where they lie: on
the CPU in collation, because a GPU that is asked has the host wait."""

import torch

from lrl.types import MicroBatch, SequenceBounds


def bounds_of(micro: MicroBatch) -> SequenceBounds:
    """Returns the bounds of a micro-batch's sequences."""
    rows, length = micro.position_ids.shape
    positions = micro.position_ids.flatten()
    place = torch.arange(rows * length, device=positions.device)
    begins_tree = positions == 0  # or a rollout of its own, or padding
    begins = begins_tree
    if micro.readers_end is not None:
        ends = micro.readers_end.flatten()
        begins = begins_tree | (ends != ends.roll(1))
    starts = begins.nonzero().squeeze(1)
    queries = torch.cat([starts, starts.new_tensor([rows * length])])
    own = queries.diff()
    shared = positions[starts]  # of a branch: the tokens before its first one
    if not shared.any():
        both, longest = queries.int(), int(own.max())
        return SequenceBounds(both, both, longest_query=longest, longest_key=longest)
    trees = torch.where(begins_tree, place, 0).cummax(0).values[starts]
    counts = shared + own
    keys = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    sequence = torch.arange(len(starts), device=place.device).repeat_interleave(counts)
    number = torch.arange(len(sequence), device=place.device) - keys[sequence]
    behind = number - shared[sequence]
    places = torch.where(behind < 0, trees[sequence] + number, starts[sequence] + behind)
    return SequenceBounds(
        queries.int(),
        keys.int(),
        longest_query=int(own.max()),
        longest_key=int(counts.max()),
        key_places=places.int(),
    )
