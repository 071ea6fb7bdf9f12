"""The generator's end of the NCCL transports; runs inside vLLM's worker, registered by
`lrl.vllm_plugin.plugin`.

It is vLLM's own engine, which the trainer can end (`lrl.vllm_plugin.abort_route`). NCCL's kernels
wait for a lost member for ever, and so would the worker; once its communicator is aborted they
return, and leave garbage in their buffers.

A transfer that was ended is no error here, because of vLLM's executor for several workers: it
raises the first error that it reads and leaves the answers of the other workers unread, so that
every later call would get the answer of the one before. The trainer knows that it has ended the
transfer. It closes the update, which gives half-loaded layers back to vLLM, before it starts the
next one.
"""

import copy
import threading
import time
from collections.abc import Iterator
from concurrent.futures import wait
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine
from vllm.logger import init_logger

from lrl.system.event_loop import start_daemon_call
from lrl.vllm_plugin.abort_route import abort_mark
from lrl.weights.communicator import abort, transfer_name

log = init_logger(__name__)  # vLLM's, because other loggers do not reach the server's log

LOOK_S = 0.1
"""Seconds between two looks for the trainer's mark."""
NCCL_ERROR = "NCCL error"
"""Prefix of vLLM's errors about NCCL."""


class NcclEngine(NCCLWeightTransferEngine):
    """Receives a packed broadcast until the trainer ends it."""

    _mark: Path

    def init_transfer_engine(self, init_info: Any) -> None:
        """Joins a new communicator and leaves the one before; joins none if the trainer gives it
        up.

        Raises:
            RuntimeError: vLLM does not use NCCL in this process.
        """
        self.shutdown()
        self._mark = abort_mark(transfer_name(init_info.nccl_unique_id_b64))
        # On a copy: NCCL gives no handle by which to end this call, so a thread may be left behind
        # in it.
        joining = copy.copy(self)
        joined = start_daemon_call(partial(joining._join, init_info), "lrl-nccl-join")
        while not wait([joined], LOOK_S).done:
            if self._mark.exists():
                log.warning(
                    "The trainer has given this communicator up before all members had joined it."
                )
                joined.add_done_callback(lambda late: joining.shutdown())
                return
        joined.result()
        self.__dict__.update(vars(joining))

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receives and loads one update; returns early if the trainer ends it.

        Raises:
            RuntimeError: There is no communicator.
        """
        group = self.model_update_group
        if group is None:
            raise RuntimeError(
                "This generator is in no communicator: /init_weight_transfer_engine comes first."
            )
        try:
            with _aborted_at(self._mark, group):
                super().update_weights(update_info)
        except RuntimeError as error:
            if not str(error).startswith(NCCL_ERROR):
                raise
            log.warning("%s. The trainer will end this transfer.", error)
            # At its deadline at the latest; without a trainer no generator lives.
            while not self._mark.exists():
                time.sleep(LOOK_S)
        if self._mark.exists():
            log.warning(
                "The trainer has ended this transfer; the weights are incomplete until the next "
                "one."
            )

    def _join(self, init_info: Any) -> None:
        if self.device.type != "cpu":
            torch.accelerator.set_device_index(self.device)  # a thread begins with the first device
        super().init_transfer_engine(init_info)
        if self.model_update_group.disabled:
            raise RuntimeError(
                "vLLM has turned NCCL off in this generator: is VLLM_DISABLE_PYNCCL set?"
            )


@contextmanager
def _aborted_at(mark: Path, communicator: Any) -> Iterator[None]:
    """Aborts `communicator` from another thread if `mark` appears before the end of the block."""
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(LOOK_S):
            if mark.exists():
                abort(communicator)
                return

    looking = start_daemon_call(look, "lrl-nccl-abort")
    try:
        yield
    finally:
        ended.set()
        looking.result()
