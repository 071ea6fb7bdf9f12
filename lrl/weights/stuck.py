"""The end of a broadcast that nobody receives any more.

An abort is enough in all cases that NCCL foresees: the flag that it sets ends the kernels and
threads that wait, the thread of the broadcast returns, and the run goes on. If it is not enough,
the driver or the GPU is broken, and nothing on it may ever return: the run ends by an error, with
its last checkpoint if that can still be read. Its process must not end as others do, because CUDA's
libraries would wait for the GPU as they are unloaded. It leaves without that.
"""

import atexit
import logging
import os
import sys
import time
from concurrent.futures import Future, wait
from typing import Any

from lrl.errors import StuckTransfer
from lrl.weights import communicator


def abort_broadcast(group: Any, sending: Future[Any], deadline_s: float) -> None:
    """Aborts the communicator `group`, and waits until the thread that sends in it has returned.

    Raises:
        StuckTransfer: It has not within `deadline_s` (it may have to read the rest of a sharded
            policy).
    """
    started = time.monotonic()
    if communicator.abort(group) and wait([sending], deadline_s).done:
        return
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
