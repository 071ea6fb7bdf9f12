"""Data parallel training: every rank has the whole policy and trains its share of a step's micro-batches.

Rank 0 has the fleet, the data module's state and all of lrl's callbacks; the others train what it hands out
(`lrl.runtime.ranks`). Gradients are averaged once, behind the last micro-batch (`lrl.training.gradients`), so the
policy is not wrapped in torch's DistributedDataParallel: that averages within every backward pass, and all ranks would
need equally many.

At a bad end rank 0 is alone: it does not ask the others for anything, and ends those that it has started. Until all
have met there is no connection that could close. So long the kernel ends a rank with the rank 0 that has started it,
and the first signal ends any rank at once: nothing is there to save, and no handler runs while it waits.
"""

from __future__ import annotations

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
from lrl.strategies.base import GeneratorDevices

MEETING = timedelta(minutes=30)
"""For all ranks to be there. A rank that fails before goes unseen: there is no connection yet that could close."""

PATIENCE = timedelta(hours=6)
"""Rank 0 waits for responses with deadlines of its own, and a rank that ended is noticed by its closed connection: this
is only for a machine that went away without a word."""

STARTED_BY = "LRL_STARTED_BY"
"""The environment variable that tells a rank which process is the rank 0 that has started it."""

OF_THE_WRAPPER = {
    **dict.fromkeys(("ddp_comm_state", "ddp_comm_hook", "ddp_comm_wrapper", "model_averaging_period")),
    **{name: each.default for name, each in inspect.signature(DistributedDataParallel).parameters.items()},
}
"""Settings that Lightning's strategy passes on to torch's wrapper, and their defaults, which the command line gives."""


class AsyncDDP(GeneratorDevices, DDPStrategy):
    """Several trainer processes, one a device, and the rest of the job's devices for generators.

    `trainer.devices` minus `generator_devices` processes train.

    Args:
        timeout: How long a rank waits for another, once all have met.
        **kwargs: See `GeneratorDevices`, and Lightning's DDPStrategy, without what is for torch's wrapper.
    """

    def __init__(self, timeout: timedelta | None = PATIENCE, **kwargs: Any) -> None:
        if rank_0 := os.environ.pop(STARTED_BY, None):  # out of the environment: it is not for this one's children
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
        """Connect the ranks. Signals are for rank 0: it stops between two steps, and the others with it."""
        super().setup_environment()
        policy: Any = self.lightning_module
        # Lightning's handler would call a collective wherever the signal finds this rank.
        policy.trainer._signal_connector.register_signal_handlers = lambda: None
        if not self.is_global_zero:
            self.signals.ignore()
        self.ranks = Ranks(dist.new_group(backend="gloo", timeout=self._timeout))
        live_on()  # they have met; at a good end rank 0 may be the first to be done
        policy.policy_folder = self.broadcast(policy.policy_folder if self.is_global_zero else None)

    def setup_distributed(self) -> None:
        """Meet the other ranks.

        Raises:
            RuntimeError: They were not all there within `MEETING`, or could not connect.
        """
        patience, self._timeout = self._timeout, MEETING
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
            self._timeout = patience
        if patience is not None:
            _set_pg_timeout(patience)

    def configure_ddp(self) -> None:
        """Have all ranks begin with rank 0's weights."""
        assert self.model is not None, "connected by now"
        _sync_module_states(self.model)

    def teardown(self) -> None:
        """End the generators, and at a bad end the ranks that rank 0 has started."""
        super().teardown()
        module = self.lightning_module
        if module is not None and module.trainer.interrupted and isinstance(self._launcher, Launcher):
            self._launcher.kill(signal.SIGKILL)


class Launcher(_SubprocessScriptLauncher):
    """Starts the other ranks without Lightning's observer, which kills rank 0 as soon as one of them fails.

    Rank 0 notices by itself, saves what can be saved, and ends its generators. Cores are shared by
    `lrl.runtime.cpu_affinity`.
    """

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """Start them unless somebody else does (torchrun, SLURM), and call `function`."""
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if not self.cluster_environment.creates_processes_externally:
            os.environ[STARTED_BY] = str(os.getpid())
            try:
                self._call_children_scripts()
            finally:
                del os.environ[STARTED_BY]
        return function(*args, **kwargs)
