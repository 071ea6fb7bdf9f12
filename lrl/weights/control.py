"""The control plane of a sync: vLLM's routes, called on all generators of a pool at once."""

import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any, TypeVar

import torch

from lrl.errors import CollectiveBroken, GeneratorError, GeneratorTimeout, RankLostError
from lrl.generators.generator import Generator, gather
from lrl.system.event_loop import LoopThread
from lrl.weights.communicator import ABORT_ROUTE

T = TypeVar("T")
INIT, UPDATE = "/init_weight_transfer_engine", "/update_weights"

LOOK_S = 0.1
"""Seconds between two looks at a collective transfer."""


class Phase:
    """A phase under way in several generators.

    Args:
        name: Of the phase, in errors.
        works: The call to each generator.
        loop: The event loop that carries the calls.
    """

    def __init__(
        self, name: str, works: dict[Generator, Coroutine[Any, Any, Any]], loop: LoopThread
    ) -> None:
        self.name = name
        self.asked = list(works)
        self.errors: dict[Generator, GeneratorError] = {}
        """The failures so far."""
        self.answered: set[Generator] = set()
        """Generators that have ended the phase, failed or not."""
        self._started = time.monotonic()
        self.ended: Future[Any] = loop.submit(gather([self._note(*each) for each in works.items()]))

    def why(self, generator: Generator) -> str:
        """Returns the failure of `generator` in words."""
        return (
            f"{self.name} failed after {time.monotonic() - self._started:.1f} s: "
            f"{self.errors[generator]}"
        )

    async def _note(self, generator: Generator, work: Coroutine[Any, Any, Any]) -> None:
        try:
            await work
        except GeneratorError as error:
            self.errors[generator] = error
            raise
        finally:
            self.answered.add(generator)


class Control:
    """Sends each phase of a sync to all generators at once, and leaves those that fail out of the
    next phase.

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
        interrupted: Callable[[], None] | None = None,
        collective: bool = False,
    ) -> None:
        self.loop = loop
        self.deadline_s = deadline_s
        self.silence_s = min(silence_s, deadline_s)
        self.interrupted = interrupted
        self.collective = collective
        self.version = 0
        self.taking_part: list[Generator] = []
        """Generators that have not failed so far, in their order."""
        self.failed: dict[Generator, str] = {}
        """Generators that have failed, with the reason."""
        self.opened: set[Generator] = set()
        """Generators in which an update may be open: it was started, and no finish was
        confirmed."""
        self.silent: set[Generator] = set()
        """Failed generators that let the deadline of a short call pass: their event loop stands
        still."""
        self.sound: set[Generator] = set()
        """Failed generators that are not to blame: another one broke the collective, or the trainer
        had no room."""

    def begin(self, generators: Sequence[Generator], version: int) -> None:
        """Directs the next calls to `generators`."""
        self.version = version
        self.taking_part = list(generators)
        self.failed = {}
        self.silent = set()
        self.sound = set()

    def each(
        self, phase: str, work: Callable[[Generator], Coroutine[Any, Any, Any]], short: bool = False
    ) -> None:
        """Runs one phase for all that take part, at once; the calls of a `short` one have
        `silence_s`."""
        under_way = self.start(phase, work)
        self.loop.wait_for(under_way.ended, self.deadline_s + 5.0, under_way.name, self.interrupted)
        self._settle(under_way, short)

    def start(
        self,
        phase: str,
        work: Callable[[Generator], Coroutine[Any, Any, Any]],
        needs_all: bool = False,
    ) -> Phase:
        """Starts one phase for all that take part, and does not wait for it.

        Raises:
            CollectiveBroken: It `needs_all`, and one has failed before.
        """
        self.failed |= {one: one.eviction for one in self.taking_part if one.eviction is not None}
        self.taking_part = [one for one in self.taking_part if one not in self.failed]
        if needs_all:
            self._need_all(phase)
        name = f"{phase} for weight version {self.version}"
        return Phase(
            name, {generator: work(generator) for generator in self.taking_part}, self.loop
        )

    def _settle(self, ended: Phase, short: bool) -> None:
        """Leaves those that failed a phase out of the next."""
        for generator, error in ended.errors.items():
            self.failed[generator] = ended.why(generator)
            if short and isinstance(error, GeneratorTimeout):
                self.silent.add(generator)
        self.taking_part = [generator for generator in ended.asked if generator not in self.failed]

    def fail(self, why: str) -> None:
        """Marks all generators that still take part as failed, and sound."""
        self.sound |= set(self.taking_part)
        self.drop(dict.fromkeys(self.taking_part, why))

    def drop(self, failed: Mapping[Generator, str]) -> None:
        """Marks generators as failed, with the reason; they take no part in what follows."""
        self.failed = {**failed, **self.failed}  # the first failure says most
        self.taking_part = [
            generator for generator in self.taking_part if generator not in self.failed
        ]

    def join(self, phase: Phase, own: Future[T], name: str, abort: Callable[[], None]) -> T:
        """Waits for both ends of a collective: `phase` in the generators and `own` in the trainer.

        At the first sign that they cannot meet, the trainer's end is aborted, then the others'. Who
        failed before, or does not answer afterwards, is to blame.

        Args:
            phase: The calls to the generators.
            own: The trainer's part.
            name: Of the communicator (`lrl.vllm_plugin.abort_route`).
            abort: Ends the trainer's part.

        Raises:
            CollectiveBroken: A generator failed or was evicted, the trainer's part failed, or
                `deadline_s` passed.
        """
        try:
            self._wait_for_both(phase, own)
        except Exception:
            self._blame(phase)
            abort()
            self.abort_transfer(name)
            self._wait_for_answers(phase)
            raise
        except BaseException:  # a signal: the end of the run ends the generators, too
            abort()
            raise
        # No errors: only whose eviction came at this moment is left out.
        self._settle(phase, short=False)
        return own.result()

    def _wait_for_both(self, phase: Phase, own: Future[Any]) -> None:
        end = time.monotonic() + self.deadline_s
        while True:
            lost = [
                one.name for one in phase.asked if one in phase.errors or one.eviction is not None
            ]
            if lost:
                raise CollectiveBroken(
                    f"{phase.name} broke off, because {' and '.join(lost)} failed."
                )
            if own.done():
                _raise_as_broken(own, phase.name)
            if own.done() and phase.ended.done():
                phase.ended.result()
                return
            if time.monotonic() > end:
                raise CollectiveBroken(f"{phase.name} did not end within {self.deadline_s:g} s.")
            if self.interrupted is not None:
                self.interrupted()
            wait([one for one in (own, phase.ended) if not one.done()], LOOK_S, FIRST_COMPLETED)

    def _blame(self, phase: Phase) -> None:
        """Leaves out of the next phase who has failed so far."""
        self.failed |= {one: phase.why(one) for one in list(phase.errors)}
        self.failed |= {one: one.eviction for one in phase.asked if one.eviction is not None}
        self.taking_part = [one for one in phase.asked if one not in self.failed]

    def _wait_for_answers(self, phase: Phase) -> None:
        """Waits for those who still take part to return from a phase that was aborted; blames who
        fails or does not."""
        end = time.monotonic() + self.silence_s
        while any(one not in phase.answered for one in self.taking_part) and time.monotonic() < end:
            if self.interrupted is not None:
                self.interrupted()
            wait([phase.ended], LOOK_S)
        phase.ended.cancel()  # the calls to those who were to blame before
        why = f"{phase.name} was aborted, and it did not return in {self.silence_s:g} s."
        self.failed |= {one: why for one in self.taking_part if one not in phase.answered}
        self._blame(phase)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Prepares the engines."""
        self._post(INIT, self._init_body(init_info))

    def start_init(self, init_info: dict[str, Any]) -> Phase:
        """Like `init_weight_transfer_engine`, without waiting: the trainer has to take part."""
        return self.start(INIT, self._slow_post(INIT, self._init_body(init_info)), needs_all=True)

    def start_weight_update(self) -> None:
        """Opens the update."""
        self._need_all("/start_weight_update")
        self.opened |= set(self.taking_part)
        self._post("/start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        """Makes the workers load the weights that `update_info` describes."""
        self.update_weights_of(lambda generator: update_info)

    def update_weights_of(self, update_info: Callable[[Generator], Any]) -> None:
        """Makes the workers of each generator load the weights that `update_info` describes for
        it."""
        self._post(UPDATE, lambda generator: {"update_info": update_info(generator)})

    def start_update(self, update_info: Any) -> Phase:
        """Like `update_weights`, without waiting: the trainer has to take part."""
        body = {"update_info": update_info}
        return self.start(UPDATE, self._slow_post(UPDATE, lambda generator: body), needs_all=True)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Closes the update: from then on tokens carry the new version."""
        body = {"weight_version": weight_version or str(self.version)}
        self._post("/finish_weight_update", lambda generator: body)
        self.opened -= set(self.taking_part)

    def close_update(self) -> None:
        """Closes an update that a failed attempt may have left open: vLLM refuses a second start
        until then.

        If the start never arrived, the engine answers with an error, which is ignored. The next
        update overwrites whatever this one loaded, and no generator is ever confirmed under the
        version `abandoned`.
        """
        route, body = "/finish_weight_update", {"weight_version": "abandoned"}
        open_at = [generator for generator in self.taking_part if generator in self.opened]
        if not open_at:
            return
        works = [
            generator.client.post(route, body, deadline_s=self.silence_s) for generator in open_at
        ]
        self.loop.wait(
            gather(works), self.silence_s + 5.0, "closing an update that failed", self.interrupted
        )
        self.opened -= set(open_at)

    def release_engines(self) -> None:
        """Makes every worker leave its communicator, and so proves that every worker answers.

        Raises:
            CollectiveBroken: One does not.
        """
        route = "/shutdown_weight_transfer_engine"
        self.close_update()  # vLLM refuses while one is open
        self.each(
            route,
            lambda generator: generator.client.post(route, deadline_s=self.silence_s),
            short=True,
        )
        self._need_all(route)

    def abort_transfer(self, name: str) -> None:
        """Makes every worker return from the collective of the communicator `name`."""
        route = f"{ABORT_ROUTE}{name}"
        self.each(
            route,
            lambda generator: generator.client.post(route, deadline_s=self.silence_s),
            short=True,
        )

    def _init_body(self, init_info: dict[str, Any]) -> Callable[[Generator], dict[str, Any]]:
        """Returns the body for each generator; in a communicator every worker of each needs its own
        rank."""

        def body(generator: Generator) -> dict[str, Any]:
            info = dict(init_info)
            if "rank_offset" in info:
                before = self.taking_part[: self.taking_part.index(generator)]
                info["rank_offset"] += sum(
                    one.server.settings.tensor_parallel_size for one in before
                )
            return {"init_info": info}

        return body

    def _slow_post(
        self, route: str, body: Callable[[Generator], dict[str, Any]]
    ) -> Callable[[Generator], Coroutine[Any, Any, Any]]:
        """Returns calls that outlast `join`, so that an abort comes first and who is well can
        answer it."""
        deadline_s = 2 * self.deadline_s + self.silence_s
        return lambda generator: generator.client.post(
            route, body(generator), deadline_s=deadline_s
        )

    def _post(
        self,
        route: str,
        body: Callable[[Generator], dict[str, Any] | None] = lambda generator: None,
    ) -> None:
        self.each(
            route,
            lambda generator: generator.client.post(
                route, body(generator), deadline_s=self.deadline_s
            ),
        )
        self._need_all(route)

    def _need_all(self, route: str) -> None:
        """Raises CollectiveBroken if a generator has failed and the transfer needs them all."""
        if self.failed and self.collective:
            raise CollectiveBroken(
                f"{route} failed for another generator, and all take part in one transfer."
            )


def _raise_as_broken(own: Future[Any], what: str) -> None:
    """Raises the error of the trainer's part, if it has one; NCCL's own as CollectiveBroken."""
    error = own.exception()
    if isinstance(error, RuntimeError) and not isinstance(
        error, torch.OutOfMemoryError | RankLostError
    ):
        raise CollectiveBroken(f"{what} broke off in the trainer: {error}") from error
    if error is not None:
        raise error
