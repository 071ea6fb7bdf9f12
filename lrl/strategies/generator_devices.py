"""The division of a job's devices: the first ones train, the last ones generate.

On a CPU a device is a process: `devices: 2, generator_devices: 1` is one trainer and one generator.
`placement: shared` is the synchronous design that lrl is measured against: both sides take turns,
each with the whole machine.

Generators start in `setup`, after model and data have loaded, so that an error in those comes
before a server starts. The run (`lrl.run`) ends in `teardown`, which Lightning calls at every end
that it survives; the supervisor covers the other ends.
"""

from __future__ import annotations

import gc
import os
import secrets
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.strategies import SingleDeviceStrategy, Strategy
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor

from lrl.checkpoints.checkpoint_file import CheckpointFile
from lrl.checkpoints.resume import steps_done
from lrl.checkpoints.run_folder import run_folder
from lrl.errors import ConfigError, above, at_least, one_of
from lrl.generators.fleet import Fleet
from lrl.generators.server import Server, run_seed
from lrl.generators.settings import ServerSettings
from lrl.members.launchers import Launcher
from lrl.members.registry import RUN_TOKEN, fault_without_token
from lrl.system.auth import given_secret
from lrl.system.machine import share_cores
from lrl.system.ranks import Ranks
from lrl.system.signals import Signals, requeue
from lrl.training.optimizers import check_optimizers
from lrl.training.sharding import Sharding
from lrl.weights.transport import Machine, Transport, choose_transport

if TYPE_CHECKING:
    import lightning as L

    from lrl.run import Run

Placement = Literal["split", "shared"]


class GracefulShutdown(Strategy):
    """Mixin for a Lightning strategy: the first SIGINT or SIGTERM ends the run between two
    optimizer steps. Its hooks are the first and the last of a run, so a signal also stops generators
    that are still starting.

    Args:
        **kwargs: The base strategy's own.
    """

    run: Run | None = None
    """The run that this strategy trains, from its making to its end."""

    def __init__(self, **kwargs: Any) -> None:
        self.signals = Signals()
        super().__init__(**kwargs)

    @property
    def attached_trainer(self) -> Any:
        """None until the other ranks have started."""
        return None if self.lightning_module is None else self.lightning_module._trainer

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """`usual_checkpoint_io`, unless the user has set another one."""
        # Made late: Lightning refuses a plugin of the user beside one that a strategy already has.
        if self._checkpoint_io is None:
            self._checkpoint_io = self.usual_checkpoint_io()
        return super().checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._checkpoint_io = io

    def usual_checkpoint_io(self) -> CheckpointIO:
        return CheckpointFile()

    def setup_environment(self) -> None:
        """Installs the signal handlers and checks the run, before ranks meet."""
        self.signals.listen(self.attached_trainer)
        if self.run is not None:
            self.run.check()
        super().setup_environment()

    def on_train_start(self) -> None:
        """Defers signals from the first step on, until the trainer checks for them."""
        super().on_train_start()
        self.signals.raises = False

    def pre_backward(self, closure_loss: Tensor) -> None:
        self.signals.check()
        super().pre_backward(closure_loss)

    def on_exception(self, exception: BaseException) -> None:
        """Sets the exit status, for Lightning's own SIGTERM handler would exit with 0."""
        self.signals.raises = False
        if isinstance(exception, SIGTERMException) and self.signals.received is not None:
            exception.code = 128 + self.signals.received
        super().on_exception(exception)

    def teardown(self) -> None:
        self.signals.raises = False
        super().teardown()
        # Else Lightning would install ours again, as those it found.
        trainer = self.attached_trainer
        if trainer is not None:
            trainer._signal_connector.teardown()
        self.signals.put_back()
        if self.signals.asks_for_requeue and trainer.interrupted:
            requeue()


class GeneratorDevices(GracefulShutdown):
    """Mixin for a Lightning strategy: reserves devices for generators.

    Args:
        generator_devices: How many of the job's devices on each node generate, counted from the
            last; 0 lets one generator share the device of rank 0. null takes one, and with
            `AsyncSingleDevice` all but the trainer's.
        placement: `split` has both sides work at once, each on its own devices or its half of the
            CPU's cores. `shared` has them take turns with all of them; it needs `data.max_lag: 0`,
            and `generator_devices: 0` on GPUs.
        evaluation_generators: Generators that serve evaluations only, each evaluation at one
            version.
        heartbeat_s: Seconds of silence after which a generator is asked for a token, and seconds
            for that token; without it the generator is replaced. Also the silence that ends a
            connection between two ranks.
        generator_timeout_s: Seconds that a run without any generator waits for a replacement,
            before it ends.
        weight_transfer: The transport of weights: `auto`, `shared_memory` (any machine), `ipc` (one
            shared GPU), `nccl` or `pull` (other machines without nccl). `auto` takes one that
            reaches other machines if `server.host` does.
        launcher: What starts the generators elsewhere (`lrl.members.launchers`); null starts them
            on these devices.
        join_port: Port of `server.host` at which other processes join (`lrl join`); 0 for a free
            one.
        server: Settings of the vLLM servers.
        **kwargs: The base strategy's own.
    """

    sharding: Sharding | None = None
    """The division of the weights over the ranks; None if every rank has them all."""
    resumes_parts = False
    """Whether a run can go on from a checkpoint in parts (`lrl.checkpoints.checkpoint_folder`)."""
    tensor_parallel_size = 1
    """Ranks that compute one micro-batch together."""
    trains_on_one_device = False
    """Whether all devices but one generate, unless the user says otherwise."""

    def __init__(
        self,
        generator_devices: int | None = None,
        placement: Placement = "split",
        evaluation_generators: int = 0,
        heartbeat_s: float = 30.0,
        generator_timeout_s: float = 900.0,
        weight_transfer: str = "auto",
        launcher: Launcher | None = None,
        join_port: int = 0,
        server: ServerSettings | None = None,
        **kwargs: Any,
    ) -> None:
        at_least(0, "strategy", generator_devices=generator_devices)
        at_least(0, "strategy", evaluation_generators=evaluation_generators)
        one_of("strategy", placement=(get_args(Placement), placement))
        if launcher is not None and generator_devices:
            raise ConfigError(
                f"strategy.generator_devices is {generator_devices}, and strategy.launcher starts the "
                "generators on other devices: set generator_devices to 0."
            )
        if launcher is not None:
            generator_devices = 0
            if not launcher.starts and not os.environ.get(RUN_TOKEN):
                fault_without_token(f"strategy.launcher is {type(launcher).__name__}", "generators")
        self.num_generator_devices = generator_devices  # None until the devices are known
        above(0, "strategy", heartbeat_s=heartbeat_s, generator_timeout_s=generator_timeout_s)
        self.num_evaluation_generators = evaluation_generators
        self.placement = placement
        self.heartbeat_s = heartbeat_s
        self.generator_timeout_s = generator_timeout_s
        self.weight_transfer = weight_transfer
        self.join_port = join_port
        self.generator_launcher = launcher
        self.server_settings = server or ServerSettings()
        self.generator_devices: list[torch.device] = []
        self.run_id = secrets.token_hex(4)
        self.has_given_token = bool(os.environ.get(RUN_TOKEN))
        """Whether the user knows the run's token."""
        self.token = given_secret(RUN_TOKEN, "stop the run and replace its weights")
        self.ranks = Ranks()
        self._parallel_devices: list[torch.device] | None = None
        super().__init__(**kwargs)

    @property
    def shards(self) -> int:
        """Ranks that share one copy of the weights."""
        return 1

    @property
    def parallel_devices(self) -> list[torch.device] | None:
        return self._parallel_devices

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device] | None) -> None:
        if not devices:
            self._parallel_devices = devices
            return
        if self.num_generator_devices is None:
            self.num_generator_devices = len(devices) - 1 if self.trains_on_one_device else 1
        kept = self.num_generator_devices
        split = len(devices) - kept
        if split <= 0:
            raise ConfigError(
                f"strategy.generator_devices is {kept} and trainer.devices is {len(devices)}: no "
                "device is left to train. trainer.devices counts the whole job: set it to at least "
                f"{kept + 1}, or generator_devices to 0 to share."
            )
        if split > 1 and self.trains_on_one_device:
            raise ConfigError(
                f"AsyncSingleDevice trains on one device, and trainer.devices {len(devices)} minus "
                f"strategy.generator_devices {kept} leaves {split}. Raise generator_devices, or "
                "train on all of them with lrl.AsyncDDP."
            )
        self._parallel_devices = devices[:split]
        self.generator_devices = devices[split:]

    def check(self) -> None:
        """Raises ConfigError if the settings and the devices do not go together."""
        self.choose_transport()
        started = len(self.placements())
        if 0 < self.num_evaluation_generators >= started:
            raise ConfigError(
                f"strategy.evaluation_generators is {self.num_evaluation_generators} and {started} "
                "generators start here: none is left for rollouts, and those of strategy.launcher "
                "write nothing else. Lower it, or raise generator_devices and trainer.devices."
            )

    def setup(self, trainer: L.Trainer) -> None:
        """Sets up training, then starts the generators and waits until they are ready."""
        super().setup(trainer)
        if trainer.state.fn == "fit":
            check_optimizers(trainer)
            if self.run is not None:
                self.run.policy.try_loss()
        on_cpu = self.root_device.type != "cuda"
        if on_cpu and self.placement == "split" and self.generator_launcher is None:
            share_cores(ranks=len(self.parallel_devices or ()) or 1)
        if trainer.is_global_zero and self.run is not None:
            self.run.start()

    @property
    def generators_of_other_nodes(self) -> int:
        """Generators that the nodes of other ranks start."""
        others = getattr(self, "num_nodes", 1) - 1
        return others * len(self.placements()) if self.generator_devices else 0

    @property
    def shares_device(self) -> bool:
        """Whether a generator has the trainer's device, too."""
        return not self.generator_devices and self.generator_launcher is None

    def choose_transport(self) -> type[Transport]:
        """Returns the transport on these devices; raises ConfigError if they, or the servers'
        settings, do not allow `weight_transfer`."""
        on_cuda, nodes = self.root_device.type == "cuda", getattr(self, "num_nodes", 1)
        machine = Machine(
            on_cuda,
            shares_device=on_cuda and self.shares_device,
            host=self.server_settings.host,
            ranks=(len(self.parallel_devices or ()) or 1) * nodes,
            nodes=nodes,
        )
        chosen = choose_transport(self.weight_transfer, machine)
        if why := chosen.server_refusal(self.server_settings):
            raise ConfigError(why)
        return chosen

    def make_servers(self, run: Run) -> list[Server]:
        """Makes one server, not started, for each of `placements`."""
        transport = self.choose_transport()
        return [
            Server(
                run.policy.policy_folder,
                self.settings_of(run),
                backend=transport.backend,
                devices=devices,
                folder=run_folder(run.trainer),
                number=number,
                token=self.token,
                transport_environment=transport.server_environment(number),
                middleware=transport.middleware,
                seed=self.seed_of(run),
            )
            for number, devices in enumerate(self.placements())
        ]

    def settings_of(self, run: Run) -> ServerSettings:
        """Returns the settings of the servers, completed from policy and data."""
        given = self.server_settings
        has_all_cores = self.placement == "shared" and "OMP_NUM_THREADS" not in os.environ
        return replace(
            given,
            max_model_len=given.max_model_len or run.data.max_model_tokens,
            threads=given.threads or (os.cpu_count() if has_all_cores else None),
            dtype=run.policy.dtype_name if given.dtype == "auto" else given.dtype,
        )

    def seed_of(self, run: Run) -> int:
        """Returns the seed of the servers, another one after a resume."""
        checkpoint = run.data.resumes_from
        saved_steps = 0 if checkpoint is None else steps_done(Path(checkpoint))
        return run_seed(max(run.trainer.global_step, saved_steps))

    def make_fleet(self, run: Run, servers: list[Server]) -> Fleet:
        return Fleet(
            servers,
            run.loop,
            capacity=self.server_settings.max_num_seqs,
            reserved=self.num_evaluation_generators,
            heartbeat_s=self.heartbeat_s,
            outage_timeout_s=self.generator_timeout_s,
            dispatch=run.data.dispatch,
            migration=run.data.migration,
        )

    def placements(self) -> list[list[int]]:
        """Returns the CUDA indices of each generator of this node, none of one on the CPU; raises
        ConfigError if `server.tensor_parallel_size` does not divide them."""
        if self.generator_launcher is not None:
            return []
        if self.root_device.type != "cuda":
            return [[] for _ in range(max(1, len(self.generator_devices)))]
        shared: torch.device = self.root_device
        indices = [device.index for device in self.generator_devices or [shared]]
        size = self.server_settings.tensor_parallel_size
        if len(indices) % size:
            raise ConfigError(
                f"strategy.server.tensor_parallel_size is {size}, which does not divide the "
                f"{len(indices)} generator devices."
            )
        return [indices[start : start + size] for start in range(0, len(indices), size)]

    def on_train_start(self) -> None:
        """Excludes all objects made so far from garbage collection."""
        super().on_train_start()
        gc.collect()  # a full one took 0.3 s with all threads stopped, and came so rarely that garbage lay for minutes
        gc.freeze()

    def teardown(self) -> None:
        gc.unfreeze()
        try:
            if self.run is not None:
                self.run.end()
        finally:
            super().teardown()


class AsyncSingleDevice(GeneratorDevices, SingleDeviceStrategy):
    """One trainer process on one device, and the rest of the job's devices for generators; see
    `GeneratorDevices`."""

    trains_on_one_device = True

    @property
    def root_device(self) -> torch.device:
        return self.parallel_devices[0] if self.parallel_devices else torch.device("cpu")
