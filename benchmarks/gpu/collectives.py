"""What lrl's ranks do, by one rank on NCCL: a sharded policy, the average of gradients, the channel
of the ranks. vLLM is not needed.

    python -m benchmarks.gpu.collectives --size 0.5b
    python -m benchmarks.gpu.collectives --size tiny --device cpu     a rehearsal, on gloo

FSDP2 of one rank gathers and scatters nothing (`collectives_of_two_steps` counts them), so this tries
the code, and no traffic. The average of gradients costs launches alone here: NCCL moves nothing for one rank.
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from benchmarks import arguments
from benchmarks.gpu.machine import MACHINES, Machine
from benchmarks.gpu.memory_plan import GIB
from benchmarks.gpu.rows import device_of, make_parser, parse
from benchmarks.gpu.step_of_ranks import Expected, Policy, gradient_of, micro_batches, passes
from benchmarks.random_policy import SHAPES, llama, made
from benchmarks.records import append
from lrl.checkpoints.checkpoint_folder import read_weights, save_parts
from lrl.system.ranks import Ranks
from lrl.training.optimizers import norm_of
from lrl.training.sharding import Sharding, on_cpu, shard_again, whole_on

DEADLINE = timedelta(seconds=60)
"""Of every collective."""
DIVISIONS: dict[str, dict[str, Any]] = {
    "fsdp": {},
    "fsdp-once": {"reduce_gradients": "once"},
    "fsdp-replicas": {},
    "fsdp-bfloat16": {"compute_dtype": torch.bfloat16},
    "fsdp-offload": {"cpu_offload": True},
}
"""The settings of `Sharding` in each row; `fsdp-replicas` has a mesh of two dimensions."""
SAVED = ("fsdp", "fsdp-offload")
"""Rows that also save a checkpoint."""
WHOLE = "whole"


class Program:
    """The rows; each appends a line as soon as it has a fact, so that a time limit leaves those before
    it. The last line of a row says whether it `works`: null where it has no form, with the reason."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.out, self.row = args.out, ""
        self.size = args.size
        self.machine: Machine = MACHINES[args.device]()
        self.folder = made(args.size, args.folder, self.machine.device)
        self.parts = args.folder / "parts"
        self.device = device_of(args)
        self.micros, self.tokens = micro_batches(llama(args.size).vocab_size)
        self.expected: Expected | None = None

    def keep(self, **facts: Any) -> None:
        about = {"row": self.row, "machine": self.machine.name, "size": self.size}
        append(self.out, about | facts)

    def confirm(self, **facts: bool) -> None:
        self.keep(**facts)
        if wrong := [name for name, true in facts.items() if not true]:
            raise RuntimeError(f"not so: {', '.join(wrong)}")

    def timed(self, work: Callable[..., Any], *words: Any) -> tuple[Any, float]:
        found: list[Any] = []
        seconds = self.machine.seconds(lambda: found.append(work(*words)))
        return found[0], seconds

    def passes(self, policy: Policy) -> tuple[float, float]:
        found = passes(policy, self.micros, self.tokens)
        self.machine.begin()
        _, seconds = self.timed(passes, policy, self.micros, self.tokens)
        self.keep(passes_s=seconds, peak_gib=self.machine.peak / GIB)
        return found

    def whole(self) -> None:
        policy = Policy(self.folder, self.device)
        found = self.passes(policy)
        self.expected = Expected(*found, gradient_of(policy))
        self.keep(loss=found[0], norm=found[1])

    def fsdp(self) -> None:
        if self.expected is None:
            raise RuntimeError(f"there is nothing to compare with: the row {WHOLE!r} comes first")
        names = ("replicas", "shards") if self.row == "fsdp-replicas" else ("shards",)
        mesh = init_device_mesh(self.device.type, (1,) * len(names), mesh_dim_names=names)
        sharding = Sharding(mesh, **DIVISIONS[self.row])
        ranks = Ranks(dist.new_group(backend="gloo"))
        self.machine.begin()
        policy, seconds = self.timed(Policy, self.folder, self.device, ranks, sharding)
        self.keep(open_s=seconds, open_peak_gib=self.machine.peak / GIB)
        before = self.collectives(mesh)
        found = self.passes(policy)
        self.keep(collectives_of_two_steps=self.collectives(mesh) - before)
        off = self.expected.off(*found, gradient_of(policy))
        self.keep(**off, clipped_norm=float(norm_of(one.grad for one in policy.parameters())))
        most = 0.05 if self.row == "fsdp-bfloat16" else 1e-4
        self.confirm(as_whole=max(off.values()) < most)
        self.read(policy)
        if self.row in SAVED:
            self.save(policy)

    def collectives(self, mesh: DeviceMesh) -> int:
        backends = [group._get_backend(self.device) for group in mesh.get_all_groups()]
        return sum(one._get_sequence_number_for_group() for one in backends)  # type: ignore[attr-defined]

    def read(self, policy: Policy) -> None:
        policy.zero_grad()
        shard_again(policy)
        count, seconds = self.timed(lambda: sum(one.nbytes for _, one in policy.whole_weights()))
        self.keep(read_s=seconds, read_gb_s=count / seconds / 1e9)

    def save(self, policy: Policy) -> None:
        shutil.rmtree(self.parts, ignore_errors=True)
        weights = policy.state_dict()
        _, seconds = self.timed(save_parts, {"state_dict": weights}, self.parts)
        saved = read_weights(self.parts)
        shutil.rmtree(self.parts)
        self.keep(save_s=seconds)
        whole = on_cpu((name, whole_on(one)) for name, one in weights.items())
        self.confirm(saved=all(torch.equal(saved[name], one) for name, one in whole.items()))

    def channel(self) -> None:
        group = dist.new_group(backend="gloo")
        ranks = Ranks(group)
        ones = torch.ones(2**24, device=self.device)
        reduced = dist.all_reduce(ones, async_op=True)
        both = ranks.gather(ranks.share({"step": 3}))
        count = torch.ones(1)
        dist.all_reduce(count, group=group)
        reduced.wait()
        right = both == [{"step": 3}] and count.item() == 1 and bool((ones == 1).all())
        self.keep(backends=[dist.get_backend(), dist.get_backend(group)])
        self.confirm(both_work=right)


ROWS: dict[str, Callable[[Program], None]] = {
    "channel": Program.channel,
    WHOLE: Program.whole,
    **dict.fromkeys(DIVISIONS, Program.fsdp),
}


@contextmanager
def process_group(device: torch.device, row: str) -> Iterator[None]:
    on_gpu = device.type == "cuda"
    offloads = DIVISIONS.get(row, {}).get("cpu_offload", False)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if offloads else "nccl" if on_gpu else "gloo",
        store=dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False),
        rank=0,
        world_size=1,
        timeout=DEADLINE,
        device_id=device if on_gpu else None,  # as Lightning
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def answer(program: Program, row: str) -> dict[str, Any]:
    program.row = row
    if program.device.type == "cpu" and DIVISIONS.get(row, {}).get("cpu_offload"):
        return {"works": None, "why": "there is no form of it on a CPU"}
    gc.collect()  # a row begins without the weights of the one before
    started = time.perf_counter()
    found: dict[str, Any] = {"works": True}
    try:
        with process_group(program.device, row):
            ROWS[row](program)
    except Exception as error:
        found = {"works": False, "error": f"{type(error).__name__}: {error}"[:600]}
    return found | {"row_s": time.perf_counter() - started}


def main() -> None:
    parser = make_parser("collectives", __doc__, ROWS)
    arguments.add(parser, size=("0.5b", "of the policy", SHAPES))
    args = parse(parser)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    program = Program(args)
    wanted = args.only or list(ROWS)
    if not DIVISIONS.keys().isdisjoint(wanted) and WHOLE not in wanted:
        wanted = [WHOLE, *wanted]
    for row in wanted:
        program.keep(**answer(program, row))


if __name__ == "__main__":
    main()
