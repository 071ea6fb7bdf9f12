"""One of two trainer nodes, a process with a network, a folder and torchrun's or SLURM's variables
of its own.

Its program fits a policy to given groups without generators, so that what is looked at is how the
nodes meet and end.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.environments import TorchElasticEnvironment

import lrl
from lrl.errors import ConfigError
from lrl.strategies import several_ranks
from lrl.strategies.several_ranks import GLOO, NCCL
from tests.leftovers import wait_for
from tests.network_namespace import Machine
from tests.run_without_generators import StepsByVersion, trainer
from tests.strategies.forked_ranks import CONTEXT, Fork, be_program, torchruns_variables
from tests.strategies.run_of_ranks import whole
from tests.strategies.sharded_fit import NoSync, NoTimes, StageWeights, make_policy

PORT = 29500
CLONE_NEWNS = 0x20000
DEADLINE_S = 300.0
"""Longest wait for a line or an end; the deadlines that the tests are about are the program's."""


def as_torchrun(number: int) -> dict[str, str]:
    """The variables of torchrun's worker on a node; the agent's store is left out, so that rank 0
    opens it."""
    place = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": str(number)}
    return torchruns_variables(number, 2, PORT) | place | {"MASTER_ADDR": "10.213.0.1"}


def as_slurm(number: int) -> dict[str, str]:
    place = {"SLURM_PROCID": number, "SLURM_NODEID": number, "SLURM_LOCALID": 0, "SLURM_NTASKS": 2}
    job = {"SLURM_NTASKS_PER_NODE": 1, "SLURM_NNODES": 2, "SLURM_JOB_ID": 7}
    meeting = {"SLURM_JOB_NAME": "lrl", "MASTER_ADDR": "10.213.0.1", "MASTER_PORT": PORT}
    return {name: str(value) for name, value in (place | job | meeting).items()}


class Node(Fork):
    @property
    def said(self) -> str:
        return self.printed()

    def wait_for(self, words: str) -> None:
        wait_for(lambda: words in self.said or not self.process.is_alive(), DEADLINE_S, words)
        assert words in self.said, self.said

    def status(self) -> int:
        status = self.wait(DEADLINE_S)
        assert status is not None, self.said
        return status


@contextmanager
def nodes(folder: Path) -> Iterator[Callable[..., Node]]:
    started: list[Node] = []

    def start(
        number: int,
        machine: Machine,
        program: Callable[..., None],
        *words: Any,
        hidden: tuple[Path, ...] = (),
        started_by: Callable[[int], dict[str, str]] = as_torchrun,
        **variables: str,
    ) -> Node:
        place = folder / f"node-{number}"
        place.mkdir(exist_ok=True)
        (place / "output").write_text("")
        own = {"TMPDIR": str(place)} | started_by(number) | variables
        arguments = (machine, place, hidden, own, program, words)
        started.append(Node(CONTEXT.Process(target=_be_node, args=arguments), place / "output"))
        started[-1].process.start()
        return started[-1]

    try:
        yield start
    finally:
        for node in started:
            node.process.kill()
            node.process.join()


def _be_node(
    machine: Machine,
    place: Path,
    hidden: tuple[Path, ...],
    variables: dict[str, str],
    program: Callable[..., None],
    words: tuple[Any, ...],
) -> None:
    machine.enter()
    if hidden:
        hide(hidden)
    os.chdir(place)
    be_program(place / "output", variables, program, words)


def hide(folders: tuple[Path, ...]) -> None:
    """Has this process see nothing in some folders, as on a machine that does not share them."""
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNS):
        raise OSError(ctypes.get_errno(), "unshare")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    for one in folders:
        subprocess.run(["mount", "-t", "tmpfs", "none", str(one)], check=True)


class Telling(L.Callback):
    """Prints a line for each step, with the sum of all weights, of policy and reference.

    After the third step it waits, if it shall, for a file `go`.
    """

    def __init__(self, waits: bool) -> None:
        self.waits = waits

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *args: Any) -> None:
        networks = (pl_module.network, pl_module.reference.network)
        sums = [
            sum(float(whole(one).double().sum()) for one in network.parameters())
            for network in networks
        ]
        print(f"step {trainer.global_step}: {sums}", flush=True)
        if self.waits and trainer.global_step == 3:
            wait_for(Path("go").exists, DEADLINE_S, "the test")


def met(timeout_s: float) -> Any:
    strategy = lrl.AsyncDDP(generator_devices=0, meeting_timeout_s=timeout_s, heartbeat_s=3.0)
    strategy.cluster_environment = TorchElasticEnvironment()
    strategy.parallel_devices = [torch.device("cpu")]
    strategy.num_nodes = int(os.environ["WORLD_SIZE"])
    strategy.meet()
    return strategy._store


def meet(timeout_s: float) -> None:
    several_ranks.ANSWER_S = 3.0
    store = met(timeout_s)
    print("met by", os.environ[GLOO], os.environ[NCCL], flush=True)
    store.set(f"left/{os.environ['RANK']}", "")
    if os.environ["RANK"] == "0":  # the store ends with it
        everyone = [f"left/{one}" for one in range(int(os.environ["WORLD_SIZE"]))]
        store.wait(everyone, timedelta(seconds=DEADLINE_S))


def await_rank_0() -> None:
    """Meets, and waits until rank 0 has made its checks, in which that finds a fault."""
    _store = met(DEADLINE_S)
    if os.environ["RANK"] == "0":
        time.sleep(2)
        raise ConfigError("data.temperature is 0.")
    dist.init_process_group("gloo", timeout=timedelta(minutes=30))


def fit(
    strategy: str,
    model: str,
    steps: int,
    ckpt_path: str | None = None,
    waits: bool = False,
    **settings: Any,
) -> None:
    running = trainer(
        Path(),
        *(NoSync(), NoTimes(), StageWeights(), Telling(waits)),
        ModelCheckpoint("saved", every_n_train_steps=2, save_top_k=-1),
        accelerator="cpu",
        devices=1,
        num_nodes=2,
        strategy=getattr(lrl, strategy)(generator_devices=0, **settings),
        max_steps=steps,
    )
    running.fit(make_policy(model, False), datamodule=StepsByVersion(), ckpt_path=ckpt_path)
    print("done", flush=True)
