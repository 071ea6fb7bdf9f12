"""A registry that is served over HTTP, as rank 0 serves it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lrl.generators.fleet import Fleet
from lrl.generators.settings import ServerSettings
from lrl.members import run_members
from lrl.members.registry import JoinSpec, Registry, RegistryServer, RunClient, write_run_file
from lrl.members.run_members import GeneratorAdmission, poll_forever
from lrl.system.endpoint import Endpoint
from tests.event_loop import LOOP
from tests.generators.model_fleet import let_requests_succeed

TOKEN = "the-token-of-this-run"


def spec_of(transport: str = "shared_memory", **fields: object) -> JoinSpec:
    defaults = {"run_id": "ab12", "on_cpu": True, "generators": 1}
    return JoinSpec("base", asdict(ServerSettings()), transport, **defaults | fields)  # type: ignore[arg-type]


def bare_run(strategy: Any, folder: Path, checkpoint: str | None = None) -> Any:
    """What is read of a run before it starts generators and waits for members."""
    return SimpleNamespace(
        strategy=strategy,
        policy=SimpleNamespace(policy_folder="a/model", dtype_name="float32", lora=None),
        data=SimpleNamespace(
            max_model_tokens=64, resumes_from=checkpoint, environment=None, worker_launcher=None
        ),
        trainer=SimpleNamespace(global_step=0, loggers=[], default_root_dir=str(folder)),
        trains=False,
    )


@contextmanager
def served(
    spec: JoinSpec, folder: Path | None = None, token: str = TOKEN, **endpoint: Any
) -> Iterator[RegistryServer]:
    server = RegistryServer(Registry(spec), Endpoint(**endpoint), token)
    try:
        if folder is not None:
            write_run_file(folder, server)
        yield server
    finally:
        server.close()


@contextmanager
def live_fleet(servers: Sequence[Any], registry: Registry, token: str) -> Iterator[Fleet]:
    """A fleet that serves version 0 and is open to others, which it looks for all the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_members, "POLL_S", 0.01)
        let_requests_succeed(patch)
        fleet = Fleet(servers, LOOP, capacity=4, heartbeat_s=0.02)
        try:
            fleet.start()
            admits = GeneratorAdmission(fleet, registry, token, ServerSettings())
            fleet.run_in_background(poll_forever(admits.poll))
            sync(fleet, 0)
            yield fleet
        finally:
            fleet.stop()


def begin_sync(fleet: Fleet) -> None:
    fleet.call(fleet.rollouts.admit_pending(), "the beginning of a sync")


def end_sync(fleet: Fleet, version: int, failing: str = "") -> None:
    """Ends a model of a sync, in which the generator of a name fails its proof."""

    async def work() -> None:
        failed = {}
        for generator in fleet.rollouts.generators:
            if generator.name == failing:
                failed[generator] = "it does not compute what the policy does"
            else:
                generator.version = version
                generator.open()
        await fleet.rollouts.finish_sync(failed)

    fleet.call(work(), "a model of a sync")


def sync(fleet: Fleet, version: int, failing: str = "") -> None:
    begin_sync(fleet)
    end_sync(fleet, version, failing)


def client_of(server: RegistryServer, token: str = TOKEN) -> RunClient:
    return RunClient(server.location(), token)
