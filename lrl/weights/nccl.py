"""Weights by NCCL: a packed broadcast from trainer rank 0 to every worker of every generator.

The generators' end is vLLM's engine, made so that it can be ended (`lrl.vllm_plugin.nccl_engine`).
The trainer's end is not vLLM's: that one meets the workers through a store on a port of its own,
which asks for no token, and waits for a lost worker for ever. Here the members meet by NCCL's
unique id, which travels over the route that asks for the run's token, and whatever waits for other
members runs on a thread beside the one that watches it (`lrl.weights.both_ends`)."""

from __future__ import annotations

import atexit
import base64
import logging
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lrl.errors import StuckTransfer
from lrl.system.event_loop import start_daemon_call
from lrl.weights import communicator
from lrl.weights.both_ends import wait_for_both_ends
from lrl.weights.group_calls import GeneratorGroupCalls
from lrl.weights.staging import Weights
from lrl.weights.transport import Machine, Transport
from lrl.weights.wire import Wire

if TYPE_CHECKING:
    from lrl.generators.settings import ServerSettings

BUFFER_BYTES = 2**28
"""Bytes that are packed for one broadcast; one tensor more may come on top."""
BUFFER_COUNT = 2
"""Buffers of either side, so that one is packed or loaded while the other travels."""
OF_ONE_MACHINE = (
    "NCCL_HOSTID",
    "NCCL_SOCKET_IFNAME",
    "NCCL_OOB_NET_IFNAME",
    "NCCL_IB_HCA",
    "NCCL_COMM_ID",
    "NCCL_CONF_FILE",
    "NCCL_DEBUG",
    "NCCL_DEBUG_FILE",
    "NCCL_DEBUG_SUBSYS",
    "NCCL_TOPO_FILE",
    "NCCL_TOPO_DUMP_FILE",
    "NCCL_GRAPH_FILE",
    "NCCL_GRAPH_DUMP_FILE",
    "NCCL_RAS_ADDR",
)
"""NCCL's variables that name things of one machine, and those of its log; all others must agree in
a communicator."""
NOT_TENSOR_PARALLEL = ("pipeline-parallel", "data-parallel", "prefill-context-parallel")
"""Beginnings of the vLLM flags that add workers to a generator in another way than tensor
parallelism."""


class Nccl(Transport):
    """The transport to generators on other GPUs than the trainer's."""

    backend = "nccl"
    collective = True
    middleware = ("lrl.vllm_plugin.abort_route.AbortRoute",)
    attempts = 3
    _wire: Wire

    @classmethod
    def refusal(cls, machine: Machine) -> str:
        """NCCL refuses two processes on one GPU, unless it takes them for two machines.

        NCCL_HOSTID in the trainer's environment asks for that (not run yet).
        """
        if not machine.on_cuda:
            return "which needs a CUDA GPU"
        if machine.adapters:
            return "which sends whole weights, and model.lora trains adapters"
        if machine.shares_device and "NCCL_HOSTID" not in os.environ:
            return "but the generator shares the trainer's GPU"
        return ""

    @classmethod
    def server_refusal(cls, settings: ServerSettings) -> str:
        """Each worker needs a rank in the communicator, and the ranks are counted by tensor
        parallelism alone."""
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
    def server_environment(cls, number: int, inherited: Mapping[str, str]) -> dict[str, str]:
        """Another host for each generator, where the trainer's environment names one
        (`refusal`)."""
        host = inherited.get("NCCL_HOSTID")
        return {} if host is None else {"NCCL_HOSTID": f"{host}-generator-{number}"}

    @classmethod
    def common_environment(cls, own: Mapping[str, str]) -> dict[str, str]:
        """NCCL's variables: members that disagree about one of them may wait for each other for
        ever."""
        return {
            name: own[name]
            for name in own
            if name.startswith("NCCL_") and name not in OF_ONE_MACHINE
        }

    @classmethod
    def buffer_bytes(cls, largest: int) -> int:
        """The buffers, and one that is made before the oldest is free; each may exceed its size by
        a tensor."""
        return (BUFFER_COUNT + 1) * (BUFFER_BYTES + largest)

    def __init__(self) -> None:
        self._communicator: Any = None
        self._name = ""

    def connect(self, calls: GeneratorGroupCalls, weights: Weights, name: str) -> None:
        """Makes a communicator: rank 0 is the trainer, the workers of all generators follow.

        Raises:
            CollectiveBroken: A generator did not join.
            ConfigError: vLLM does not use NCCL in the trainer.
        """
        calls.release_engines()
        # The generators of a pool have one format.
        dtype = calls.participants[0].server.settings.dtype
        self._wire = Wire(weights, getattr(torch, dtype))
        unique_id = communicator.new_unique_id()
        encoded = base64.b64encode(unique_id).decode()
        self._name = communicator.transfer_name(encoded)
        size = 1
        offsets = {}
        for generator in calls.participants:
            offsets[generator] = size
            size += generator.server.settings.tensor_parallel_size
        info = {
            "nccl_unique_id_b64": encoded,
            "world_size": size,
            "packed": True,
            "packed_buffer_size_bytes": BUFFER_BYTES,
            "packed_num_buffers": BUFFER_COUNT,
        }
        joining = calls.start_init(
            {generator: info | {"rank_offset": offset} for generator, offset in offsets.items()}
        )
        join = partial(communicator.join, unique_id, rank=0, world_size=size, device=this_device())
        joined = start_daemon_call(join, "lrl-nccl-join")

        def give_up() -> None:
            # NCCL gives no handle by which to end the call itself.
            joined.add_done_callback(_abort_late)

        self._communicator = wait_for_both_ends(
            calls, joining, joined, name=self._name, abort=give_up
        )

    def send(self, calls: GeneratorGroupCalls) -> None:
        """See `Transport.send`.

        Raises:
            CollectiveBroken: The communicator was aborted, because a generator failed or the
                deadline passed.
            StuckTransfer: The abort did not end the broadcast.
        """
        calls.start_weight_update()
        names = [one.name for one in self._wire.tensors]
        dtypes = [str(one.dtype).removeprefix("torch.") for one in self._wire.tensors]
        shapes = [list(one.shape) for one in self._wire.tensors]
        updating = calls.start_update({"names": names, "dtype_names": dtypes, "shapes": shapes})
        sending = start_daemon_call(self._broadcast_from(this_device()), "lrl-nccl-broadcast")

        def abort() -> None:
            abort_broadcast(self._communicator, sending, calls.deadline_s)

        wait_for_both_ends(calls, updating, sending, name=self._name, abort=abort)
        calls.finish_weight_update()

    def close(self) -> None:
        """Leaves the communicator; the workers leave it before they join the next."""
        communicator.abort(self._communicator)
        self._communicator = None

    def _broadcast_from(self, device: torch.device) -> Callable[[], None]:
        """Returns the broadcast for another thread, which reads the weights on this thread's
        stream."""
        stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        if stream is not None:
            stream.synchronize()  # the optimizer's last kernels may still write

        def broadcast() -> None:
            from vllm.distributed.weight_transfer.packed_tensor import (
                packed_nccl_broadcast_producer,
            )

            if device.type == "cuda":
                torch.cuda.set_device(device)  # a thread begins with the first device
            tensors = self._tensors(stream)
            try:
                packed_nccl_broadcast_producer(
                    iterator=tensors,
                    group=self._communicator,
                    src=0,
                    post_iter_func=lambda item: item[1],
                    buffer_size_bytes=BUFFER_BYTES,
                    num_buffers=BUFFER_COUNT,
                )
            finally:
                deque(tensors, maxlen=0)  # all ranks take part in reading, to the end

        return broadcast

    def _tensors(self, stream: Any) -> Iterator[tuple[str, Tensor]]:
        """Yields each tensor when it is complete.

        vLLM packs on streams of its own. A sharded tensor is gathered on `stream`: on theirs, the
        gathering and the broadcast could wait for each other on the GPU. After an abort the rest is
        read and not sent.
        """
        group, tensors = self._communicator, iter(self._wire)
        while True:
            with torch.no_grad(), nullcontext() if stream is None else torch.cuda.stream(stream):
                found = next(tensors, None)
                if stream is not None:
                    stream.synchronize()
            if found is None:
                return
            # It is packed on the present stream, and may be freed before that has happened.
            if stream is not None:
                found[1].record_stream(torch.cuda.current_stream())
            if not group.disabled:
                yield found


def this_device() -> torch.device:
    """Returns the device of this thread."""
    return (
        torch.device("cuda", torch.cuda.current_device())
        if torch.cuda.is_available()
        else torch.device("cpu")
    )


def _abort_late(joined: Future[Any]) -> None:
    """Ends a communicator that came into being after it was given up."""
    if joined.exception() is None:
        communicator.abort(joined.result())


def abort_broadcast(group: Any, sending: Future[Any], deadline_s: float) -> None:
    """Aborts a broadcast that waits for a lost member, or ends the process.

    The flag that an abort sets ends the kernels and threads that wait, the broadcast returns, and
    the run continues. If it does not, the driver or the GPU is broken, and nothing on it may ever
    return: the run ends by an error, with its last checkpoint if that can still be read.

    Args:
        group: The communicator.
        sending: The broadcast, on a thread of its own.
        deadline_s: Seconds for its return: it may have to read the rest of a sharded policy.

    Raises:
        StuckTransfer: The broadcast has not returned.
    """
    started = time.monotonic()
    if communicator.abort(group) and wait([sending], deadline_s).done:
        return
    # CUDA's libraries would wait for the GPU as they are unloaded.
    atexit.register(_leave)
    raise StuckTransfer(
        f"The broadcast of the weights has not ended {time.monotonic() - started:.0f} s after its "
        "abort: the GPU or its driver hangs. The run ends; resume it from its newest checkpoint, "
        "on a machine that is well."
    )


def _leave() -> None:
    """Ends the process with status 1 before any library is unloaded: `atexit` runs what was
    registered last first."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
