"""Breaks each phase of a sync in each way, once each, in one run of the quickstart's task with two
generators.

A proxy between the trainer and each generator breaks one request at a time. Afterwards every
trained token is computed again under the weights of the version it names: a token by half-updated
weights agrees with none.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

import lrl
from benchmarks import arguments, records
from benchmarks.arguments import Row
from benchmarks.chaos.faults import GENERATORS
from benchmarks.chaos.proxy import Proxy
from benchmarks.chaos.sync_faults import (
    INIT,
    ON_THE_WAY,
    PROBE,
    STAGE,
    UPDATE,
    BreakingSync,
    Planned,
    make_plan,
    short_backoffs,
)
from benchmarks.chaos.token_proof import TokenRecorder
from benchmarks.quickstart_run import RunSettings, make_data, make_module, server_settings
from benchmarks.runs import quiet_trainer
from lrl.generators.server import Server
from lrl.run import Run

CAPACITY = 64
SPARE_STEPS = 6
"""For generators that were evicted against the plan, and return at an extra sync."""
TOLERANCE = 0.02
"""Nats. A generator's decode kernel on the CPU and the trainer's forward pass differ by less."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    phases = [INIT, *UPDATE, "/resume", PROBE, STAGE]
    arguments.add(
        parser,
        seed=(0, "of the run"),
        groups=(8, "problems a step"),
        lr=(1e-4, "peak learning rate"),
        deadline_s=(5.0, "for a phase"),
        heartbeat_s=(5.0, "between two heartbeats"),
        phases=(phases, "only faults of these", phases),
    )
    parser.add_argument("--kinds", nargs="+", help="only faults of these kinds")


def runs(args: argparse.Namespace) -> list[Row]:
    asked = arguments.chosen(args, "seed", "deadline_s", "heartbeat_s")
    return [asked | {"planned": [asdict(one) for one in planned(args)]}]


def planned(args: argparse.Namespace) -> list[Planned]:
    found = [one for one in make_plan() if one.phase in args.phases]
    return [one for one in found if not args.kinds or one.kind in args.kinds]


class ProxiedServer(Server):
    """A server behind a proxy: its address is the proxy's."""

    proxy: Proxy | None = None

    @property
    def url(self) -> str:
        return super().url if self.proxy is None else self.proxy.url


class BehindProxies(lrl.AsyncSingleDevice):
    """The strategy with a proxy in front of each generator, by its number; `proxies` are filled when
    the servers are made."""

    def __init__(self, proxies: dict[int, Proxy], late_s: float, **settings: Any) -> None:
        super().__init__(**settings)
        self._proxies = proxies
        self._late_s = late_s

    def make_servers(self, run: Run) -> list[Server]:
        servers: list[Server] = []
        for plain in super().make_servers(run):
            server = ProxiedServer(
                plain.model,
                plain.settings,
                plain.backend,
                [],
                plain.log_path.parent,
                plain.number,
                self.run_id,
            )
            server.proxy = self._proxies[plain.number] = Proxy(server.url, self._late_s)
            servers.append(server)
        return servers

    def teardown(self) -> None:
        super().teardown()
        for proxy in self._proxies.values():
            proxy.close()


def measure(args: argparse.Namespace, missing: list[Row]) -> Iterator[Row]:
    plan = planned(args)
    settings = RunSettings(
        seed=args.seed,
        max_lag=2,
        lr=args.lr,
        schedule="constant",
        steps=len(plan) + sum(fault.takes_out for fault in plan) + SPARE_STEPS,
        groups=args.groups,
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
    with short_backoffs():
        trainer.fit(policy, data)
    yield missing[0] | {
        "steps": settings.steps,
        "seconds": round(time.monotonic() - started, 1),
        "not_met": len(sync.left),
        "proof": asdict(tokens.verify(policy.network, data.sampling.temperature)),
        "faults": sync.outcomes,
    }


def cell(fault: Row | None) -> str:
    if fault is None:
        return ""
    if fault["detected_by"] is None:
        return f"not noticed: {fault['outcome']}"
    return f"{fault['outcome']} ({fault['detected_by']}, {fault['detected_s']:.1f} s)"


def table(made: Sequence[Row]) -> str:
    """Returns the outcome of each fault, in Markdown, and what is wrong with the run."""
    (record,) = made
    found = {(fault["phase"], fault["kind"], fault["stays"]): fault for fault in record["faults"]}
    rows = [
        [f"`{phase}`", *(cell(found.get((phase, kind, False))) for kind in ON_THE_WAY)]
        for phase in [INIT, *UPDATE, "/resume", PROBE]
    ]
    others = [
        (f"`{phase}`, {kind}{', every time' if stays else ''}", cell(fault))
        for (phase, kind, stays), fault in found.items()
        if stays or kind not in ON_THE_WAY
    ]
    by_phase = records.markdown(["phase", *ON_THE_WAY], rows)
    others_ = records.markdown(("fault", "outcome"), others)
    return "\n".join([by_phase, "", others_, "", summary(record), *verdict(record)])


def verdict(record: Row) -> list[str]:
    proof = record["proof"]
    unnoticed = [
        fault for fault in record["faults"] if fault["detected_by"] is None and not harmless(fault)
    ]
    faults = [f"{fault['kind']} at {fault['phase']} was not noticed" for fault in unnoticed]
    faults += [f"{record['not_met']} faults of the plan were not met"] if record["not_met"] else []
    faults += [f"{proof['missing']} prompts were not trained, or twice"] if proof["missing"] else []
    off = max(proof["difference"], proof["carried_difference"])
    return faults + (
        [f"a token differs by {off:.3g} nats from every version it may be by"]
        if off > TOLERANCE
        else []
    )


def harmless(fault: Row) -> bool:
    """Returns whether there is nothing to notice: through shared memory the first handshake does
    nothing."""
    return (fault["phase"], fault["kind"]) == (INIT, "lie")


def summary(record: Row) -> str:
    proof = record["proof"]
    return (
        f"{len(record['faults'])} faults in {record['steps']} steps and {record['seconds']:.0f} s; "
        f"{proof['groups']} groups trained, {proof['missing']} missing, largest lag "
        f"{proof['largest_lag']}. {proof['tokens']} tokens computed again: largest difference "
        f"{proof['difference']:.2g} nats; {proof['carried']} of them in responses that were "
        f"carried, {proof['carried_difference']:.2g} nats. Laid to the version before: "
        f"{proof['under_the_version_before']:.2g} nats."
    )
