"""Break the sync: each of its phases in each way, once each, in one run of the quickstart's task with two generators.

    python -m benchmarks.chaos.sync            run, record, print the tables
    python -m benchmarks.chaos.sync --print    only print the tables of the last run that was recorded

Between the trainer and each generator stands a proxy that breaks one request when it is told to. Afterwards every
trained token is computed again under the weights of the version it names: a token by half-updated weights agrees with
none.
"""

from __future__ import annotations

import argparse
import logging
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L

import lrl
from benchmarks import records
from benchmarks.chaos.proof import Witness
from benchmarks.chaos.proxy import Proxy
from benchmarks.chaos.sync_faults import INIT, ON_THE_WAY, PROBE, STAGE, UPDATE, BreakingSync, Planned, make_plan
from benchmarks.quickstart_run import RunSettings, make_data, make_module, server_settings
from lrl.generators.server import Server

GENERATORS = 2
CAPACITY = 64
SPARE_STEPS = 6
"""For generators that were taken out without the plan's saying so, and come back at a sync of their own."""
TOLERANCE = 0.02
"""Nats. A generator's decode kernel on the CPU and the trainer's forward pass differ by less."""
HEAD = "| " + " | ".join(["phase", *ON_THE_WAY]) + " |\n" + "|---" * (1 + len(ON_THE_WAY)) + "|"
HEAD_OF_OTHERS = "| fault | noticed by | after s | outcome |\n|---|---|---|---|"


class ProxiedServer(Server):
    """A server whose address is its proxy's."""

    proxy: Proxy | None = None

    @property
    def url(self) -> str:
        """Where the trainer finds it."""
        return super().url if self.proxy is None else self.proxy.url


class BehindProxies(lrl.AsyncSingleDevice):
    """The strategy with a proxy before each generator.

    Args:
        proxies: Filled when the servers are made: proxy by number of the generator.
        late_s: Seconds by which a proxy delays.
        **settings: Of `lrl.AsyncSingleDevice`.
    """

    def __init__(self, proxies: dict[int, Proxy], late_s: float, **settings: Any) -> None:
        super().__init__(**settings)
        self._proxies, self._late_s = proxies, late_s

    def make_servers(self, trainer: L.Trainer, placements: list[list[int]]) -> list[Server]:
        """See `GeneratorDevices.make_servers`."""
        servers: list[Server] = []
        for plain in super().make_servers(trainer, placements):
            server = ProxiedServer(
                plain.model, plain.settings, plain.backend, [], plain.log_path.parent, plain.number, self.run_id
            )
            server.proxy = self._proxies[plain.number] = Proxy(server.url, self._late_s)
            servers.append(server)
        return servers

    def teardown(self) -> None:
        """Stop the generators, then the proxies."""
        super().teardown()
        for proxy in self._proxies.values():
            proxy.close()


def run_settings(args: argparse.Namespace, plan: Sequence[Planned]) -> RunSettings:
    """Enough steps for one fault a sync, and one more for each generator that comes back."""
    steps = len(plan) + sum(fault.takes_out for fault in plan) + SPARE_STEPS
    return RunSettings(
        seed=args.seed, max_lag=2, lr=args.lr, schedule="constant", steps=steps, groups=args.groups, responses=8
    )


def measure(args: argparse.Namespace, plan: Sequence[Planned]) -> dict[str, Any]:
    """One run from its start to its record."""
    settings, proxies, witness = run_settings(args, plan), dict[int, Proxy](), Witness()
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
        callbacks=[witness, sync],
        max_steps=settings.steps,
        max_epochs=-1,
        logger=False,
        default_root_dir=args.folder,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    policy, data = make_module(settings, lrl.objectives.AIPO(rho=4.0)), make_data(settings)
    started = time.monotonic()
    trainer.fit(policy, data)
    seconds = time.monotonic() - started
    return {
        "seed": args.seed,
        "steps": settings.steps,
        "deadline_s": args.deadline,
        "heartbeat_s": args.heartbeat,
        "seconds": round(seconds, 1),
        "not_met": len(sync.left),
        "proof": witness.verify(policy.network, data.sampling.temperature).record(),
        "faults": [outcome.record() for outcome in sync.outcomes],
    }


def faults_of(record: dict[str, Any]) -> dict[tuple[str, str, bool], dict[str, Any]]:
    """The outcomes by phase, kind and whether it stayed."""
    return {(fault["phase"], fault["kind"], fault["stays"]): fault for fault in record["faults"]}


def cell(fault: dict[str, Any] | None) -> str:
    """An outcome in a table of phases and kinds."""
    if fault is None:
        return ""
    if fault["detected_by"] is None:
        return f"not noticed: {fault['outcome']}"
    return f"{fault['outcome']} ({fault['detected_by']}, {fault['detected_s']:.1f} s)"


def tables(record: dict[str, Any]) -> str:
    """What came of each fault, in Markdown."""
    found = faults_of(record)
    rows = [
        "| " + " | ".join([f"`{phase}`", *(cell(found.get((phase, kind, False))) for kind in ON_THE_WAY)]) + " |"
        for phase in [INIT, *UPDATE, "/resume", PROBE]
    ]
    others = [fault for fault in record["faults"] if fault["stays"] or fault["kind"] not in ON_THE_WAY]
    lines = [
        f"| `{fault['phase']}`, {fault['kind']}{', every time' if fault['stays'] else ''} | {fault['detected_by']} | "
        f"{fault['detected_s']} | {fault['outcome']} |"
        for fault in others
    ]
    return "\n".join([HEAD, *rows, "", HEAD_OF_OTHERS, *lines])


def verdict(record: dict[str, Any]) -> list[str]:
    """What is wrong with a run; empty if nothing is."""
    proof = record["proof"]
    unnoticed = [fault for fault in record["faults"] if fault["detected_by"] is None and not harmless(fault)]
    faults = [f"{fault['kind']} at {fault['phase']} was not noticed" for fault in unnoticed]
    faults += [f"{record['not_met']} faults of the plan were not met"] if record["not_met"] else []
    faults += [f"{proof['missing']} prompts were not trained, or twice"] if proof["missing"] else []
    off = max(proof["difference"], proof["carried_difference"])
    return faults + ([f"a token differs by {off:.3g} nats from every version it may be by"] if off > TOLERANCE else [])


def harmless(fault: dict[str, Any]) -> bool:
    """Whether there is nothing to notice: through shared memory the first handshake does nothing."""
    return (fault["phase"], fault["kind"]) == (INIT, "lie")


def summary(record: dict[str, Any]) -> str:
    """The proof in a sentence each."""
    proof = record["proof"]
    return (
        f"{len(record['faults'])} faults in {record['steps']} steps and {record['seconds']:.0f} s; {proof['groups']} "
        f"groups trained, {proof['missing']} missing, largest lag {proof['largest_lag']}. {proof['tokens']} tokens "
        f"computed again: largest difference {proof['difference']:.2g} nats; {proof['carried']} of them in responses "
        f"that were carried, {proof['carried_difference']:.2g} nats. Laid to the version before: "
        f"{proof['under_the_version_before']:.2g} nats."
    )


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chaos.sync", description="Break the sync.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--groups", type=int, default=8, help="problems a step (%(default)s)")
    parser.add_argument("--lr", type=float, default=1e-4, help="(%(default)s)")
    parser.add_argument("--deadline", type=float, default=5.0, help="seconds for a phase (%(default)s)")
    parser.add_argument("--heartbeat", type=float, default=5.0, help="seconds (%(default)s)")
    phases = [INIT, *UPDATE, "/resume", PROBE, STAGE]
    parser.add_argument("--phases", nargs="+", choices=phases, default=phases, help="only faults of these")
    parser.add_argument("--kinds", nargs="+", help="only faults of these kinds")
    parser.add_argument("--print", action="store_true", help="print the last recorded run; run nothing")
    records.add_places(parser, "chaos_sync", plot=False)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run, record and print; 1 if something was not noticed, lost or by no version."""
    words = list(sys.argv[1:] if argv is None else argv)
    args = make_parser().parse_args(words)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    if not args.print:
        plan = [f for f in make_plan() if f.phase in args.phases and (not args.kinds or f.kind in args.kinds)]
        command = shlex.join(["python", "-m", "benchmarks.chaos.sync", *words])
        records.append(args.out, measure(args, plan) | {"command": command})
    record = records.read(Path(args.out))[-1]
    print("\n".join([tables(record), "", summary(record), *verdict(record)]))
    return 1 if verdict(record) else 0


if __name__ == "__main__":
    raise SystemExit(main())
