"""Breaks each phase of a sync in each way, once each, in one run of the quickstart's task with two
generators.

A proxy between the trainer and each generator breaks one request at a time. Afterwards every
trained token is computed again under the weights of the version it names: a token by half-updated
weights agrees with none. Responses that moved from one generator to another are checked apart. The
versions of their last chunk are a lower bound (`lrl.generators.client`), so a newer version may
have written a token there, up to the one that trained it. And a generator that says that it has
updated, and has not, writes under the version before until its proof fails.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, get_args
from unittest import mock

import lightning as L
import torch
from torch.nn.functional import log_softmax

import lrl
from benchmarks import arguments, records
from benchmarks.arguments import Row
from benchmarks.chaos.faults import GENERATORS
from benchmarks.chaos.proxy import Fault, Kind, Proxy
from benchmarks.quickstart_run import RunSettings, make_data, make_module, server_settings
from benchmarks.runs import quiet_trainer
from lrl.callbacks import WeightSync
from lrl.callbacks.base import run_of
from lrl.generators import fleet as fleet_module
from lrl.generators.generator import Generator
from lrl.generators.pool import GeneratorPool
from lrl.generators.server import Server
from lrl.routing.dispatch import Request
from lrl.run import Run
from lrl.types import Group, Rollout

INIT, RESUME, PROBE = "/init_weight_transfer_engine", "/resume", "probe"
UPDATE = ["/pause", "/start_weight_update", "/update_weights", "/finish_weight_update"]
TAKING_OUT: tuple[Kind, ...] = ("cut", "refused", "silent", "lie")
"""A resume or a probe that only comes late reaches a generator that is evicted already."""
UNHEARD: tuple[Kind, ...] = ("silent", "late")
"""A generator that does not answer a pause writes nothing."""
BATCH = 64
"""Responses in one forward pass of the proof."""
STAYS = 1_000_000
"""Number of requests: more than there are."""
CAPACITY = 64
SPARE_STEPS = 6
"""For generators that were evicted against the plan, and return at an extra sync."""
TOLERANCE = 0.02
"""Nats. A generator's decode kernel on the CPU and the trainer's forward pass differ by less."""
SAME = 1e-4
"""Nats between two versions that are told apart."""
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


# ---- the proof of every trained token


@dataclass(frozen=True)
class Proof:
    """The result of the check; differences in nats."""

    tokens: int
    """Trained tokens that were computed again."""
    difference: float
    """The largest under the version a token names, over responses that stayed on one generator."""
    carried: int
    """Tokens of responses that continued on another generator."""
    carried_difference: float
    """The largest among those, under the best version from the one before the named to the
    trainer's."""
    under_an_older_version: int
    """Tokens of those that only the version before the named one can have written."""
    under_the_version_before: float
    """The largest of the tokens that stayed, under the version before the one they name: what a
    generator with a missed sync would show."""
    largest_lag: int
    groups: int
    """Groups trained."""
    missing: int
    """Indices in the run's order of prompts, up to that number, that were not trained once."""


class TokenRecorder(L.Callback):
    """Keeps the weights of every version, every trained group, and the responses that moved to
    another generator.

    Put it before `WeightSync`, so that it sees a step's groups before a sync fails.
    """

    def __init__(self) -> None:
        self.weights: dict[int, dict[str, torch.Tensor]] = {}
        self.groups: list[tuple[int, Group]] = []
        self._carried: list[Rollout] = []

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        self._keep(trainer, pl_module)
        for pool in run_of(trainer).fleet.pools:
            self._listen(pool)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *args: Any) -> None:
        self._keep(trainer, pl_module)
        stream = run_of(trainer).step_stream
        self.groups += [(stream.step, group) for group in stream.groups]

    def _keep(self, trainer: L.Trainer, policy: Any) -> None:
        self.weights[trainer.global_step] = copy.deepcopy(policy.network.state_dict())

    def _listen(self, pool: GeneratorPool) -> None:
        """Wraps the pool's requests: a response that a generator leaves unfinished moves to another
        one."""
        write = pool._write

        async def watched(generator: Generator, request: Request, *more: Any, **how: Any) -> None:
            await write(generator, request, *more, **how)
            self._carried += request.unfinished

        pool._write = watched  # type: ignore[method-assign]

    def verify(self, network: torch.nn.Module, temperature: float) -> Proof:
        """Computes every trained token again; `network` is loaded with one version after the
        other."""
        network.eval()
        found = {
            version: self._under(network, version, temperature) for version in sorted(self.weights)
        }
        carried = {id(rollout) for rollout in self._carried}
        stayed, moved, before, lags = [0.0], [0.0], [0.0], []
        older = 0
        for step, rollout in self._rollouts():
            tokens = zip(rollout.logprobs, rollout.versions, strict=True)
            for place, (behaviour, named) in enumerate(tokens):
                lags.append(step - named)
                off = {
                    version: abs(found[version][id(rollout)][place] - behaviour)
                    for version in range(max(0, named - 1), step + 1)
                }
                if id(rollout) in carried:
                    best = min(off.values())
                    moved.append(best)
                    older += min(off[version] for version in off if version >= named) > best + SAME
                else:
                    stayed.append(off[named])
                    before.append(off[max(0, named - 1)])
        places = Counter(group.index for _, group in self.groups)
        return Proof(
            tokens=len(lags),
            difference=max(stayed),
            carried=len(moved) - 1,
            carried_difference=max(moved),
            under_an_older_version=older,
            under_the_version_before=max(before),
            largest_lag=max(lags),
            groups=len(self.groups),
            missing=sum(places[place] != 1 for place in {*places, *range(len(self.groups))}),
        )

    def _rollouts(self) -> list[tuple[int, Rollout]]:
        return [(step, rollout) for step, group in self.groups for rollout in group.rollouts]

    def _under(
        self, network: torch.nn.Module, version: int, temperature: float
    ) -> dict[int, list[float]]:
        """Returns the log-prob of each token in nats, by `id` of the rollout."""
        network.load_state_dict(self.weights[version])
        # Of one length: no padding, whatever the attention makes of it.
        by_length: dict[int, list[tuple[list[int], Rollout]]] = defaultdict(list)
        for step, group in self.groups:
            prompt = group.prompt.token_ids
            for rollout in group.rollouts:
                if rollout.versions and rollout.versions[0] - 1 <= version <= step:
                    by_length[len(prompt) + len(rollout.token_ids)].append((prompt, rollout))
        logprobs: dict[int, list[float]] = {}
        for responses in by_length.values():
            for start in range(0, len(responses), BATCH):
                logprobs |= recomputed(network, responses[start : start + BATCH], temperature)
        return logprobs


@torch.no_grad()
def recomputed(
    network: Any, responses: list[tuple[list[int], Rollout]], temperature: float
) -> dict[int, list[float]]:
    """Returns the log-prob of each token in nats, by `id` of the rollout; prompt and response have
    one total length."""
    ids = torch.tensor([prompt + rollout.token_ids for prompt, rollout in responses])
    logprobs = log_softmax(network(ids).logits[:, :-1].float() / temperature, -1)
    taken = logprobs.gather(2, ids[:, 1:, None])[:, :, 0]  # (responses, tokens - 1)
    pairs = zip(responses, taken.tolist(), strict=True)
    return {id(rollout): row[len(prompt) - 1 :] for (prompt, rollout), row in pairs}


# ---- the benchmark


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
    with mock.patch.object(fleet_module, "LONGEST_BACKOFF_S", fleet_module.FIRST_BACKOFF_S):
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
