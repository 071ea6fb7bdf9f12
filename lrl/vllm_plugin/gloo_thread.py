"""Process groups of one rank share one thread of gloo.

vLLM makes 13 process groups also for an engine that is alone. Each has a thread that wakes 100
times a second: on a CPU an engine that had nothing to do took 3.4 % of a core, and takes 0.6 % with
one thread. A group of one rank sends nothing, so one is enough for all of them. A step of training
meanwhile takes as long as before.
"""

import functools
from datetime import timedelta
from types import MethodType
from typing import Any


def install() -> None:
    """Makes the process groups of this process share it from now on; may be called twice."""
    from torch.distributed.distributed_c10d import ProcessGroupGloo

    make: Any = ProcessGroupGloo.__init__
    if make.__name__ == "sharing":
        return
    device = functools.cache(ProcessGroupGloo.create_default_device)

    def sharing(
        self: Any, store: Any, rank: int, size: int, *options: Any, **timeout: timedelta
    ) -> None:
        make_group = MethodType(make, self)
        if size > 1 or options:  # with options the caller names a device itself
            return make_group(store, rank, size, *options, **timeout)
        shared: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        shared._devices = [device()]
        shared._timeout = timeout.get("timeout", shared._timeout)
        return make_group(store, rank, size, shared)

    ProcessGroupGloo.__init__ = sharing  # type: ignore[method-assign]
