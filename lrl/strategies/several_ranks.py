"""Several trainer processes, the ranks of a run: how they start, meet, notice that one is lost, and end.

Rank 0 has the fleet, the data module's state and all of lrl's callbacks; the other ranks compute (`lrl.runtime.ranks`).

After an error rank 0 calls no collective and kills the ranks that it has started. Before the ranks have met there is no
connection whose end they could notice. Until then the kernel ends a rank together with the rank 0 that has started it,
and the first signal ends any rank at once: there is nothing to save, and no Python handler runs while it waits.
"""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from torch import Tensor
from torch.distributed.distributed_c10d import _set_pg_timeout

from lrl.runtime.keepalive import close_silent_connections
from lrl.runtime.parent_death import die_with, live_on
from lrl.runtime.ranks import Ranks, explain_rank_loss
from lrl.strategies.generator_devices import GeneratorDevices

T = TypeVar("T")

MEETING = timedelta(minutes=30)
"""Longest wait for all ranks to connect; until then the failure of another rank cannot be seen."""

RANK_TIMEOUT = timedelta(hours=6)
"""Longest wait of one rank for another that hangs; rank 0's waits for responses have deadlines of their own. An ended
rank is noticed by its closed connection, and a vanished machine after `strategy.heartbeat_s`."""

STARTED_BY = "LRL_STARTED_BY"
"""The environment variable with the process id of the rank 0 that has started a rank."""


class SeveralRanks(GeneratorDevices, ParallelStrategy):
    """Mixin for a Lightning strategy of several processes, one a device; the rest of the job's devices generate.

    `trainer.devices` minus `generator_devices` processes train.

    Args:
        timeout: Longest wait of one rank for another, once all have met.
        **kwargs: See `GeneratorDevices`, and the base strategy's own.
    """

    num_nodes: int
    _timeout: timedelta | None

    def __init__(self, timeout: timedelta | None = RANK_TIMEOUT, **kwargs: Any) -> None:
        if rank_0 := os.environ.pop(STARTED_BY, None):  # removed: the children of this rank must not inherit it
            die_with(int(rank_0))
        super().__init__(timeout=timeout, **kwargs)

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None, "Lightning's connector sets it"
        self._launcher = Launcher(self.cluster_environment, len(self.parallel_devices or ()), self.num_nodes)

    def setup_environment(self) -> None:
        """Connects the ranks. Signals are for rank 0: it stops between two steps, and the others with it."""
        super().setup_environment()
        policy: Any = self.lightning_module
        # Lightning's handler would call a collective wherever the signal finds this rank.
        policy.trainer._signal_connector.register_signal_handlers = lambda: None
        if not self.is_global_zero:
            self.signals.ignore()
        self.ranks = Ranks(dist.new_group(backend="gloo", timeout=self._timeout))
        close_silent_connections(self.heartbeat_s)
        live_on()  # the ranks have met; at a normal end rank 0 may be done first
        policy.policy_folder = self.broadcast(policy.policy_folder if self.is_global_zero else None)

    @contextmanager
    def meeting(self) -> Iterator[None]:
        """Bounds the block, in which the ranks connect, by `MEETING`.

        Raises:
            RuntimeError: They were not all there in time, or could not connect.
        """
        timeout, self._timeout = self._timeout, MEETING
        try:
            with self.signals.at_once():
                yield
        except dist.DistError as error:
            raise RuntimeError(
                f"The {self.world_size} ranks did not meet ({error}). This is what rank {self.global_rank} saw, "
                f"which waits {MEETING} at most. Look for another rank's error; ranks on several machines need "
                "the address and a free port of rank 0's machine, MASTER_ADDR and MASTER_PORT."
            ) from error
        finally:
            self._timeout = timeout
        if timeout is not None:
            _set_pg_timeout(timeout)

    def broadcast(self, obj: T, src: int = 0) -> T:
        """Sends an object of rank `src` to all ranks."""
        with explain_rank_loss("Another rank"):
            return super().broadcast(obj, src)  # type: ignore[safe-super]

    def reduce(self, *args: Any, **kwargs: Any) -> Tensor:
        """Returns the sum or mean of a tensor over all ranks."""
        with explain_rank_loss("Another rank"):
            return super().reduce(*args, **kwargs)  # type: ignore[safe-super]

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Waits until all ranks come here."""
        with explain_rank_loss("Another rank"):
            super().barrier(*args, **kwargs)  # type: ignore[safe-super]

    def teardown(self) -> None:
        """Ends the generators, and after an error the ranks that rank 0 has started."""
        super().teardown()
        module = self.lightning_module
        if module is not None and module.trainer.interrupted and isinstance(self._launcher, Launcher):
            self._launcher.kill(signal.SIGKILL)


class Launcher(_SubprocessScriptLauncher):
    """Starts the other ranks without Lightning's observer, which would kill rank 0 as soon as one of them fails.

    Rank 0 notices the failure by itself, saves a checkpoint and ends its generators.
    """

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """Starts the ranks, unless torchrun or SLURM does, and calls `function`."""
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if not self.cluster_environment.creates_processes_externally:
            os.environ[STARTED_BY] = str(os.getpid())
            try:
                self._call_children_scripts()
            finally:
                del os.environ[STARTED_BY]
        return function(*args, **kwargs)

    def kill(self, signum: int | signal.Signals) -> None:
        """Sends a signal to the ranks that it has started; the next run of this process starts its own."""
        super().kill(signum)
        forget_place(self)


def forget_place(launcher: _SubprocessScriptLauncher) -> None:
    """Removes Lightning's variable from this process when the ranks that it has started are killed.

    With it the next run took itself for a rank that another process had started, started none, and waited for them for
    `MEETING`.
    """
    if launcher.procs:
        os.environ.pop("LOCAL_RANK", None)
