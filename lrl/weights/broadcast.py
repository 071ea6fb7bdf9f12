"""The transfer by NCCL: a communicator as vLLM holds it, and a trainer rank's part, which broadcasts
the rows that it holds.

NCCL waits for a lost member for ever, so whatever waits for other members runs on a daemon thread.
`ncclCommAbort` is the only way out: the kernels and threads of a communicator poll the flag that it
sets. It can be called while they wait, but nothing may use the communicator afterwards.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch

from lrl.errors import StuckTransfer
from lrl.system.event_loop import start_daemon_call
from lrl.system.ranks import Ranks
from lrl.weights.buckets import Bucket, Plan, buckets_of, exchange, plan_of
from lrl.weights.version_file import Pieces, spec_of

if TYPE_CHECKING:
    from lrl.training.pieces import Piece

ABORT_S = 10.0
"""Seconds for an abort, which takes milliseconds when the driver is well."""
JOIN_S = 60.0
"""Longest wait of a rank until it has joined, when all workers have."""


@dataclass(frozen=True)
class JoinOrder:
    """Rank 0's order to join a communicator."""

    unique_id: bytes
    size: int
    """Members: the ranks, then the workers of all generators."""
    narrow: torch.dtype
    """The generators' number format (`lrl.weights.version_file.transfer_dtype`)."""
    bucket_bytes: int


class Broadcast:
    """One rank's part."""

    def __init__(self) -> None:
        self._joined: Future[Any] = Future()
        self._sent: Future[None] | None = None
        self._pieces: Pieces = lambda: iter(())
        self._buckets: list[Bucket] = []

    def join(self, pieces: Pieces, order: JoinOrder, ranks: Ranks) -> tuple[Plan, Future[Any]]:
        """Begins to join a communicator, and leaves the one before; all ranks call it. Returns what
        travels, and the communicator."""
        self.close()
        self._pieces = pieces
        tensors, own = [], []
        for piece in pieces():
            tensors.append(spec_of(piece, order.narrow))
            own.append((piece.start, len(piece.rows)))
        names = [one.name for one in tensors]
        found = ranks.gather((names, own))
        if any(of_rank != names for of_rank, _ in found):
            raise RuntimeError("The ranks have the policy's weights in different orders.")
        rows = ranks.share([of_rank for _, of_rank in found])
        plan = plan_of(tensors, rows, order.bucket_bytes)
        self._buckets = buckets_of(plan)
        join = partial(
            join_communicator,
            order.unique_id,
            rank=ranks.rank,
            world_size=order.size,
            device=this_device(),
        )
        self._joined = start_daemon_call(join, "lrl-nccl-join")
        return plan, self._joined

    def send(self, ranks: Ranks) -> Future[None]:
        """Begins to broadcast the weights as they are now; all ranks call it."""
        group, device = self._joined.result(JOIN_S), this_device()
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()  # the optimizer may still write
        send = partial(self._send, self._pieces(), group, rank=ranks.rank, device=device)
        self._sent = start_daemon_call(send, "lrl-nccl-broadcast")
        return self._sent

    def end(self, abort: bool, deadline_s: float) -> None:
        """Waits for the end of `send`; all ranks call it.

        Raises:
            StuckTransfer: It has not ended within `deadline_s`: the driver or the GPU is broken, and
                nothing on it may ever return.
        """
        if abort:
            self.close()
        sent, self._sent = self._sent, None
        if sent is None:
            return
        if not wait([sent], deadline_s).done:
            # CUDA's libraries would wait for the GPU as they are unloaded.
            atexit.register(_leave)
            raise StuckTransfer(
                f"The broadcast of the weights has not ended within {deadline_s:g} s: the GPU or its "
                "driver hangs. The run ends; resume it from its newest checkpoint, on a machine that "
                "is well."
            )
        if not abort:
            sent.result()

    def close(self) -> None:
        """Leaves the communicator, at once or as soon as it has joined; idempotent."""
        joined, self._joined = self._joined, Future()
        joined.add_done_callback(_abort)

    def _send(self, pieces: Iterator[Piece], group: Any, rank: int, device: torch.device) -> None:
        if device.type == "cuda":
            torch.cuda.set_device(device)  # a thread begins with the first device
        rows = (piece.rows for piece in pieces)
        try:
            with torch.no_grad():
                for bucket in self._buckets:
                    own = torch.empty(bucket.words(rank), dtype=torch.int64, device=device)
                    bucket.pack(islice(rows, len(bucket.tensors)), own)
                    exchange(group, bucket, rank, own=own, device=device)
                    if device.type == "cuda":
                        torch.cuda.current_stream(device).synchronize()
        finally:
            deque(rows, maxlen=0)  # all ranks take part in reading, to the end


def new_unique_id() -> bytes:
    """Returns NCCL's unique id with this process as the root of a communicator; OSError without a
    library."""
    from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary

    return bytes(NCCLLibrary().ncclGetUniqueId().internal)


def join_communicator(unique_id: bytes, rank: int, world_size: int, device: torch.device) -> Any:
    """Joins a communicator as vLLM's workers do; blocks until all `world_size` members have joined."""
    from vllm.distributed.weight_transfer import nccl_common

    return nccl_common.uid_init_process_group(unique_id, rank, world_size, device)


def abort(communicator: Any) -> None:
    """Ends all that waits in `communicator`, for good; waits up to `ABORT_S`.

    Not vLLM's `destroy`: that marks the communicator as unusable when the abort is over, and a
    thread that the abort sets free would use it meanwhile.
    """
    if communicator is None or communicator.disabled:
        return
    communicator.disabled = True  # from now on its collectives do nothing

    def end() -> None:
        with torch.accelerator.device_index(communicator.device.index):
            communicator.nccl.ncclCommAbort(communicator.comm)
        communicator.available = False

    wait([start_daemon_call(end, "lrl-nccl-abort")], ABORT_S)


def this_device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _abort(joined: Future[Any]) -> None:
    if joined.exception() is None:
        abort(joined.result())


def _leave() -> None:
    """Ends the process with status 1 before any library is unloaded: `atexit` runs what was
    registered last first."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
