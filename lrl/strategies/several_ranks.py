"""Several trainer processes, the ranks of a run: how they start, meet, notice that one is lost, and
end.

Rank 0 has the fleet, the data module's state and all of lrl's callbacks; the other ranks compute
(`lrl.system.ranks`). After an error it calls no collective and kills the ranks that it has
started. Before the ranks have met there is no connection whose end they could notice: until then the
kernel ends a rank together with the rank 0 that has started it, and the first signal ends any rank
at once.

Ranks of several machines meet at their start, before anything costs time, where a missing one is
named (`lrl.strategies.rendezvous`); all connect when rank 0 has made its checks.
"""

from __future__ import annotations

import inspect
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from lightning.pytorch.overrides.distributed import _sync_module_states
from lightning.pytorch.strategies import DDPStrategy, ParallelStrategy
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.rendezvous import _torchelastic_use_agent_store
from torch.nn.parallel import DistributedDataParallel

from lrl.checkpoints.run_folder import run_folder
from lrl.errors import ConfigError, above
from lrl.members.launchers import LaunchedMembers, Local
from lrl.members.registry import Kind, RunClient
from lrl.strategies.generator_devices import GeneratorDevices
from lrl.strategies.rendezvous import check_seen, check_writes, close_silent_connections, meet
from lrl.system.endpoint import is_loopback
from lrl.system.processes import die_with, unbind_from_parent
from lrl.system.ranks import Ranks, explain_broken_collective

if TYPE_CHECKING:
    import lightning as L

    from lrl.members.registry import RegistryServer

MEETING = timedelta(minutes=30)
"""Longest wait for the process group, rank 0's checks included; another rank's failure is not seen
until then."""

RANK_TIMEOUT = timedelta(hours=6)
"""Longest wait of one rank for another that hangs, but for rank 0's in a sync. An ended rank is
noticed by its closed connection, and a vanished machine after `strategy.heartbeat_s`."""

STARTED_BY = "LRL_STARTED_BY"
"""The environment variable with the process id of the rank 0 that has started a rank."""


class SeveralRanks(GeneratorDevices, ParallelStrategy):
    """Mixin for a Lightning strategy of several processes: `trainer.devices` minus
    `generator_devices` train, one a device.

    Args:
        timeout: Longest wait of one rank for another, once all have met.
        meeting_timeout_s: Longest wait at the start for the ranks of the other nodes, in seconds.
        **kwargs: See `GeneratorDevices`, and the base strategy's own.
    """

    saves_parts = False
    """Whether each rank writes its part of a checkpoint."""
    num_nodes: int
    _timeout: timedelta | None

    def __init__(
        self,
        timeout: timedelta | None = RANK_TIMEOUT,
        meeting_timeout_s: float = 600.0,
        **kwargs: Any,
    ) -> None:
        # removed: the children of this rank must not inherit it.
        if rank_0 := os.environ.pop(STARTED_BY, None):
            die_with(int(rank_0))
        super().__init__(timeout=timeout, **kwargs)
        above(0, "strategy", meeting_timeout_s=meeting_timeout_s)
        self.meeting_timeout_s = meeting_timeout_s
        self._store: dist.Store | None = None
        self._node_generators: LaunchedMembers | None = None

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None, "Lightning's connector sets it"
        processes = len(self.parallel_devices or ())
        self._launcher = RankLauncher(self.cluster_environment, processes, self.num_nodes)

    def meet(self) -> None:
        """Has the ranks of several machines meet; RendezvousError if not all come within
        `meeting_timeout_s`."""
        if self.num_nodes == 1 or dist.is_initialized():  # by an earlier run of this process
            return
        cluster: Any = self.cluster_environment
        self.set_world_ranks()  # type: ignore[attr-defined]
        of_node = len(self.parallel_devices or ())
        self._store = meet(
            cluster.main_address,
            cluster.main_port,
            rank=self.global_rank,
            ranks=of_node * self.num_nodes,
            of_node=of_node,
            hosts=self.global_rank == 0 and not _torchelastic_use_agent_store(),
            timeout_s=self.meeting_timeout_s,
            silence_s=self.heartbeat_s,
        )

    def setup_environment(self) -> None:
        """Connects the ranks. Signals are for rank 0, which stops between two steps."""
        super().setup_environment()
        policy: Any = self.lightning_module
        # Lightning's handler would call a collective wherever the signal finds this rank.
        policy.trainer._signal_connector.register_signal_handlers = lambda: None
        if not self.is_global_zero:
            self.signals.ignore()
        self.ranks = Ranks(dist.new_group(backend="gloo", timeout=self._timeout), self.signals)
        close_silent_connections(self.heartbeat_s)
        unbind_from_parent()  # the ranks have met; at a normal end rank 0 may be done first
        policy.policy_folder = self.broadcast(policy.policy_folder if self.is_global_zero else None)
        if self.num_nodes > 1 and self.saves_parts and policy.trainer.checkpoint_callbacks:
            leads = self.is_global_zero
            check_writes(self.ranks, checkpoint_folders(policy.trainer) if leads else [])

    def setup(self, trainer: L.Trainer) -> None:
        super().setup(trainer)
        if not self.is_global_zero and self.generators_of_other_nodes:
            location, token = self.ranks.receive()
            if self.local_rank == 0:
                self._node_generators = LaunchedMembers(
                    Local(self.placements()),
                    Kind.GENERATOR,
                    RunClient(location, token),
                    location=location,
                    token=token,
                    folder=run_folder(trainer),
                )
                self._node_generators.start()

    def start_on_other_nodes(self, server: RegistryServer) -> None:
        """Tells all ranks where generators join; the first of each other node then starts some."""
        if self.generators_of_other_nodes:
            self.ranks.share((server.elsewhere, server.token))

    def check(self) -> None:
        """Checks that generators of other nodes can reach the run."""
        super().check()
        host = self.server_settings.host
        if self.generators_of_other_nodes and is_loopback(host):
            raise ConfigError(
                f"strategy.server.host is {host}, which the generators of the other nodes do not "
                "reach: give rank 0's address in the network of the nodes, with server.tls_cert and "
                "tls_key, or server.insecure if nobody else is on it."
            )

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Reads a checkpoint on every rank; raises ConfigError on all if one does not see it."""
        if self.num_nodes > 1:
            check_seen(
                self.ranks,
                [Path(checkpoint_path)],
                "Each rank resumes from it: put it on a file system that all nodes have, or copy it "
                "to the same path on each.",
            )
        return super().load_checkpoint(checkpoint_path, *args, **kwargs)

    @contextmanager
    def meeting(self) -> Iterator[None]:
        """Bounds the block, in which the ranks connect; RuntimeError if they have not all come in
        time, or could not connect."""
        timeout, self._timeout = self._timeout, MEETING
        try:
            with self.signals.at_once():
                yield
            self._store = None  # the process group notices errors itself
        except dist.DistError as error:
            raise RuntimeError(
                f"Rank {self.global_rank} has not met all {self.world_size} ranks within {MEETING} "
                f"({error}). Look for another rank's error, and give ranks on several machines "
                "MASTER_ADDR and MASTER_PORT: rank 0's machine, and a free port."
            ) from error
        finally:
            self._timeout = timeout
        if timeout is not None:
            _set_pg_timeout(timeout)

    def teardown(self) -> None:
        """Ends the generators, and after an error the ranks that rank 0 has started."""
        super().teardown()
        self._store = None  # after an error the others see that it is gone
        if self._node_generators is not None:
            self._node_generators.stop()
            self._node_generators = None
        trainer = self.attached_trainer
        if trainer is not None and trainer.interrupted and isinstance(self._launcher, RankLauncher):
            self._launcher.kill(signal.SIGKILL)


def checkpoint_folders(trainer: Any) -> list[Path]:
    given = [getattr(one, "dirpath", None) for one in trainer.checkpoint_callbacks]
    return [Path(folder) for folder in given if folder] or [run_folder(trainer)]


class RankLauncher(_SubprocessScriptLauncher):
    """Starts the other ranks without Lightning's observer, which would kill rank 0 when one fails
    before it has saved a checkpoint."""

    def launch(
        self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any
    ) -> Any:
        self.cluster_environment.validate_settings(
            num_devices=self.num_processes, num_nodes=self.num_nodes
        )
        if not self.cluster_environment.creates_processes_externally:
            check_program(self.num_processes)
            os.environ[STARTED_BY] = str(os.getpid())
            try:
                self._call_children_scripts()
            finally:
                del os.environ[STARTED_BY]
        trainer.strategy.meet()
        with explain_broken_collective():  # wherever Lightning or torch calls one
            return function(*args, **kwargs)

    def kill(self, signum: int | signal.Signals) -> None:
        """Sends a signal to the ranks that it has started; the next run of this process starts its
        own."""
        super().kill(signum)
        forget_place(self)


def check_program(ranks: int) -> None:
    """Raises ConfigError if other ranks are to run this program and it is in no file: Lightning would
    start `python ./-c`, which ends at once, and rank 0 would wait for it for `MEETING`."""
    main = sys.modules["__main__"]
    if ranks > 1 and getattr(main, "__spec__", None) is None and not Path(sys.argv[0]).is_file():
        raise ConfigError(
            f"{ranks} ranks are to train, each in a process that runs this program again, and "
            f"{sys.argv[0]!r} is no file: write it to a file, such as train.py, and run that."
        )


def forget_place(launcher: _SubprocessScriptLauncher) -> None:
    """Removes Lightning's variable when the ranks that this process has started are killed: with it
    the next run took itself for a rank of another process, started none, and waited for them."""
    if launcher.procs:
        os.environ.pop("LOCAL_RANK", None)


WRAPPER_SETTINGS = {
    name: each.default
    for name, each in inspect.signature(DistributedDataParallel).parameters.items()
} | dict.fromkeys(("ddp_comm_state", "ddp_comm_hook", "ddp_comm_wrapper", "model_averaging_period"))
"""Settings that Lightning passes on to torch's wrapper, with their defaults, which the command line
always gives."""


class AsyncDDP(SeveralRanks, DDPStrategy):
    """Several trainer processes, each with the whole policy and its share of a step's micro-batches;
    see `SeveralRanks`.

    Gradients are averaged once, after the last micro-batch (`lrl.training.optimizers`). Torch's
    DistributedDataParallel would do so in every backward pass, and need equally many on all ranks.

    Args:
        **kwargs: See `SeveralRanks`, and Lightning's DDPStrategy without the settings of torch's
            wrapper.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        for name, default in WRAPPER_SETTINGS.items():
            if kwargs.get(name, default) != default:
                raise ConfigError(
                    f"strategy.{name} is {kwargs[name]}. It is for torch's DistributedDataParallel, "
                    "without which lrl.AsyncDDP works. Leave it out."
                )

    def setup_distributed(self) -> None:
        with self.meeting():
            super().setup_distributed()

    def configure_ddp(self) -> None:
        """Copies rank 0's weights to all ranks."""
        assert self.model is not None, "connected by now"
        _sync_module_states(self.model)
