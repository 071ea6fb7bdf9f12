"""Data parallel training: every rank has the whole policy and trains its share of a step's micro-batches.

Rank 0 has the fleet, the data module's state and all of lrl's callbacks; the other ranks only compute
(`lrl.runtime.ranks`). Gradients are averaged once, after the last micro-batch (`lrl.training.gradients`). Torch's
DistributedDataParallel is not used: it averages in every backward pass, and would need equally many on all ranks.

After an error rank 0 calls no collective and kills the ranks that it has started. Before the ranks have met there is no
connection whose end they could notice. Until then the kernel ends a rank together with the rank 0 that has started it,
and the first signal ends any rank at once: there is nothing to save, and no Python handler runs while it waits.
"""

import inspect
import os
import signal
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from lightning.pytorch.overrides.distributed import _sync_module_states
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.nn.parallel import DistributedDataParallel

from lrl.runtime.config_errors import fault
from lrl.runtime.parent_death import die_with, live_on
from lrl.runtime.ranks import Ranks
from lrl.strategies.generator_devices import GeneratorDevices

MEETING = timedelta(minutes=30)
"""Longest wait for all ranks to connect; until then the failure of another rank cannot be seen."""

RANK_TIMEOUT = timedelta(hours=6)
"""Longest wait of one rank for another, for a machine that vanishes. Rank 0's waits for responses have deadlines of
their own, and an ended rank is noticed by its closed connection."""

STARTED_BY = "LRL_STARTED_BY"
"""The environment variable with the process id of the rank 0 that has started a rank."""

OF_THE_WRAPPER = {
    **dict.fromkeys(("ddp_comm_state", "ddp_comm_hook", "ddp_comm_wrapper", "model_averaging_period")),
    **{name: each.default for name, each in inspect.signature(DistributedDataParallel).parameters.items()},
}
"""Settings that Lightning passes on to torch's wrapper, with their defaults, which the command line always gives."""


class AsyncDDP(GeneratorDevices, DDPStrategy):
    """Several trainer processes, one a device, and the rest of the job's devices for generators.

    `trainer.devices` minus `generator_devices` processes train.

    Args:
        timeout: Longest wait of one rank for another, once all have met.
        **kwargs: See `GeneratorDevices`, and Lightning's DDPStrategy without the settings of torch's wrapper.
    """

    def __init__(self, timeout: timedelta | None = RANK_TIMEOUT, **kwargs: Any) -> None:
        if rank_0 := os.environ.pop(STARTED_BY, None):  # removed: the children of this rank must not inherit it
            die_with(int(rank_0))
        super().__init__(timeout=timeout, **kwargs)
        for name, default in OF_THE_WRAPPER.items():
            if kwargs.get(name, default) != default:
                fault(
                    f"strategy.{name} is {kwargs[name]}. It is for torch's DistributedDataParallel; lrl.AsyncDDP does "
                    "without that: it averages gradients once a step. Leave it out."
                )

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None, "Lightning's connector sets it"
        self._launcher = Launcher(self.cluster_environment, self.num_processes, self.num_nodes)

    def setup_environment(self) -> None:
        """Connects the ranks. Signals are for rank 0: it stops between two steps, and the others with it."""
        super().setup_environment()
        policy: Any = self.lightning_module
        # Lightning's handler would call a collective wherever the signal finds this rank.
        policy.trainer._signal_connector.register_signal_handlers = lambda: None
        if not self.is_global_zero:
            self.signals.ignore()
        self.ranks = Ranks(dist.new_group(backend="gloo", timeout=self._timeout))
        live_on()  # the ranks have met; at a normal end rank 0 may be done first
        policy.policy_folder = self.broadcast(policy.policy_folder if self.is_global_zero else None)

    def setup_distributed(self) -> None:
        """Connects to the other ranks.

        Raises:
            RuntimeError: They were not all there within `MEETING`, or could not connect.
        """
        timeout, self._timeout = self._timeout, MEETING
        try:
            with self.signals.at_once():
                super().setup_distributed()
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

    def configure_ddp(self) -> None:
        """Copies rank 0's weights to all ranks."""
        assert self.model is not None, "connected by now"
        _sync_module_states(self.model)

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
