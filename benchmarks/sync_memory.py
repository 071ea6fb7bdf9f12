"""The memory that a trainer rank needs for a sync, beyond what it has: by the number of ranks and the
transport.

The ranks share a policy in float32 (FSDP2 over gloo) and are processes of this machine. `part` is
what a rank sends, in bfloat16 except by `shared_memory`; `pull` keeps it, in a file of no folder that
is in no rank's figure, until the next version. By `nccl` gloo stands for the communicator, in which
one worker receives.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import arguments, records
from benchmarks.arguments import Row
from benchmarks.gpu.machine import Machine
from benchmarks.weight_transports import new_policy
from lrl.system.ranks import follow
from lrl.weights import nccl
from lrl.weights.buckets import JoinOrder
from lrl.weights.staging import StageOrder
from tests.leftovers import wait_for
from tests.strategies.forked_ranks import meet, run_ranks
from tests.strategies.staged_parts import Divided
from tests.weights.nccl_over_gloo import Communicator, receive

MB = 1e6
SETTINGS: dict[str, Any] = {
    "ranks": ([1, 2, 4], "that train"),
    "transports": (["shared_memory", "pull", "nccl"], "of the weights"),
    "layers": (8, "of the policy; 8 make 560 MB in float32"),
    "bucket_mb": (32, "of a broadcast"),
}
COLUMNS = {
    "part (MB)": ("part_mb", ",.0f"),
    "rank 0's peak (MB)": ("peak_mb", ",.0f"),
    "largest tensor (MB)": ("largest_mb", ",.0f"),
}
"""Headings, with the key of a record and its format."""


def runs(args: argparse.Namespace) -> Iterator[Row]:
    for ranks, transport in product(args.ranks, args.transports):
        yield arguments.chosen(args, "layers", "bucket_mb") | {
            "ranks": ranks,
            "transport": transport,
        }


def measure(args: argparse.Namespace, wanted: list[Row]) -> Iterator[Row]:
    for row in wanted:
        with TemporaryDirectory() as name:
            folder = Path(name)
            new_policy(row["layers"]).save_pretrained(folder / "model")
            with ThreadPoolExecutor(1) as thread:
                if row["transport"] == nccl.Nccl.backend:
                    thread.submit(be_worker, folder, row["ranks"])
                run_ranks(be_rank, row["ranks"], folder, folder, row)
            yield row | torch.load(folder / "found.pt")


def be_rank(folder: Path, row: Row) -> None:
    nccl.join_communicator = Communicator  # type: ignore[assignment]
    ranks = meet(folder)
    policy = Divided(str(folder / "model"), ranks, {"shards": ranks.size} if ranks.size > 1 else {})
    if ranks.rank == 0:
        sync = WAYS[row["transport"]](policy, folder, int(row["bucket_mb"] * MB))
        machine = Machine()
        gc.collect()
        machine.begin()
        before = machine.peak
        part = sync()
        weights = dict(policy.network.named_parameters()).values()
        found = {
            "part_mb": part / MB,
            "peak_mb": (machine.peak - before) / MB,
            "largest_mb": max(weight.numel() * weight.element_size() for weight in weights) / MB,
        }
        torch.save(found, folder / "found.pt")
    follow(policy)
    policy.free_sent()
    dist.barrier()
    dist.destroy_process_group()


def by_file(policy: Divided, folder: Path, _: int) -> Callable[[], float]:
    def sync() -> float:
        file = folder / "weights"
        file.touch()
        policy.stage_weights(StageOrder("pool", "version", None, str(file)))
        return file.stat().st_size / policy.ranks.size

    return sync


def in_parts(policy: Divided, _: Path, __: int) -> Callable[[], float]:
    def sync() -> float:
        policy.stage_weights(StageOrder("pool", "version", torch.bfloat16))
        part = policy.staging.parts["version"]
        return float(sum(block.nbytes for block in part.blocks))

    return sync


def by_broadcast(policy: Divided, folder: Path, nbytes: int) -> Callable[[], float]:
    size = policy.ranks.size + 1
    order = JoinOrder(unique_id(folder), size, torch.bfloat16, nbytes)
    plan, joined = policy.join_broadcast("pool", order)
    joined.result(60)
    torch.save(plan, folder / "plan.draft")
    (folder / "plan.draft").rename(folder / "plan")

    def sync() -> float:
        policy.send_broadcast("pool")
        policy.end_broadcast("pool", False, 60.0)
        return 8.0 * sum(bucket.words(0) for bucket in policy.broadcasts["pool"]._buckets)

    return sync


def be_worker(folder: Path, ranks: int) -> None:
    group = Communicator(unique_id(folder), ranks, ranks + 1, "cpu")
    wait_for((folder / "plan").exists)
    receive(group, torch.load(folder / "plan"))


def unique_id(folder: Path) -> bytes:
    return str(folder / "met").encode()


WAYS: dict[str, Callable[[Divided, Path, int], Callable[[], float]]] = {
    "shared_memory": by_file,
    "pull": in_parts,
    nccl.Nccl.backend: by_broadcast,
}
"""Each prepares a sync, and returns it; a sync returns the bytes of rank 0's part."""


def table(rows: list[Row]) -> str:
    heads = ["ranks", "transport", *COLUMNS]
    cells = [
        [row["ranks"], row["transport"], *(f"{row[key]:{how}}" for key, how in COLUMNS.values())]
        for row in rows
    ]
    return records.markdown(heads, cells)


if __name__ == "__main__":
    arguments.run("sync_memory", __doc__, SETTINGS, runs, measure, table)
