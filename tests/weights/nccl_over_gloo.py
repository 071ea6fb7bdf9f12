"""The whole NCCL path on a CPU: gloo stands for NCCL's communicator, and for nothing else.

`install` does it in the trainer's process. `GlooServer` is a server whose processes do it, by a
vLLM plugin that only their environment names. All else is what runs on GPUs: lrl's transport and
engine, vLLM's loading, HTTP.

The stand-in is as NCCL where NCCL is hard to live with. Nobody is told of a lost member, or of one
that has aborted: the others wait until they are aborted themselves, and then return, without an
error and without the data.
"""

from __future__ import annotations

import os
import secrets
import signal
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from lrl.generators.server import Server
from lrl.weights.buckets import Plan, buckets_of, damaged, exchange

FAULT = "NCCL_OVER_GLOO_FAULT"
"""Names a file with `kill RANK` or `damage RANK`: that rank dies, or gets a wrong bit, in the
middle of its next transfer; the file goes with it."""
FAULT_AT = 3
"""The broadcast of that transfer in which it happens."""
GIVES_UP = timedelta(minutes=30)
"""Gloo has a deadline, and NCCL has none: it is longer than any test."""
ID_BYTES = 128


class Library:
    """What lrl and vLLM call in NCCL's library."""

    folder = Path()
    """Where the members of this process's communicators meet."""

    def ncclGetUniqueId(self) -> Any:
        """Returns a file by which the members meet."""
        path = os.fsencode(self.folder.resolve() / secrets.token_hex(8))
        assert len(path) <= ID_BYTES, (
            f"{self.folder} is too long a path for an id: take a shorter one"
        )
        return SimpleNamespace(internal=path.ljust(ID_BYTES, b"\0"))

    def ncclCommAbort(self, communicator: Communicator) -> None:
        communicator.aborted.set()
        communicator.group.abort()


class Communicator:
    """vLLM's `PyNcclCommunicator`, as far as a transfer needs it."""

    def __init__(self, unique_id: bytes, rank: int, world_size: int, device: Any) -> None:
        self.rank = rank
        self.world_size = world_size
        self.device = torch.device("cpu")
        self.available = True
        self.disabled = False
        self.nccl = Library()
        self.comm = self
        self.aborted = threading.Event()
        self._told = 0
        store = dist.FileStore(unique_id.rstrip(b"\0").decode(), world_size)
        options = dist.ProcessGroupGloo._Options()
        options._timeout = GIVES_UP
        options._devices = [dist.ProcessGroupGloo.create_device(interface="lo")]
        self.group = dist.ProcessGroupGloo(
            dist.PrefixStore("nccl", store), rank, world_size, options
        )
        self.group.allreduce([torch.zeros(1)]).wait()

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any = None) -> None:
        """Returns when the tensor is there, or after an abort."""
        if self.disabled:
            return
        fault = self._fault()
        if fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        how = dist.BroadcastOptions()
        how.rootRank = src
        how.rootTensor = 0
        ended = threading.Event()

        def move() -> None:
            try:
                self.group.broadcast([tensor], how).wait()
            except RuntimeError:  # another member is lost, which NCCL's kernels would not notice
                self.aborted.wait()
            ended.set()

        threading.Thread(target=move, daemon=True).start()
        while not (ended.wait(0.05) or self.aborted.is_set()):
            pass
        if fault == "damage":
            tensor[0] ^= 1

    group_start = group_end = staticmethod(lambda: None)

    def _fault(self) -> str:
        """Returns what happens in this broadcast; empty for nothing."""
        told = Path(os.environ.get(FAULT, ""))
        fault, _, rank = told.read_text().partition(" ") if told.is_file() else ("", "", "")
        if rank != str(self.rank):
            return ""
        self._told += 1
        if self._told < FAULT_AT:
            return ""
        told.unlink()
        return fault


def receive(group: Communicator, plan: Plan) -> dict[str, torch.Tensor]:
    """Returns the weights of one update, as `lrl.vllm_plugin.engines` receives them."""
    found: dict[str, torch.Tensor] = {}
    for bucket in buckets_of(plan):
        packed = exchange(group, bucket, group.rank, own=None, device=group.device)
        assert not damaged(packed)
        found |= bucket.unpack(packed)
    return found


def install(folder: Path | None = None, replace: Callable[[Any, str, Any], None] = setattr) -> None:
    """Puts the stand-in in the place of NCCL in this process. The members of its communicators meet
    in `folder`, which only who makes their ids needs; a monkeypatch's `setattr` as `replace` takes
    it back."""
    from vllm.distributed.device_communicators import pynccl_wrapper
    from vllm.distributed.weight_transfer import nccl_common

    if folder is not None:
        replace(Library, "folder", folder)
    replace(pynccl_wrapper, "NCCLLibrary", Library)
    replace(nccl_common, "uid_init_process_group", Communicator)


class GlooServer(Server):
    """A server on the CPU whose workers take part in transfers by `nccl`; `told` is the file of
    `FAULT`."""

    def __init__(self, *arguments: Any, told: Path = Path(), **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.told = told

    def environment(self) -> dict[str, str]:
        plugin = _plugin(self.log_path.parent)
        repository = Path(__file__).parents[2]
        before = os.environ.get("PYTHONPATH")
        # An empty one is the current folder.
        folders = [str(plugin), str(repository), *([before] if before else [])]
        return super().environment() | {
            FAULT: str(self.told),
            "PYTHONPATH": os.pathsep.join(folders),
            "VLLM_PLUGINS": "lrl,nccl_over_gloo",
        }


def _plugin(folder: Path) -> Path:
    """Writes the package whose entry point is `install`; returns the folder to search for it."""
    package = folder / "nccl_over_gloo-1.dist-info"
    package.mkdir(parents=True, exist_ok=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: nccl_over_gloo\nVersion: 1\n")
    name = f"nccl_over_gloo = {__name__}:install"
    (package / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{name}\n")
    return folder
