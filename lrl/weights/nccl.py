"""Weights by NCCL: every trainer rank broadcasts the rows that it holds to every worker of every
generator. The generators' end is `lrl.vllm_plugin.engines`.

The members meet by NCCL's unique id, which travels over the route that asks for the run's token;
vLLM's own way to meet is a store that asks for none.

NCCL waits for a lost member for ever, so whatever waits for others runs on a daemon thread, and
nothing ends it inside vLLM. The ranks abort their part, every generator that has not answered is
evicted, which kills its server, and the others connect anew.
"""

from __future__ import annotations

import atexit
import base64
import logging
import os
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, wait
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch

from lrl.errors import CollectiveBroken, RankLostError, StuckTransfer
from lrl.generators.generator import Generator
from lrl.system.event_loop import start_daemon_call
from lrl.system.ranks import Ranks
from lrl.weights.buckets import Bucket, JoinOrder, Plan, buckets_of, exchange, plan_of, this_device
from lrl.weights.pool_calls import INIT, UPDATE, Body, Failures, PoolCalls
from lrl.weights.transport import Machine, Transport
from lrl.weights.version_file import Pieces, held_rows

if TYPE_CHECKING:
    from lrl.generators.settings import ServerSettings
    from lrl.training.pieces import Piece

RELEASE = "/shutdown_weight_transfer_engine"
ABORT_S = 10.0
"""Seconds for an abort, which takes milliseconds when the driver is well."""
JOIN_S = 60.0
"""Longest wait of a rank until it has joined, when all workers have."""
BUCKET_BYTES = 2**28
"""Bytes of weights that travel at once; one tensor more may come on top."""
OF_ONE_MACHINE = (
    "NCCL_HOSTID", "NCCL_SOCKET_IFNAME", "NCCL_OOB_NET_IFNAME", "NCCL_IB_HCA", "NCCL_COMM_ID",
    "NCCL_CONF_FILE", "NCCL_DEBUG", "NCCL_DEBUG_FILE", "NCCL_DEBUG_SUBSYS", "NCCL_TOPO_FILE",
    "NCCL_TOPO_DUMP_FILE", "NCCL_GRAPH_FILE", "NCCL_GRAPH_DUMP_FILE", "NCCL_RAS_ADDR",
)  # fmt: skip
"""NCCL's variables that name things of one machine, and those of its log; all others must agree in
a communicator."""
NOT_TENSOR_PARALLEL = ("pipeline-parallel", "data-parallel", "prefill-context-parallel")
"""Beginnings of the vLLM flags that add workers in another way."""


class Nccl(Transport):
    backend = "nccl"
    collective = True

    @classmethod
    def refusal(cls, machine: Machine) -> str:
        """NCCL refuses two processes on one GPU, unless NCCL_HOSTID says that they are two machines
        (not run yet)."""
        if not machine.on_cuda:
            return "which needs a CUDA GPU"
        if machine.shares_device and "NCCL_HOSTID" not in os.environ:
            return "but the generator shares the trainer's GPU"
        return ""

    @classmethod
    def server_refusal(cls, settings: ServerSettings) -> str:
        """Each worker needs a rank in the communicator."""
        for name, value in settings.extra_args.items():
            flag = name.strip("-").replace("_", "-")
            if flag.startswith(NOT_TENSOR_PARALLEL) and value not in (None, 1, "1"):
                return (
                    f"strategy.server.extra_args sets {name} to {value!r}, and "
                    "strategy.weight_transfer nccl counts the workers of a generator by tensor "
                    "parallelism alone. Leave it out and set strategy.server.tensor_parallel_size."
                )
        return ""

    @classmethod
    def server_environment(cls, number: int) -> dict[str, str]:
        """Another host for each, where the trainer names its own (`refusal`)."""
        host = os.environ.get("NCCL_HOSTID")
        return {} if host is None else {"NCCL_HOSTID": f"{host}-generator-{number}"}

    @classmethod
    def common_environment(cls, own: Mapping[str, str]) -> dict[str, str]:
        """NCCL's: members that disagree about one of them may wait for each other for ever."""
        common = (one for one in own if one.startswith("NCCL_") and one not in OF_ONE_MACHINE)
        return {name: own[name] for name in common}

    def connect(self, calls: PoolCalls) -> None:
        """Makes a communicator: the trainer's ranks, and behind them the workers of all generators.
        CollectiveBroken if one did not join."""
        calls.each(
            RELEASE, lambda one: one.client.post(RELEASE, deadline_s=calls.silence_s), short=True
        )
        calls.need_all(RELEASE)  # every worker answers, before all wait for each other
        # The generators of a pool have one format.
        dtype = getattr(torch, calls.participants[0].server.settings.dtype)
        unique_id = new_unique_id()
        size = self.policy.ranks.size
        offsets: dict[Generator, dict[str, int]] = {}
        for generator in calls.participants:
            offsets[generator] = {"rank_offset": size}
            size += generator.server.settings.tensor_parallel_size
        order = JoinOrder(unique_id, size, dtype)
        plan, joined = self.policy.join_broadcast(self.name, order)
        encoded = base64.b64encode(unique_id).decode()
        common = {"plan": plan, "unique_id": encoded, "world_size": size}
        self._meet(calls, INIT, lambda one: {"init_info": common | offsets[one]}, joined)

    def send(self, calls: PoolCalls) -> None:
        """Raises CollectiveBroken if a generator failed, and StuckTransfer if the abort did not end
        the broadcast."""
        sending = self.policy.send_broadcast(self.name)
        self._meet(calls, UPDATE, lambda one: {"update_info": {}}, sending)

    def _meet(self, calls: PoolCalls, route: str, body: Body, own: Future[Any]) -> None:
        """Waits for both ends of a collective: the generators, which a call to `route` starts, and
        `own` on rank 0.

        At the first failure none of them can be answered any more: all that wait are at fault, and
        the ranks abort their end.
        """
        failed, waiting = Failures(), set[Generator]()
        broken = f"{route} for weight version {calls.version} broke off"

        async def post(generator: Generator) -> None:
            waiting.add(generator)
            await generator.client.post(route, body(generator), deadline_s=calls.deadline_s)
            waiting.remove(generator)

        def watch() -> None:
            lost = [
                one.name for one in calls.participants if one in failed or one.eviction is not None
            ]
            if lost:
                raise CollectiveBroken(f"{broken}, because {' and '.join(lost)} failed.")
            _raise_as_broken(own, route)
            calls.interrupted()

        try:
            calls.exclude_evicted()
            calls.need_all(route)
            calls.try_each(route, post, failed=failed, interrupted=watch)
            watch()
            wait([own], calls.deadline_s)  # it is at its end, as those of the generators are
            _raise_as_broken(own, route)
        except BaseException:
            calls.exclude_evicted()
            why = f"{broken}, and nothing ends it in a generator."
            calls.exclude(dict.fromkeys(waiting, why) | failed, hopeless=True)
            self.policy.end_broadcast(self.name, True, calls.deadline_s)
            raise
        self.policy.end_broadcast(self.name, False, calls.deadline_s)


def _raise_as_broken(own: Future[Any], what: str) -> None:
    """Raises the error of the trainer's part, if it has one; NCCL's own as CollectiveBroken."""
    error = own.exception() if own.done() else None
    if isinstance(error, RuntimeError) and not isinstance(
        error, torch.OutOfMemoryError | RankLostError
    ):
        raise CollectiveBroken(f"{what} broke off in the trainer: {error}") from error
    if error is not None:
        raise error


class Broadcast:
    """A trainer rank's part, which broadcasts the rows that it holds."""

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
        found = ranks.gather(held_rows(pieces(), order.narrow))
        plan = ranks.share(plan_of(found, BUCKET_BYTES) if found else {})
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
        """Waits for the end of `send`; all ranks call it. Raises StuckTransfer if that did not end
        within `deadline_s`: nothing on the GPU may ever return."""
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
    """Joins a communicator as vLLM's workers do; blocks until all `world_size` members have
    joined."""
    from vllm.distributed.weight_transfer import nccl_common

    return nccl_common.uid_init_process_group(unique_id, rank, world_size, device)


def abort(communicator: Any) -> None:
    """Ends all that waits in `communicator`, for good; waits up to `ABORT_S`. Kernels and threads
    poll the flag that `ncclCommAbort` sets.

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
