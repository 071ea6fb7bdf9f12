"""Breaks each phase of a sync in each way, once each, in one run of the quickstart's task with two
generators.

    python -m benchmarks.chaos sync            run, record, print the tables
    python -m benchmarks.chaos sync --print    only print the tables of the last run that was recorded

A proxy between the trainer and each generator breaks one request at a time. Afterwards every
trained token is computed again under the weights of the version it names: a token by half-updated
weights agrees with none.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import lightning as L

import lrl
from benchmarks import records
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
from lrl.generators.server import Server
from lrl.run import Run

CAPACITY = 64
SPARE_STEPS = 6
"""For generators that were evicted against the plan, and return at an extra sync."""
TOLERANCE = 0.02
"""Nats. A generator's decode kernel on the CPU and the trainer's forward pass differ by less."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--groups", type=int, default=8, help="problems a step (%(default)s)")
    parser.add_argument("--lr", type=float, default=1e-4, help="(%(default)s)")
    parser.add_argument(
        "--deadline", type=float, default=5.0, help="seconds for a phase (%(default)s)"
    )
    parser.add_argument("--heartbeat", type=float, default=5.0, help="seconds (%(default)s)")
    phases = [INIT, *UPDATE, "/resume", PROBE, STAGE]
    parser.add_argument(
        "--phases", nargs="+", choices=phases, default=phases, help="only faults of these"
    )
    parser.add_argument("--kinds", nargs="+", help="only faults of these kinds")
    parser.add_argument(
        "--print", action="store_true", help="print the last recorded run; run nothing"
    )


def run(args: argparse.Namespace) -> int:
    if not args.print:
        plan = [
            f
            for f in make_plan()
            if f.phase in args.phases and (not args.kinds or f.kind in args.kinds)
        ]
        records.append(args.out, measure(args, plan) | {"command": args.command})
    record = records.read(args.out)[-1]
    wrong = verdict(record)
    print("\n".join([tables(record), "", summary(record), *wrong]))
    return 1 if wrong else 0


class ProxiedServer(Server):
    """A server behind a proxy: its address is the proxy's."""

    proxy: Proxy | None = None

    @property
    def url(self) -> str:
        return super().url if self.proxy is None else self.proxy.url


class BehindProxies(lrl.AsyncSingleDevice):
    """The strategy with a proxy in front of each generator.

    Args:
        proxies: Filled when the servers are made: proxy by number of the generator.
        late_s: Seconds by which a proxy delays.
        **settings: Of `lrl.AsyncSingleDevice`.
    """

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


def run_settings(args: argparse.Namespace, plan: Sequence[Planned]) -> RunSettings:
    steps = len(plan) + sum(fault.takes_out for fault in plan) + SPARE_STEPS
    return RunSettings(
        seed=args.seed,
        max_lag=2,
        lr=args.lr,
        schedule="constant",
        steps=steps,
        groups=args.groups,
        responses=8,
    )


def measure(args: argparse.Namespace, plan: Sequence[Planned]) -> dict[str, Any]:
    settings = run_settings(args, plan)
    proxies = dict[int, Proxy]()
    tokens = TokenRecorder()
    sync = BreakingSync(plan, proxies, settle_s=2 * args.heartbeat + 3.0, deadline_s=args.deadline)
    strategy = BehindProxies(
        proxies,
        late_s=args.deadline + 1.0,
        generator_devices=GENERATORS,
        server=replace(server_settings(), max_num_seqs=CAPACITY),
        heartbeat_s=args.heartbeat,
    )
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1 + GENERATORS,
        strategy=strategy,
        callbacks=[tokens, sync],
        max_steps=settings.steps,
        max_epochs=-1,
        logger=False,
        default_root_dir=args.folder,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    policy = make_module(settings, lrl.objectives.AIPO(rho=4.0))
    data = make_data(settings)
    started = time.monotonic()
    with short_backoffs():
        trainer.fit(policy, data)
    seconds = time.monotonic() - started
    return {
        "seed": args.seed,
        "steps": settings.steps,
        "deadline_s": args.deadline,
        "heartbeat_s": args.heartbeat,
        "seconds": round(seconds, 1),
        "not_met": len(sync.left),
        "proof": asdict(tokens.verify(policy.network, data.sampling.temperature)),
        "faults": [asdict(outcome) for outcome in sync.outcomes],
    }


def cell(fault: dict[str, Any] | None) -> str:
    if fault is None:
        return ""
    if fault["detected_by"] is None:
        return f"not noticed: {fault['outcome']}"
    return f"{fault['outcome']} ({fault['detected_by']}, {fault['detected_s']:.1f} s)"


def tables(record: dict[str, Any]) -> str:
    """Returns the outcome of each fault, in Markdown."""
    found = {(fault["phase"], fault["kind"], fault["stays"]): fault for fault in record["faults"]}
    rows = [
        [f"`{phase}`", *(cell(found.get((phase, kind, False))) for kind in ON_THE_WAY)]
        for phase in [INIT, *UPDATE, "/resume", PROBE]
    ]
    others = [
        (
            f"`{fault['phase']}`, {fault['kind']}{', every time' if fault['stays'] else ''}",
            *(fault[name] for name in ("detected_by", "detected_s", "outcome")),
        )
        for fault in record["faults"]
        if fault["stays"] or fault["kind"] not in ON_THE_WAY
    ]
    heads = ("fault", "noticed by", "after s", "outcome")
    by_phase = records.markdown(["phase", *ON_THE_WAY], rows)
    return f"{by_phase}\n\n{records.markdown(heads, others)}"


def verdict(record: dict[str, Any]) -> list[str]:
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


def harmless(fault: dict[str, Any]) -> bool:
    """Returns whether there is nothing to notice: through shared memory the first handshake does
    nothing."""
    return (fault["phase"], fault["kind"]) == (INIT, "lie")


def summary(record: dict[str, Any]) -> str:
    proof = record["proof"]
    return (
        f"{len(record['faults'])} faults in {record['steps']} steps and {record['seconds']:.0f} s; "
        f"{proof['groups']} groups trained, {proof['missing']} missing, largest lag "
        f"{proof['largest_lag']}. {proof['tokens']} tokens computed again: largest difference "
        f"{proof['difference']:.2g} nats; {proof['carried']} of them in responses that were "
        f"carried, {proof['carried_difference']:.2g} nats. Laid to the version before: "
        f"{proof['under_the_version_before']:.2g} nats."
    )
