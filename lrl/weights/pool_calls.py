"""The calls of a sync to all generators of a pool at once, and the failures of each."""

import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from lrl.errors import CollectiveBroken, GeneratorError, GeneratorTimeout
from lrl.generators.generator import Generator, KeysAndValues, gather
from lrl.system.event_loop import LoopThread

log = logging.getLogger(__name__)

Call = Callable[[Generator], Coroutine[Any, Any, Any]]
"""The call of one phase to one generator."""
Body = Callable[[Generator], Any]
"""What is posted to one generator."""
Failures = dict[Generator, str]
"""Failed generators, with the reason."""

INIT = "/init_weight_transfer_engine"
START = "/start_weight_update"
UPDATE = "/update_weights"
FINISH = "/finish_weight_update"
RELEASE = "/shutdown_weight_transfer_engine"

RESUME_ATTEMPTS = 3
"""Attempts at a resume; vLLM accepts it any number of times."""
MARGIN_S = 5.0
"""Seconds beyond the deadline of its calls, after which a phase is given up."""


class PoolCalls:
    """Sends each phase of a sync to all participants at once, and excludes failed ones from the
    next.

    Args:
        loop: The event loop that carries the calls.
        deadline_s: Seconds for each phase.
        silence_s: Seconds for a call that takes milliseconds when nothing is wrong; at most
            `deadline_s`.
        interrupted: Called while waiting; it raises to end the wait.
        collective: Whether the transfer needs every generator: the calls that make and use a
            transfer then raise CollectiveBroken if one has failed.
    """

    def __init__(
        self,
        loop: LoopThread,
        deadline_s: float,
        silence_s: float,
        interrupted: Callable[[], None] = lambda: None,
        collective: bool = False,
    ) -> None:
        self.loop = loop
        self.deadline_s = deadline_s
        self.silence_s = min(silence_s, deadline_s)
        self.interrupted = interrupted
        self.collective = collective
        self.version = 0
        self.participants: list[Generator] = []
        """Generators that have not failed so far, in their order."""
        self.failed: Failures = {}
        """Generators that have failed since `begin`."""
        self.silent: set[Generator] = set()
        """Failed generators that let the deadline of a short call pass: their event loop stands
        still."""
        self.blameless: set[Generator] = set()
        """Failed generators that are not at fault: another one broke the collective, or the trainer
        had no room."""
        self.update_open: set[Generator] = set()
        """Generators in which an update may be open: it was started, and no finish was
        confirmed."""
        self.resumed_s = 0.0
        """Time of the last resume, on `time.monotonic`."""

    # ---- who takes part

    def begin(self, generators: Sequence[Generator], version: int) -> None:
        """Directs the next calls to `generators`, and forgets earlier failures."""
        self.version = version
        self.participants = list(generators)
        self.failed = {}
        self.silent = set()
        self.blameless = set()

    def include(self, generators: Sequence[Generator]) -> None:
        """Directs the next calls to the `generators` that have not failed since `begin`."""
        self.participants = [one for one in generators if one not in self.failed]

    def exclude(self, failed: Mapping[Generator, str]) -> None:
        """Excludes generators from the following calls, as failed."""
        self.failed = {**failed, **self.failed}  # the first failure says most
        self.include(self.participants)

    def exclude_evicted(self) -> None:
        """Excludes the generators that were evicted."""
        evicted = {one: one.eviction for one in self.participants if one.eviction is not None}
        self.exclude(evicted)

    def fail_all(self, why: str) -> None:
        """Excludes all participants as failed, without a fault of theirs."""
        self.blameless |= set(self.participants)
        self.exclude(dict.fromkeys(self.participants, why))

    @property
    def hopeless(self) -> Failures:
        """Failed generators that another attempt cannot help: those that broke a collective, and
        else the silent ones."""
        found = self.failed.keys() - self.blameless if self.collective else self.silent
        return {one: why for one, why in self.failed.items() if one in found}

    def log_failures(self, attempt: int, failed: Failures) -> None:
        """Logs the failures of an attempt, if there are any."""
        if failed:
            reasons = "; ".join(failed.values())
            log.warning("Sync to version %d, attempt %d: %s", self.version, attempt, reasons)

    # ---- phases

    def each(self, phase: str, call: Call, short: bool = False) -> None:
        """Runs one phase in all participants; the calls of a `short` one have `silence_s`."""
        silent = set[Generator]()
        self.exclude(self._run(phase, call, silent))
        if short:
            self.silent |= silent

    def try_each(self, phase: str, call: Call) -> Failures:
        """Calls like `each`, but keeps failed generators in the next phase; returns their
        failures."""
        failed = self._run(phase, call, set())
        self.exclude({one: why for one, why in failed.items() if one.eviction is not None})
        return {one: why for one, why in failed.items() if one not in self.failed}

    def meet(self, route: str, body: Body, look: Callable[[], None]) -> None:
        """Posts to all participants, whose answers wait for each other and for the trainer.

        At the first failure none of them can be answered any more: all that have not been are at
        fault.

        Args:
            route: The route.
            body: What is posted to each.
            look: Called repeatedly; raises if the trainer's part has failed.

        Raises:
            CollectiveBroken: A generator has failed, or was evicted.
        """
        self.exclude_evicted()
        self._need_all(route)
        answered = set[Generator]()
        failed = Failures()
        name = self._name(route)

        async def post(generator: Generator) -> None:
            await self._post_to(route, self.deadline_s, body)(generator)
            answered.add(generator)

        def watch() -> None:
            lost = [
                one.name for one in self.participants if one in failed or one.eviction is not None
            ]
            if lost:
                raise CollectiveBroken(f"{name} broke off, because {' and '.join(lost)} failed.")
            look()
            self.interrupted()

        work = gather([self._noted(one, name, post(one), failed) for one in self.participants])
        try:
            self.loop.wait(work, self.deadline_s + MARGIN_S, name, watch)
            watch()
        except Exception:
            self.exclude_evicted()
            self.exclude(dict(failed))
            why = f"{name} broke off, and nothing ends it in a generator."
            self.exclude({one: why for one in self.participants if one not in answered})
            raise

    def _run(self, phase: str, call: Call, silent: set[Generator]) -> Failures:
        """Runs one phase in all participants; returns the failures, and adds to `silent` whose call
        had no answer in time."""
        self.exclude_evicted()
        failed, name = Failures(), self._name(phase)

        async def noted(generator: Generator) -> None:
            try:
                await self._noted(generator, name, call(generator), failed)
            except GeneratorTimeout:
                silent.add(generator)

        work = gather([noted(one) for one in self.participants])
        self.loop.wait(work, self.deadline_s + MARGIN_S, name, self.interrupted)
        return failed

    @staticmethod
    async def _noted(
        generator: Generator, name: str, call: Coroutine[Any, Any, Any], failed: Failures
    ) -> None:
        started = time.monotonic()
        try:
            await call
        except GeneratorError as error:
            seconds = time.monotonic() - started
            failed[generator] = f"{name} failed after {seconds:.1f} s: {error}"
            raise

    def _name(self, phase: str) -> str:
        return f"{phase} for weight version {self.version}"

    # ---- pause and resume

    def pause(self, keys_and_values: KeysAndValues) -> int:
        """Pauses all participants, and reads back that they are paused.

        Returns:
            Tokens that they will read again (`Generator.pause`).
        """
        tokens: list[int] = []

        async def pause(generator: Generator) -> None:
            tokens.append(await generator.pause(keys_and_values, self.silence_s))

        self.each("/pause", pause, short=True)
        self._confirm("/is_paused", {"is_paused": True})
        return sum(tokens)

    def confirm_version(self) -> None:
        """Reads back that all participants hold the version."""
        self._confirm("/weight_info", {"weight_version": str(self.version)})

    def resume(self) -> Failures:
        """Resumes all participants; one that answers without effect is called again.

        Returns:
            Those that failed for good; the participants are those that write again.
        """
        version, todo = self.version, self.participants
        resumed, failed = list[Generator](), Failures()

        def resume(generator: Generator) -> Coroutine[Any, Any, None]:
            return generator.resume(version, self.silence_s)

        for attempt in range(1, RESUME_ATTEMPTS + 1):
            self.begin(todo, version)
            self.each("/resume", resume, short=True)
            if attempt == 1:
                self.resumed_s = time.monotonic()
            self._confirm("/is_paused", {"is_paused": False})
            resumed += self.participants
            failed = self.failed | failed  # the first failure says most
            todo = [one for one in self.failed if one.eviction is None and one not in self.silent]
            if not todo:
                break
            self.log_failures(attempt, {one: self.failed[one] for one in todo})
        self.participants = resumed
        return {one: why for one, why in failed.items() if one not in resumed}

    def _confirm(self, route: str, expected: dict[str, Any]) -> None:
        def confirm(generator: Generator) -> Coroutine[Any, Any, None]:
            return generator.confirm(route, expected, self.silence_s)

        self.each(route, confirm, short=True)

    # ---- vLLM's routes

    def init(self, info: Any) -> None:
        """Prepares the engines."""
        self._post(INIT, lambda generator: {"init_info": info})

    def start_update(self) -> None:
        """Opens the update."""
        self._need_all(START)
        self.update_open |= set(self.participants)
        self._post(START)

    def update(self, info: Body) -> None:
        """Makes the workers of each generator load the weights that `info` describes for it."""
        self._post(UPDATE, lambda generator: {"update_info": info(generator)})

    def finish_update(self) -> None:
        """Closes the update: from then on tokens carry the new version."""
        body = {"weight_version": str(self.version)}
        self._post(FINISH, lambda generator: body)
        self.update_open -= set(self.participants)

    def close_update(self) -> None:
        """Closes an update that a failed attempt may have left open: vLLM refuses a second start
        until then.

        If the start never arrived, the engine answers with an error, which is ignored. The next
        update overwrites whatever this one loaded, and no generator is ever confirmed under the
        version `abandoned`.
        """
        still_open = [one for one in self.participants if one in self.update_open]
        if not still_open:
            return
        post = self._post_to(FINISH, self.silence_s, lambda one: {"weight_version": "abandoned"})
        self.loop.wait(
            gather([post(generator) for generator in still_open]),
            self.silence_s + MARGIN_S,
            "closing an update that failed",
            self.interrupted,
        )
        self.update_open -= set(still_open)

    def release_engines(self) -> None:
        """Makes every worker leave its communicator, and so proves that every worker answers.

        Raises:
            CollectiveBroken: One does not.
        """
        self.close_update()  # vLLM refuses while one is open
        self.each(RELEASE, self._post_to(RELEASE, self.silence_s), short=True)
        self._need_all(RELEASE)

    def _post(self, route: str, body: Body = lambda generator: None) -> None:
        self.each(route, self._post_to(route, self.deadline_s, body))
        self._need_all(route)

    @staticmethod
    def _post_to(route: str, deadline_s: float, body: Body = lambda generator: None) -> Call:
        return lambda one: one.client.post(route, body(one), deadline_s=deadline_s)

    def _need_all(self, route: str) -> None:
        """Raises CollectiveBroken if a generator has failed and the transfer needs them all."""
        if self.failed and self.collective:
            raise CollectiveBroken(
                f"{route} failed for another generator, and all take part in one transfer."
            )
