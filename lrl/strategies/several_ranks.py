"""Several trainer processes, the ranks of a run: how they start, meet, notice that one is lost, and
end.

Rank 0 has the fleet, the data module's state and all of lrl's callbacks; the other ranks compute
(`lrl.system.ranks`). After an error it calls no collective and kills the ranks that it has
started. Before the ranks have met there is no connection whose end they could notice: until then the
kernel ends a rank together with the rank 0 that has started it, and the first signal ends any rank
at once. All connect when rank 0 has made its checks.
"""

from __future__ import annotations

import inspect
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch.distributed as dist
from lightning.pytorch.overrides.distributed import _sync_module_states
from lightning.pytorch.strategies import DDPStrategy, ParallelStrategy
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.rendezvous import _torchelastic_use_agent_store
from torch.nn.parallel import DistributedDataParallel

from lrl.checkpoints.run_folder import run_folder
from lrl.errors import ConfigError, RendezvousError, above
from lrl.members.launched import LaunchedMembers
from lrl.members.launchers import Launcher
from lrl.members.registry import Kind, RunClient
from lrl.strategies.generator_devices import GeneratorDevices
from lrl.system.endpoint import is_loopback, way_to
from lrl.system.processes import die_with, unbind_from_parent
from lrl.system.ranks import Ranks, explain_broken_collective

if TYPE_CHECKING:
    import lightning as L

MEETING = timedelta(minutes=30)
"""Longest wait for the process group, rank 0's checks included; another rank's failure is not seen
until then."""
RANK_TIMEOUT = timedelta(hours=6)
"""Longest wait for a rank that hangs. One that has ended is noticed by its closed connection, and a
vanished machine after `strategy.heartbeat_s`."""
STARTED_BY = "LRL_STARTED_BY"
"""The environment variable with the process id of the rank 0 that has started a rank."""
GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
POLL_S = 0.2
ANSWER_S = 10.0
"""Longest wait for an answer of the store, and how much longer others wait than rank 0, whose error
names the missing."""
PROBES = 4
"""Probes without an answer that close a connection."""
SEEN_S = 5.0
"""Longest wait until a file that rank 0 has written is seen on another machine."""


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
        if rank_0 := os.environ.pop(STARTED_BY, None):  # removed: children must not inherit it
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
        """Has the ranks of several machines meet at torch's store, before anything costs time: a
        process group would wait without a word for those that do not come. RendezvousError names
        them."""
        if self.num_nodes == 1 or dist.is_initialized():  # by an earlier run of this process
            return
        cluster: Any = self.cluster_environment
        self.set_world_ranks()  # type: ignore[attr-defined]
        host, port = cluster.main_address, cluster.main_port
        opens = self.global_rank == 0 and not _torchelastic_use_agent_store()
        try:
            store: dist.Store = dist.TCPStore(
                *(host, port, None, opens, timedelta(seconds=self.meeting_timeout_s)),
                wait_for_workers=False,
                multi_tenant=True,  # the process group's own store, later, is the same server
            )
            store.set_timeout(timedelta(seconds=ANSWER_S))
            # torchrun's agent keeps the keys of the workers that it has started before.
            restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            store = dist.PrefixStore(f"lrl/{restarts}", store)
            close_silent_connections(self.heartbeat_s)
            address, _ = way_to(host)
            if not is_loopback(address):
                # A machine's own name often leads it to itself, and others to its network.
                store.set("address", address)
            self._wait_for_all(store)
            if store.check(["address"]):
                address = store.get("address").decode()
        except dist.DistError as error:
            raise RendezvousError(
                f"MASTER_ADDR is {host} and MASTER_PORT {port}: {str(error).splitlines()[0]} Start "
                "rank 0 there, or look for its error."
            ) from error
        take_interface(address)
        self._store = store  # kept until all are connected: with it ends the wait of the others

    def _wait_for_all(self, store: dist.Store) -> None:
        # Rank 0 looks for all and tells them: a thousand ranks would ask a million times.
        leads, of_node = self.global_rank == 0, len(self.parallel_devices or ())
        keys = [f"rank/{one}" for one in range(of_node * self.num_nodes)] if leads else ["all"]
        store.set(f"rank/{self.global_rank}", "")
        end = time.monotonic() + self.meeting_timeout_s + (0 if leads else ANSWER_S)
        while missing := [at for at, key in enumerate(keys) if not store.check([key])]:
            if time.monotonic() > end:
                names = [f"rank {one} (node {one // of_node})" for one in missing[:8]]
                raise RendezvousError(
                    f"After {self.meeting_timeout_s:.0f} s {', '.join(names)}"
                    f"{' and more' * (len(missing) > 8)} has not come. Start lrl on every node with "
                    "the same MASTER_ADDR and MASTER_PORT, look there for an error, or raise "
                    "strategy.meeting_timeout_s."
                )
            time.sleep(POLL_S)
        if leads:
            store.set("all", "")

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
            check_writes(self.ranks, policy.trainer)

    def setup(self, trainer: L.Trainer) -> None:
        super().setup(trainer)
        if not self.is_global_zero and self.generators_of_other_nodes:
            location, token = self.ranks.receive()  # of `Run.start`
            if self.local_rank == 0:
                self._node_generators = LaunchedMembers(
                    Launcher(len(self.placements())),  # `lrl join` itself
                    Kind.GENERATOR,
                    RunClient(location, token),
                    run_folder(trainer),
                    placements=self.placements(),
                )
                self._node_generators.start()

    def check(self) -> None:
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
        """Gives the block, in which the ranks connect, `MEETING`; RuntimeError if they have not."""
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
        super().kill(signum)
        if self.procs:  # with it this process's next run took itself for another's rank, and waited
            os.environ.pop("LOCAL_RANK", None)


def check_program(ranks: int) -> None:
    """Raises ConfigError if other ranks are to run this program and it is in no file: Lightning would
    start `python ./-c`, which ends at once, and rank 0 would wait for it for `MEETING`."""
    main = sys.modules["__main__"]
    if ranks > 1 and getattr(main, "__spec__", None) is None and not Path(sys.argv[0]).is_file():
        raise ConfigError(
            f"{ranks} ranks are to train, each in a process that runs this program again, and "
            f"{sys.argv[0]!r} is no file: write it to a file, such as train.py, and run that."
        )


def close_silent_connections(silence_s: float) -> None:
    """Has the kernel close each TCP connection that this process now has, if its other end is
    silent for `silence_s`: a machine that loses its power or its network closes nothing itself. Its
    kernel answers the probes, so a process may be busy as long as it likes.
    """
    pause = max(1, round(silence_s / (PROBES + 1)))
    options = {
        socket.TCP_KEEPIDLE: pause,
        socket.TCP_KEEPINTVL: pause,
        socket.TCP_KEEPCNT: PROBES,
        socket.TCP_USER_TIMEOUT: round(silence_s * 1000),  # for what was sent
    }
    for connection in psutil.Process().net_connections("tcp"):
        if connection.status == psutil.CONN_ESTABLISHED:
            # The same connection, whose owner is a library.
            with socket.socket(fileno=os.dup(connection.fd)) as end:
                end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                for option, value in options.items():
                    end.setsockopt(socket.IPPROTO_TCP, option, value)


def take_interface(address: str) -> None:
    """Has gloo and NCCL take the interface that leads to an address, unless the user has set one.

    Left to itself gloo takes the address of the machine's name. That is often 127.0.0.1: then a rank
    of another machine connects to itself, fails, and rank 0 waits for it.
    """
    _, own = way_to(address)
    for name, addresses in psutil.net_if_addrs().items():
        if own in [one.address.partition("%")[0] for one in addresses]:
            os.environ.setdefault(GLOO, name)
            os.environ.setdefault(NCCL, f"={name}")  # without the sign eth1 would also be eth10


def check_writes(ranks: Ranks, trainer: L.Trainer) -> None:
    """Raises ConfigError on all ranks if one does not see the folders of rank 0 into which each writes
    its part of a checkpoint."""
    marks = []
    if trainer.is_global_zero:
        given = [getattr(one, "dirpath", None) for one in trainer.checkpoint_callbacks]
        folders = [Path(folder) for folder in given if folder] or [run_folder(trainer)]
        marks = [folder.absolute() / f".lrl-{secrets.token_hex(4)}" for folder in folders]
    for mark in marks:
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()
    remedy = (
        "Put checkpoints on a file system that all nodes have (ModelCheckpoint.dirpath), or set "
        "strategy.save_distributed_checkpoint to false: rank 0 then writes one file."
    )
    try:
        check_seen(ranks, marks, remedy)
    finally:
        for mark in marks:
            mark.unlink(missing_ok=True)


def check_seen(ranks: Ranks, paths: Sequence[Path], remedy: str) -> None:
    """Raises ConfigError on all ranks if one does not see what rank 0 sees at its `paths`."""
    wanted = ranks.share([(path, _size(path)) for path in paths])
    end = time.monotonic() + SEEN_S
    while (
        unseen := [path for path, size in wanted if _size(path) != size]
    ) and time.monotonic() < end:
        time.sleep(POLL_S)
    faults = [
        f"rank {rank} on {host} does not see {str(path)!r}, or another one there"
        for rank, (host, theirs) in enumerate(ranks.gather((socket.gethostname(), unseen)))
        for path in theirs
    ]
    if lost := ranks.share("; ".join(faults[:3])):
        raise ConfigError(f"{lost}. {remedy}")


def _size(path: Path) -> int:
    """Returns the bytes of a file, 0 of a folder; -1 without one."""
    if not path.exists():
        return -1
    return path.stat().st_size if path.is_file() else 0


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
