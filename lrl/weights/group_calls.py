"""vLLM's routes, called on all generators of a pool at once, and the failures of each."""

import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
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


class Phase:
    """A phase under way in several generators.

    Args:
        name: Of the phase, in errors.
        calls: The call to each generator.
        loop: The event loop that carries the calls.
    """

    def __init__(
        self, name: str, calls: dict[Generator, Coroutine[Any, Any, Any]], loop: LoopThread
    ) -> None:
        self.name = name
        self.generators = list(calls)
        self.errors: dict[Generator, GeneratorError] = {}
        """The failures so far."""
        self.answered: set[Generator] = set()
        """Generators that have ended the phase, failed or not."""
        self._started = time.monotonic()
        self.ended: Future[Any] = loop.submit(gather([self._note(*each) for each in calls.items()]))

    def why(self, generator: Generator) -> str:
        """Returns the failure of `generator` in words."""
        seconds = time.monotonic() - self._started
        return f"{self.name} failed after {seconds:.1f} s: {self.errors[generator]}"

    async def _note(self, generator: Generator, call: Coroutine[Any, Any, Any]) -> None:
        try:
            await call
        except GeneratorError as error:
            self.errors[generator] = error
            raise
        finally:
            self.answered.add(generator)


class GeneratorGroupCalls:
    """Sends each phase of a sync to all participants at once, and excludes failed ones from the
    next.

    It has the methods of vLLM's `VLLMWeightSyncClient`, so vLLM's own trainer engines can drive it.
    They keep a reference to it and pass no version: `begin` sets the version before each sync. The
    four calls of that client raise CollectiveBroken if one generator fails and the transfer needs
    them all.

    Args:
        loop: The event loop that carries the calls.
        deadline_s: Seconds for each phase.
        silence_s: Seconds for a call that takes milliseconds when nothing is wrong; at most
            `deadline_s`.
        interrupted: Called while waiting; it raises to end the wait.
        collective: Whether the transfer needs every generator, so that one failure fails all.
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
        self.update_open: set[Generator] = set()
        """Generators in which an update may be open: it was started, and no finish was
        confirmed."""
        self.silent: set[Generator] = set()
        """Failed generators that let the deadline of a short call pass: their event loop stands
        still."""
        self.not_at_fault: set[Generator] = set()
        """Failed generators that are not at fault: another one broke the collective, or the trainer
        had no room."""
        self.resumed_s = 0.0
        """Time of the last resume, on `time.monotonic`."""

    # ---- who takes part

    def begin(self, generators: Sequence[Generator], version: int) -> None:
        """Directs the next calls to `generators`, and forgets earlier failures."""
        self.version = version
        self.participants = list(generators)
        self.failed = {}
        self.silent = set()
        self.not_at_fault = set()

    def include(self, generators: Sequence[Generator]) -> None:
        """Directs the next calls to the `generators` that have not failed since `begin`."""
        self.participants = [one for one in generators if one not in self.failed]

    def exclude(self, failed: Mapping[Generator, str]) -> None:
        """Excludes generators from the following calls, as failed."""
        self.failed = {**failed, **self.failed}  # the first failure says most
        self.include(self.participants)

    def fail_all(self, why: str) -> None:
        """Excludes all participants as failed, without a fault of theirs."""
        self.not_at_fault |= set(self.participants)
        self.exclude(dict.fromkeys(self.participants, why))

    @property
    def hopeless(self) -> Failures:
        """Failed generators that another attempt cannot help: those that broke a collective, and
        else the silent ones."""
        found = self.failed.keys() - self.not_at_fault if self.collective else self.silent
        return {one: why for one, why in self.failed.items() if one in found}

    def log_failures(self, attempt: int, failed: Failures) -> None:
        """Logs the failures of an attempt, if there are any."""
        if failed:
            reasons = "; ".join(failed.values())
            log.warning("Sync to version %d, attempt %d: %s", self.version, attempt, reasons)

    # ---- phases

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

    def each(self, phase: str, call: Call, short: bool = False) -> None:
        """Runs one phase in all participants at once; the calls of a `short` one have
        `silence_s`."""
        self.exclude_failed(self._run(phase, call), short)

    def try_each(self, phase: str, call: Call) -> Failures:
        """Calls like `each`, but keeps failed generators in the next phase; returns their
        failures."""
        ended = self._run(phase, call)
        failed = {one: ended.why(one) for one in ended.errors}
        self.exclude({one: why for one, why in failed.items() if one.eviction is not None})
        return {one: why for one, why in failed.items() if one not in self.failed}

    def _run(self, phase: str, call: Call) -> Phase:
        found = self._start(phase, call)
        self.loop.wait_for(found.ended, self.deadline_s + MARGIN_S, found.name, self.interrupted)
        return found

    def _start(self, phase: str, call: Call) -> Phase:
        """Starts one phase in all participants, and does not wait for it."""
        self.exclude_evicted()
        calls = {generator: call(generator) for generator in self.participants}
        return Phase(f"{phase} for weight version {self.version}", calls, self.loop)

    def exclude_evicted(self) -> None:
        """Excludes the generators that were evicted."""
        evicted = {one: one.eviction for one in self.participants if one.eviction is not None}
        self.exclude(evicted)

    def exclude_failed(self, phase: Phase, short: bool = False) -> None:
        """Excludes the generators that have failed so far in `phase`."""
        errors = dict(phase.errors)  # another thread adds to it
        if short:
            silent = {one for one, error in errors.items() if isinstance(error, GeneratorTimeout)}
            self.silent |= silent
        self.exclude({one: phase.why(one) for one in errors})

    # ---- vLLM's routes

    def init_weight_transfer_engine(self, init_info: Any) -> None:
        """Prepares the engines."""
        self._post(INIT, lambda generator: {"init_info": init_info})

    def start_init(self, init_infos: Mapping[Generator, Any]) -> Phase:
        """Prepares each engine by an `init_info` of its own, without waiting: the trainer has to
        take part.

        Raises:
            CollectiveBroken: One of them has failed before.
        """
        return self._start_slow(INIT, lambda generator: {"init_info": init_infos[generator]})

    def start_weight_update(self) -> None:
        """Opens the update."""
        self._need_all(START)
        self.update_open |= set(self.participants)
        self._post(START)

    def update_weights(self, update_info: Any) -> None:
        """Makes the workers load the weights that `update_info` describes."""
        self.update_weights_of(lambda generator: update_info)

    def update_weights_of(self, update_info: Body) -> None:
        """Makes the workers of each generator load the weights that `update_info` describes for
        it."""
        self._post(UPDATE, lambda generator: {"update_info": update_info(generator)})

    def start_update(self, update_info: Any) -> Phase:
        """Like `update_weights`, without waiting: the trainer has to take part.

        Raises:
            CollectiveBroken: A generator has failed before.
        """
        return self._start_slow(UPDATE, lambda generator: {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Closes the update: from then on tokens carry the new version."""
        body = {"weight_version": weight_version or str(self.version)}
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
        post = self.post_to(FINISH, self.silence_s, lambda one: {"weight_version": "abandoned"})
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
        self.each(RELEASE, self.post_to(RELEASE, self.silence_s), short=True)
        self._need_all(RELEASE)

    def _post(self, route: str, body: Body = lambda generator: None) -> None:
        self.each(route, self.post_to(route, self.deadline_s, body))
        self._need_all(route)

    def _start_slow(self, route: str, body: Body) -> Phase:
        self.exclude_evicted()
        self._need_all(route)
        # Longer than the wait for both ends, so that a healthy generator can answer an abort.
        deadline_s = 2 * self.deadline_s + self.silence_s
        return self._start(route, self.post_to(route, deadline_s, body))

    @staticmethod
    def post_to(route: str, deadline_s: float, body: Body = lambda generator: None) -> Call:
        """Returns the call that posts to a route."""
        return lambda one: one.client.post(route, body(one), deadline_s=deadline_s)

    def _need_all(self, route: str) -> None:
        """Raises CollectiveBroken if a generator has failed and the transfer needs them all."""
        if self.failed and self.collective:
            raise CollectiveBroken(
                f"{route} failed for another generator, and all take part in one transfer."
            )
