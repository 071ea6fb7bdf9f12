"""What the generators of a run are made of: servers on the strategy's devices, with settings that
policy and data complete, and the terms on which others join."""

from __future__ import annotations

import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from lrl.checkpoints.newest_checkpoint import steps_done
from lrl.checkpoints.run_folder import run_folder
from lrl.generators.fleet import Fleet
from lrl.generators.server import Server, run_seed
from lrl.generators.settings import ServerSettings
from lrl.members.registry import JoinSpec, Kind, Registry, RegistryServer
from lrl.members.run_members import RunMembers
from lrl.workers.pool import Members

if TYPE_CHECKING:
    from lrl.run import Run


def server_settings(run: Run) -> ServerSettings:
    """Returns the settings of the servers, completed from policy and data: no two settings have to
    agree."""
    given = run.strategy.server_settings
    has_all_cores = run.strategy.placement == "shared" and "OMP_NUM_THREADS" not in os.environ
    return replace(
        given,
        max_model_len=given.max_model_len or run.data.max_model_tokens,
        threads=given.threads or (os.cpu_count() if has_all_cores else None),
        dtype=run.policy.dtype_name if given.dtype == "auto" else given.dtype,
    )


def make_fleet(run: Run, servers: list[Server]) -> Fleet:
    strategy = run.strategy
    return Fleet(
        servers,
        capacity=strategy.server_settings.max_num_seqs,
        reserved=strategy.num_evaluation_generators,
        heartbeat_s=strategy.heartbeat_s,
        outage_timeout_s=strategy.generator_timeout_s,
        dispatch=run.data.dispatch,
        migration=run.data.migration,
    )


def make_members(run: Run, fleet: Fleet) -> RunMembers:
    """Makes the members of a run that other processes start, and the server where they join; raises
    ConfigError if its port is taken."""
    data, strategy = run.data, run.strategy
    # The responses of an evaluation are scored on rank 0 alone.
    pools = [data.reward_pool.workers] if run.trains else []
    if data.environment is not None and data.environment.workers is not None:
        pools.append(data.environment.workers)
    launchers = {
        Kind.GENERATOR: strategy.generator_launcher,
        Kind.WORKER: data.worker_launcher if pools else None,
    }
    workers = Members(*pools) if pools else None
    settings = server_settings(run)
    spec = join_spec(run, generators=len(fleet.generators))
    registry = Registry(spec, None if workers is None else workers.terms)
    return RunMembers(
        fleet,
        workers=workers,
        launchers={kind: one for kind, one in launchers.items() if one is not None},
        settings=settings,
        folder=run_folder(run.trainer),
        server=RegistryServer(registry, settings.endpoint, strategy.token, strategy.join_port),
    )


def join_spec(run: Run, generators: int) -> JoinSpec:
    """Returns what a joining generator must share with the `generators` that the run starts."""
    model, transport = run.policy.policy_folder, run.strategy.choose_transport()
    return JoinSpec(
        model=os.path.abspath(model) if os.path.exists(model) else model,
        settings=asdict(server_settings(run)),
        transport=transport.backend,
        run_id=run.strategy.run_id,
        on_cpu=run.strategy.root_device.type != "cuda",
        generators=generators,
        seed=seed_of(run),
        environment=transport.common_environment(os.environ),
        serves_model=os.path.isdir(model),
    )


def seed_of(run: Run) -> int:
    checkpoint = run.data.resumes_from
    saved_steps = 0 if checkpoint is None else steps_done(Path(checkpoint))
    return run_seed(max(run.trainer.global_step, saved_steps))
