"""Communicators of two processes on one GPU, and the end of one whose other member is dead: the
processes of the rows `nccl` and `fsdp`.

torch's on a CPU is gloo. Its watchdog is off (`UNWATCHED`): it would end a process whose collective
fails, before anybody could see what an abort does.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import wait
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _abort_process_group

from benchmarks.gpu.row_processes import WAIT_S, Part, connect
from benchmarks.gpu.rows import first_lines
from lrl.system.event_loop import start_daemon_call
from lrl.system.ranks import Ranks
from lrl.weights import broadcast as communicator

UNWATCHED = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}
LIVING_S = 1.0
"""Seconds in which an all-reduce without the other member must not end."""
ALONE_S = 3.0
"""Seconds in which one may end by itself when the other member is dead."""


class OfTorch:
    """The default process group."""

    def __init__(self, part: Part, name: str, rank: int) -> None:
        on_gpu = part.device.type == "cuda"
        backend = "nccl" if on_gpu else "gloo"
        self.about = f"{backend} {'.'.join(map(str, torch.cuda.nccl.version())) if on_gpu else ''}"
        dist.init_process_group(
            backend,
            store=dist.PrefixStore(name, connect(part.port)),  # its threads wait there, too
            rank=rank,
            world_size=2,
            timeout=timedelta(seconds=WAIT_S),
            device_id=part.device if on_gpu else None,
        )

    def broadcast(self, tensor: Tensor) -> None:
        dist.broadcast(tensor, 0)

    def all_reduce(self, tensor: Tensor) -> None:
        dist.all_reduce(tensor)

    def abort(self) -> None:
        _abort_process_group()


class OfVllm:
    """NCCL's communicator of a weight transfer (`lrl.weights.broadcast`)."""

    def __init__(self, part: Part, name: str, rank: int) -> None:
        if rank == 0:
            part.give(name, communicator.new_unique_id())
        self._group = communicator.join_communicator(part.take(name), rank, 2, part.device)
        self.about = f"vLLM's NCCL {self._group.nccl.ncclGetVersion()}"

    def broadcast(self, tensor: Tensor) -> None:
        self._group.broadcast(tensor, src=0)

    def all_reduce(self, tensor: Tensor) -> None:
        self._group.all_reduce(tensor)

    def abort(self) -> None:
        if not communicator.abort(self._group):
            raise TimeoutError(f"the abort did not end within {communicator.ABORT_S:g} s")


def link(part: Part, name: str, rank: int) -> OfTorch | OfVllm:
    part.waits_for(f"the other member of communicator {name!r}")
    started = time.perf_counter()
    joined = (OfVllm if part.row.endswith("-vllm") else OfTorch)(part, name, rank)
    part.keep(communicator=name, join_s=time.perf_counter() - started, about=joined.about)
    part.waits_for("its own device")
    return joined


def send(part: Part) -> None:
    joined, numbers = link(part, "first", 0), part.numbers()
    joined.broadcast(numbers)
    part.take("same numbers")
    seconds = part.repeated(partial(joined.broadcast, numbers))
    part.keep(broadcast_s=seconds, broadcast_gb_s=part.size / seconds / 1e9)
    channel(part, partial(joined.broadcast, numbers))


def receive(part: Part) -> None:
    joined, numbers = link(part, "first", 1), torch.zeros_like(part.numbers())
    joined.broadcast(numbers)
    part.synchronise()
    part.confirm(same_numbers=torch.equal(numbers, part.numbers()))
    part.give("same numbers")
    part.repeated(partial(joined.broadcast, numbers))
    channel(part, partial(joined.broadcast, numbers))


def channel(part: Part, broadcast: Callable[[], None]) -> None:
    if not dist.is_initialized():
        return
    ranks = Ranks(dist.new_group(backend="gloo"))
    broadcast()
    both = ranks.gather((ranks.rank, ranks.share({"step": 3})))
    part.synchronise()
    part.confirm(gloo_beside=both == ([] if ranks.rank else [(0, {"step": 3}), (1, {"step": 3})]))


def survive(part: Part) -> None:
    joined, ones = link(part, "first", 0), torch.ones(part.size // 4, device=part.device)
    joined.broadcast(ones)
    victim = int(part.take("victim"))

    def reduce() -> None:
        joined.all_reduce(ones)
        part.synchronise()

    waiting = start_daemon_call(reduce, "reduce")
    part.confirm(waits_for_the_living=not wait([waiting], LIVING_S).done)
    os.kill(victim, signal.SIGKILL)
    killed = time.perf_counter()
    by_itself = bool(wait([waiting], ALONE_S).done)
    part.keep(ends_by_itself=by_itself, looked_for_s=time.perf_counter() - killed)
    started = time.perf_counter()
    part.result(start_daemon_call(joined.abort, "abort"), "the abort")
    part.keep(abort_s=time.perf_counter() - started)
    part.waits_for("the all-reduce after its abort")
    ended = bool(wait([waiting], WAIT_S).done)
    error = waiting.exception() if ended else None
    part.keep(ended_s=time.perf_counter() - started, raised=error and first_lines(error))
    part.confirm(all_reduce_ends=ended)
    ones = torch.ones(512, 512, device=part.device)
    part.confirm(device_works=bool((ones @ ones == 512).all()))
    part.give("again")
    link(part, "again", 0).broadcast(part.numbers())
    part.take("same numbers")


def be_killed(part: Part) -> None:
    ones = torch.ones(part.size // 4, device=part.device)
    link(part, "first", 1).broadcast(ones)
    part.synchronise()
    part.give("victim", str(os.getpid()))
    part.take("the end of this process")


def come_again(part: Part) -> None:
    part.take("again")
    numbers = torch.zeros_like(part.numbers())
    link(part, "again", 1).broadcast(numbers)
    part.synchronise()
    part.confirm(same_numbers=torch.equal(numbers, part.numbers()))
    part.give("same numbers")


def shard(part: Part) -> None:
    # Here: the other rows do without Lightning and transformers.
    from torch.distributed.device_mesh import init_device_mesh

    from benchmarks.gpu import step_of_ranks
    from benchmarks.random_policy import llama, made
    from lrl.training.sharding import Sharding, whole_on

    kind, config = part.device.type, llama(part.policy)
    folder = part.folder / f"policy-{part.policy}"
    micros, tokens = step_of_ranks.micro_batches(config.vocab_size)
    expected = None
    if part.number == 0:
        made(part.policy, part.folder, kind)
        whole = step_of_ranks.Policy(folder, part.device)
        found = step_of_ranks.passes(whole, micros, tokens)
        expected = step_of_ranks.Expected(*found, step_of_ranks.gradient_of(whole))
        del whole
        part.give("policy")
    part.take("policy")
    link(part, "first", part.number)
    ranks = Ranks(dist.new_group(backend="gloo"))
    mesh = init_device_mesh(kind, (2,), mesh_dim_names=("shards",))
    policy = step_of_ranks.Policy(folder, part.device, ranks, Sharding(mesh))
    own = micros[part.number :: 2]
    loss, norm = step_of_ranks.passes(policy, own, tokens)
    losses = ranks.gather(loss)
    gradient = step_of_ranks.gradient_of(policy)
    if expected is not None:
        off = expected.off(sum(losses), norm, gradient)
        part.keep(**off)
        part.confirm(as_whole=max(off.values()) < 1e-4)
    count = sum(one.numel() * one.element_size() for one in policy.parameters())
    seconds = part.repeated(lambda: step_of_ranks.passes(policy, own, tokens), 1)
    part.keep(passes_s=seconds)
    weights = [one.detach() for one in policy.parameters()]
    seconds = part.repeated(lambda: [whole_on(one) for one in weights], 1)
    part.keep(read_gb_s=count / seconds / 1e9)
    ranks.gather("done")
