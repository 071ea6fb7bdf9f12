"""An NCCL communicator as vLLM holds it: how one is identified, joined and ended.

NCCL waits for a lost member for ever. `ncclCommAbort` is its only way out: the kernels and threads
of a communicator poll the flag that it sets. It can be called while they wait, but nothing may use
the communicator afterwards.
"""

from concurrent.futures import wait
from typing import Any

import torch

from lrl.errors import ConfigError
from lrl.system.event_loop import start_daemon_call

ABORT_S = 10.0
"""Seconds for an abort, which takes milliseconds when the driver is well."""


def new_unique_id() -> bytes:
    """Returns NCCL's unique id with this process as the root of a communicator, for its members.

    Raises:
        OSError: There is no NCCL library.
    """
    from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary

    return bytes(NCCLLibrary().ncclGetUniqueId().internal)


def join(unique_id: bytes, rank: int, world_size: int, device: torch.device) -> Any:
    """Joins a communicator as vLLM's workers do; blocks until all `world_size` members have joined.

    Raises:
        ConfigError: vLLM does not use NCCL in this process.
    """
    from vllm.distributed.weight_transfer import nccl_common

    found = nccl_common.uid_init_process_group(unique_id, rank, world_size, device)
    if found.disabled:
        raise ConfigError(
            "strategy.weight_transfer is 'nccl', and VLLM_DISABLE_PYNCCL turns NCCL off: unset it."
        )
    return found


def abort(communicator: Any) -> bool:
    """Ends all that waits in `communicator`, for good; returns whether it ended within `ABORT_S`.

    Not vLLM's `destroy`: that marks the communicator as unusable when the abort is over, and a
    thread that the abort sets free would use it meanwhile.
    """
    if communicator is None or communicator.disabled:
        return True
    communicator.disabled = True  # from now on its collectives do nothing

    def end() -> None:
        with torch.accelerator.device_index(communicator.device.index):
            communicator.nccl.ncclCommAbort(communicator.comm)
        communicator.available = False

    return bool(wait([start_daemon_call(end, "lrl-nccl-abort")], ABORT_S).done)
