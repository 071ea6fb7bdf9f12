"""The calls of a sync to all generators of a pool at once, and the failures of each."""

import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lrl.errors import CollectiveBroken, GeneratorError, GeneratorTimeout
from lrl.generators.generator import Generator, KeysAndValues, gather
from lrl.system.event_loop import LoopThread

log = logging.getLogger(__name__)

Call = Callable[[Generator], Coroutine[Any, Any, Any]]
Body = Callable[[Generator], Any]
"""What is posted to one generator."""
Failures = dict[Generator, str]
"""Failed generators, with the reason."""

INIT = "/init_weight_transfer_engine"
START = "/start_weight_update"
UPDATE = "/update_weights"
FINISH = "/finish_weight_update"

MARGIN_S = 5.0
"""Seconds beyond the deadline of its calls, after which a phase is given up."""


@dataclass
class PoolCalls:
    """Sends each phase of a sync to all participants at once, and excludes failed ones from the
    next."""

    loop: LoopThread
    deadline_s: float
    """Seconds for each phase."""
    silence_s: float
    """Seconds for a call that takes milliseconds when nothing is wrong."""
    interrupted: Callable[[], None] = lambda: None
    """Called while waiting; raises to end the wait."""
    collective: bool = False
    """Whether the transfer needs every generator: its calls then raise CollectiveBroken if one has
    failed."""
    version: int = 0
    generators: Sequence[Generator] = ()
    failed: Failures = field(default_factory=dict)
    """Generators that have failed since `begin`."""
    hopeless: set[Generator] = field(default_factory=set)
    """Generators that another attempt cannot help, if they fail."""

    # ---- who takes part

    @property
    def participants(self) -> list[Generator]:
        return [one for one in self.generators if one not in self.failed]

    def begin(self, generators: Sequence[Generator]) -> None:
        """Directs the next calls to these generators, and forgets earlier failures."""
        self.generators = generators
        self.failed = {}
        self.hopeless = set()

    def exclude(self, failed: Mapping[Generator, str], hopeless: bool = False) -> None:
        if hopeless:
            self.hopeless |= failed.keys()
        self.failed = {**failed, **self.failed}  # the first failure says most

    def exclude_evicted(self) -> None:
        evicted = {one: one.eviction for one in self.participants if one.eviction is not None}
        self.exclude(evicted, hopeless=True)

    def fail_all(self, why: str) -> None:
        self.exclude(dict.fromkeys(self.participants, why))

    def log_failures(self, attempt: int, failed: Failures) -> None:
        if failed:
            reasons = "; ".join(failed.values())
            log.warning("Sync to version %d, attempt %d: %s", self.version, attempt, reasons)

    # ---- one call to all

    def each(self, phase: str, call: Call, short: bool = False) -> None:
        """Runs one phase in all participants. In a `short` one each call has `silence_s`, and who
        lets it pass is hopeless: its event loop stands still. So is who breaks a collective, which
        its server does not leave."""
        self.exclude(self.try_each(phase, call, short), hopeless=self.collective)

    def try_each(
        self,
        phase: str,
        call: Call,
        short: bool = False,
        failed: Failures | None = None,
        interrupted: Callable[[], None] | None = None,
    ) -> Failures:
        """Runs a phase like `each`, but keeps failed generators in the next one; returns them, and
        adds each to `failed` as it fails."""
        self.exclude_evicted()
        failed = Failures() if failed is None else failed
        name = f"{phase} for weight version {self.version}"

        async def one_call(generator: Generator) -> None:
            started = time.monotonic()
            try:
                await call(generator)
            except GeneratorError as error:
                seconds = time.monotonic() - started
                failed[generator] = f"{name} failed after {seconds:.1f} s: {error}"
                if short and isinstance(error, GeneratorTimeout):
                    self.hopeless.add(generator)

        work = gather([one_call(generator) for generator in self.participants])
        longest_s = 2 * self.silence_s if short else self.deadline_s
        self.loop.wait(work, longest_s + MARGIN_S, name, interrupted or self.interrupted)
        return failed

    def post(self, route: str, body: Body = lambda generator: None) -> None:
        self.each(route, lambda one: one.client.post(route, body(one), deadline_s=self.deadline_s))
        self.need_all(route)

    def need_all(self, route: str) -> None:
        if self.failed and self.collective:
            raise CollectiveBroken(
                f"{route} failed for another generator, and all take part in one transfer."
            )

    # ---- pause and resume

    def pause(self, keys_and_values: KeysAndValues) -> int:
        """Pauses all, and reads that back; returns the tokens that they will read again."""
        tokens: list[int] = []

        async def pause(generator: Generator) -> None:
            tokens.append(await generator.pause(keys_and_values, self.silence_s))
            await generator.confirm("/is_paused", {"is_paused": True}, self.silence_s)

        self.each("/pause", pause, short=True)
        return sum(tokens)

    def resume(self) -> float:
        """Resumes all, and reads that back; returns when the last one did, on `time.monotonic`."""
        times = [time.monotonic()]

        async def resume(generator: Generator) -> None:
            await generator.resume(self.version, self.silence_s)
            times.append(time.monotonic())
            await generator.confirm("/is_paused", {"is_paused": False}, self.silence_s)

        self.exclude(self.try_each("/resume", resume, short=True))
        return times[-1]

    # ---- an update, by vLLM's routes

    def init(self, info: Any) -> None:
        self.post(INIT, lambda generator: {"init_info": info})

    def start_update(self) -> None:
        self.need_all(START)
        self.post(START)

    def update(self, info: Body) -> None:
        """Makes the workers of each generator load the weights that `info` describes for it."""
        self.post(UPDATE, lambda generator: {"update_info": info(generator)})

    def finish_update(self) -> None:
        """From then on tokens carry the new version."""
        self.post(FINISH, lambda generator: {"weight_version": str(self.version)})

    def confirm_version(self) -> None:
        route, held = "/weight_info", {"weight_version": str(self.version)}
        self.each(route, lambda one: one.confirm(route, held, self.silence_s), short=True)

    def close_update(self) -> None:
        """Closes an update that a failed attempt may have left open: vLLM refuses a second start
        until then. An engine without one answers with an error, which is ignored; the next update
        overwrites whatever this one loaded."""
        body = {"weight_version": "abandoned"}
        self.try_each(
            FINISH, lambda one: one.client.post(FINISH, body, deadline_s=self.silence_s), short=True
        )
