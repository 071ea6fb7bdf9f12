"""Weights that travel in buckets from several ranks.

Covers lrl/weights/buckets.py.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import closing
from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lrl.system.ranks import Ranks
from lrl.training.pieces import piece_of
from lrl.weights import nccl
from lrl.weights.buckets import Bucket, JoinOrder, buckets_of, checksum, damaged, plan_of
from lrl.weights.nccl import Broadcast
from lrl.weights.version_file import held_rows, spec_of
from tests.leftovers import wait_for
from tests.weights.test_staging import models, weights_of
from tests.weights.whole_weights import WholeWeights

CPU = torch.device("cpu")


def divided(
    weights: dict[str, torch.Tensor], ranks: int, nbytes: int
) -> list[tuple[Bucket, list[torch.Tensor]]]:
    """The buckets, each with what every rank sends of it."""
    with closing(WholeWeights(weights.items, ranks)) as policy:
        own = [list(one.pieces()) for one in policy.all]
    parts = [held_rows(of_rank, torch.bfloat16) for of_rank in own]
    left = [(piece.rows for piece in of_rank) for of_rank in own]
    plan = json.loads(json.dumps(plan_of(parts, nbytes)))
    found = []
    for bucket in buckets_of(plan):
        packed = [torch.ones(bucket.words(rank), dtype=torch.int64) for rank in range(ranks)]
        for sent, of_rank in zip(packed, left, strict=True):
            bucket.pack(islice(of_rank, len(bucket.tensors)), sent)
        found.append((bucket, packed))
    return found


@given(model=models, ranks=st.integers(1, 5), nbytes=st.integers(1, 4000))
def test_what_all_ranks_pack_is_every_tensor_bit_for_bit(
    model: list[tuple[list[int], torch.dtype]], ranks: int, nbytes: int
) -> None:
    weights = weights_of(model)
    found: dict[str, torch.Tensor] = {}
    for bucket, packed in divided(weights, ranks, nbytes):
        assert [len(sent) for sent in packed] == [bucket.words(rank) for rank in range(ranks)]
        assert not damaged(packed)
        found |= bucket.unpack(packed)
    assert found.keys() == weights.keys()
    for name, one in weights.items():
        sent = one.to(spec_of(piece_of(name, one, Ranks()), torch.bfloat16).dtype)
        assert found[name].dtype == sent.dtype and found[name].shape == one.shape
        assert torch.equal(found[name].view(-1).view(torch.uint8), sent.view(-1).view(torch.uint8))


@given(seed=st.integers(0, 2**31), fault=st.sampled_from(["bit", "swap", "zeros", "shift"]))
def test_words_that_change_or_move_have_another_checksum(seed: int, fault: str) -> None:
    draw = torch.Generator().manual_seed(seed)
    words = torch.randint(-(2**62), 2**62, (300,), generator=draw)
    place, other = sorted(torch.randperm(300, generator=draw)[:2].tolist())
    changed = words.clone()
    if fault == "bit":
        changed[place] ^= 1 << (seed % 63)
    if fault == "swap":
        words[other] = words[place] ^ -(2**63)  # they differ in a sign alone
        changed = words.clone()
        changed[place], changed[other] = words[other], words[place]
    if fault == "zeros":
        changed[place : other + 1] = 0
    if fault == "shift":
        changed = words.roll(1)
    assert checksum(words) != checksum(changed)


def test_ranks_that_have_the_weights_in_another_order_do_not_begin() -> None:
    weights = weights_of([([9, 4], torch.float32), ([9, 4], torch.float32)])
    policy = WholeWeights(weights.items, 2)
    policy.all[1].weights = dict(reversed(weights.items())).items
    with pytest.raises(RuntimeError, match="different orders"):
        policy.join_broadcast("pool", JoinOrder(b"", 3, torch.float32))


class Recording:
    """A communicator that notes what is broadcast until it is aborted."""

    device = CPU
    comm = None
    nccl = SimpleNamespace(ncclCommAbort=lambda comm: None)
    group_start = group_end = staticmethod(lambda: None)

    def __init__(self) -> None:
        self.disabled = False
        self.broadcasts = 0

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any) -> None:
        if not self.disabled:
            self.broadcasts += 1
            self.disabled = True  # another thread aborts it


def test_after_an_abort_the_rest_is_read_by_all_ranks_and_not_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weights = weights_of([([2, 2], torch.float32)] * 4)
    read: list[str] = []
    group = Recording()

    def each() -> Iterator[tuple[str, torch.Tensor]]:
        for name, one in weights.items():
            read.append(name)
            yield name, one

    monkeypatch.setattr(nccl, "join_communicator", lambda *_, **__: group)
    monkeypatch.setattr(nccl, "BUCKET_BYTES", 1)
    policy = WholeWeights(each)
    policy.join_broadcast("pool", JoinOrder(b"", 2, torch.float32))
    read.clear()
    policy.send_broadcast("pool").result(60)
    assert group.broadcasts == 1 and read == list(weights)


def test_a_communicator_that_is_joined_after_it_was_given_up_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group, go = Recording(), threading.Event()
    monkeypatch.setattr(nccl, "join_communicator", lambda *_, **__: go.wait(60) and group)
    broadcast = Broadcast()
    _, joined = broadcast.join(lambda: iter(()), JoinOrder(b"", 2, torch.float32), Ranks())
    broadcast.end(True, 60.0)
    assert not group.disabled
    go.set()
    joined.result(60)
    wait_for(lambda: group.disabled)
