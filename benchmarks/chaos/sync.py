"""Breaks each phase of a sync in each way, once each, in one run of the quickstart's task with two
generators.

A proxy between the trainer and each generator breaks one request at a time. Afterwards every
trained token is computed again under the weights of the version it names: a token by half-updated
weights agrees with none.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, get_args
from unittest import mock

import lightning as L

import lrl
from benchmarks import arguments, records
from benchmarks.arguments import Row
from benchmarks.chaos.faults import GENERATORS
from benchmarks.chaos.proxy import Fault, Kind, Proxy
from benchmarks.chaos.token_proof import TokenRecorder
from benchmarks.quickstart_run import RunSettings, make_data, make_module, server_settings
from benchmarks.runs import quiet_trainer
from lrl.callbacks import WeightSync
from lrl.callbacks.base import run_of
from lrl.generators.generator import Generator
from lrl.generators.pool import GeneratorPool
from lrl.generators.server import Server
from lrl.run import Run
from lrl.system import job_supervisor

INIT, RESUME, PROBE = "/init_weight_transfer_engine", "/resume", "probe"
UPDATE = ["/pause", "/start_weight_update", "/update_weights", "/finish_weight_update"]
TAKING_OUT: tuple[Kind, ...] = ("cut", "refused", "silent", "lie")
"""A resume or a probe that only comes late reaches a generator that is evicted already."""
UNHEARD: tuple[Kind, ...] = ("silent", "late")
"""A generator that does not answer a pause writes nothing."""
STAYS = 1_000_000
"""Number of requests: more than there are."""
CAPACITY = 64
SPARE_STEPS = 6
"""For generators that were evicted against the plan, and return at an extra sync."""
TOLERANCE = 0.02
"""Nats. A generator's decode kernel on the CPU and the trainer's forward pass differ by less."""
WAIT_S = 300.0
"""For a lost generator to come back."""
SETTINGS: dict[str, Any] = {
    "seed": (0, "of the run"),
    "deadline_s": (5.0, "for a phase"),
    "heartbeat_s": (5.0, "between two heartbeats"),
}


@dataclass(frozen=True, kw_only=True)
class Planned:
    """One fault of the plan."""

    phase: str
    """The route, or `probe`."""
    kind: Kind
    stays: bool = False
    """Whether it stays until the generator is out."""
    takes_out: bool = False
    """Whether the generator is expected to be replaced."""


def make_plan() -> list[Planned]:
    plan = [
        Planned(phase=phase, kind=kind, takes_out=phase == "/pause" and kind in UNHEARD)
        for kind in get_args(Kind)
        for phase in [INIT, *UPDATE]
    ]
    plan += [
        Planned(phase=phase, kind=kind, takes_out=True)
        for kind in TAKING_OUT
        for phase in (RESUME, PROBE)
    ]
    stay: dict[str, Kind] = {
        "/pause": "cut",
        "/update_weights": "refused",
        "/finish_weight_update": "silent",
    }
    return plan + [
        Planned(phase=phase, kind=kind, stays=True, takes_out=True) for phase, kind in stay.items()
    ]


class BreakingSync(WeightSync):
    """A `WeightSync` that injects the next fault of a plan into each sync, by the proxy in front of
    a generator. For an eviction that follows the sync it waits `settle_s`."""

    def __init__(
        self, plan: Sequence[Planned], proxies: dict[int, Proxy], settle_s: float, **settings: Any
    ) -> None:
        super().__init__(**settings)
        self.left = list(plan)
        self.outcomes: list[Row] = []
        """Each fault, the version of the sync that it hit, how many requests it hit, whether the
        generator was taken out, and the seconds of the sync."""
        self._proxies = proxies
        self._settle_s = settle_s

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        run = run_of(trainer)
        run.sync = partial(self._sync, run, run.sync)  # type: ignore[method-assign]
        super().on_train_start(trainer, pl_module)

    def _sync(self, run: Run, sync: Callable[[], None]) -> None:
        pool, version = run.fleet.rollouts, run.trainer.global_step
        run.syncs[pool].wait()
        new = self._wait_for_lost(pool)
        fitting = [planned for planned in self.left if (planned.phase == INIT) == bool(new)]
        if not fitting or not (new or version != run.version):
            sync()
            return
        planned, target = fitting[0], new[-1] if new else pool.serving[version % GENERATORS]
        self.left.remove(planned)
        fault = Fault(planned.phase, planned.kind, STAYS if planned.stays else 1)
        proxy = self._proxies[target.server.number]
        proxy.fault = fault
        started = time.monotonic()
        try:
            sync()
            run.syncs[pool].wait()
            if len(pool.serving) < len(pool.generators):  # a waiting trainer does as much
                sync()
            sync_s = time.monotonic() - started
            end = time.monotonic() + self._settle_s
            slow = planned.takes_out or planned.kind == "late"
            while slow and target.eviction is None and time.monotonic() < end:
                time.sleep(0.1)
        finally:
            proxy.fault = None
        found = {"version": version, "hits": fault.hits, "taken_out": bool(target.eviction)}
        self.outcomes.append(asdict(planned) | found | {"sync_s": round(sync_s, 2)})

    def _wait_for_lost(self, pool: GeneratorPool) -> list[Generator]:
        """Waits until all generators serve, or some are there for their first sync; returns
        those."""
        end = time.monotonic() + WAIT_S
        while True:
            new = [*pool.pending, *(one for one in pool.generators if one.version < 0)]
            if new or len(pool.serving) == GENERATORS:
                return new
            if time.monotonic() > end:
                raise TimeoutError(f"No generator came back within {WAIT_S:g} s: {pool.last_loss}")
            time.sleep(0.2)


class BehindProxies(lrl.AsyncSingleDevice):
    """The strategy with a proxy in front of each generator; it fills `proxies`, by number."""

    def __init__(self, proxies: dict[int, Proxy], late_s: float, **settings: Any) -> None:
        super().__init__(**settings)
        self._proxies = proxies
        self._late_s = late_s

    def make_servers(self, run: Run) -> list[Server]:
        servers = super().make_servers(run)
        for server in servers:
            proxy = self._proxies[server.number] = Proxy(server.url, self._late_s)
            server.url = proxy.url
        return servers

    def teardown(self) -> None:
        super().teardown()
        for proxy in self._proxies.values():
            proxy.close()


def runs(args: argparse.Namespace) -> list[Row]:
    asked = arguments.chosen(args, "seed", "deadline_s", "heartbeat_s")
    return [asked | {"planned": [asdict(one) for one in make_plan()]}]


def measure(args: argparse.Namespace, missing: list[Row]) -> Iterator[Row]:
    plan = make_plan()
    settings = RunSettings(
        seed=args.seed,
        max_lag=2,
        lr=1e-4,
        schedule="constant",
        steps=len(plan) + sum(fault.takes_out for fault in plan) + SPARE_STEPS,
        groups=8,
        responses=8,
    )
    proxies = dict[int, Proxy]()
    tokens = TokenRecorder()
    settle_s = 2 * args.heartbeat_s + 3.0
    sync = BreakingSync(
        plan, proxies, settle_s=settle_s, deadline_s=args.deadline_s, prove_every_n_syncs=1
    )
    strategy = BehindProxies(
        proxies,
        late_s=args.deadline_s + 1.0,
        generator_devices=GENERATORS,
        server=replace(server_settings(), max_num_seqs=CAPACITY),
        heartbeat_s=args.heartbeat_s,
    )
    trainer = quiet_trainer(
        settings.steps,
        args.folder,
        devices=1 + GENERATORS,
        strategy=strategy,
        callbacks=[tokens, sync],
    )
    policy = make_module(settings, lrl.objectives.AIPO(rho=4.0))
    data = make_data(settings)
    started = time.monotonic()
    # Short backoffs: every lost generator comes back for the next fault.
    with mock.patch.object(job_supervisor, "LONGEST_BACKOFF_S", job_supervisor.FIRST_BACKOFF_S):
        trainer.fit(policy, data)
    yield missing[0] | {
        "steps": settings.steps,
        "seconds": round(time.monotonic() - started, 1),
        "not_met": len(sync.left),
        "proof": asdict(tokens.verify(policy.network, data.sampling.temperature)),
        "faults": sync.outcomes,
    }


def table(made: Sequence[Row]) -> str:
    """Returns the outcome of each fault, and what is wrong with the run."""
    (record,) = made
    lines = [
        (
            f"`{one['phase']}`, {one['kind']}{', every time' if one['stays'] else ''}",
            "taken out" if one["taken_out"] else "the run continued with it",
            one["hits"],
            one["sync_s"],
        )
        for one in record["faults"]
    ]
    heads = ("fault", "generator", "requests", "sync (s)")
    told = [records.markdown(heads, lines), "", records.listed(record["proof"])]
    return "\n".join(told + verdict(record))


def verdict(record: Row) -> list[str]:
    proof = record["proof"]
    wrong = [f"{record['not_met']} faults of the plan were not met"] if record["not_met"] else []
    wrong += [f"{proof['missing']} prompts were not trained, or twice"] if proof["missing"] else []
    off = max(proof["difference"], proof["carried_difference"])
    if off > TOLERANCE:
        wrong.append(f"a token differs by {off:.3g} nats from every version it may be by")
    return wrong


EXPERIMENTS = {"sync": (SETTINGS, runs, measure)}
