"""A step of two made-up responses, to try a user's own loss on."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import NoReturn

import torch

from lrl.training.collate import fill_rows
from lrl.training.prefix_tree import PrefixTree, TrainingSample
from lrl.types import MicroBatch, Rollout, Step


def try_step(train: Callable[[Step, int], object]) -> None:
    """Calls `training_step` with a step that ends behind its only gradient: an optimizer step would
    count as a version."""
    with suppress(_Tried):
        train(_MadeUpStep(), 0)


class _Tried(Exception):
    """The gradient is there."""


class _MadeUpStep:
    """Its only micro-batch has a right and a wrong response to one prompt."""

    num_tokens = 4
    num_sequences = 2

    def __iter__(self) -> Iterator[MicroBatch]:
        yield fill_rows([[PrefixTree([_response(1.0)])], [PrefixTree([_response(-1.0)])]], 1.0)
        raise _Tried

    def finish(self) -> NoReturn:
        """See `lrl.types.Step`."""
        raise _Tried


def _response(advantage: float) -> TrainingSample:
    rollout = Rollout(token_ids=[1, 2], logprobs=[-1.0, -1.0], versions=[0, 0])
    rollout.reference_logprobs = rollout.logprobs
    return TrainingSample(0, [1], rollout, torch.tensor(advantage), trained=[True, True])
