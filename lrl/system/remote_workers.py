"""The workers of members, as rank 0 sees them: processes behind servers of other machines.

A member that is lost takes nothing with it: what it was asked fails at once, and whoever has asked
gives it to others. Its server is a `lrl.system.token_server.TokenServer`.
"""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from lrl.errors import BadAnswer, LrlError
from lrl.system.auth import bearer
from lrl.system.endpoint import Location

T = TypeVar("T")
CHECK_S = 10.0
"""Seconds for a connection to a member."""


@dataclass(frozen=True)
class MemberAddress:
    """A member with workers, and the way to it."""

    number: int
    """Its number among those of its kind."""
    node: str
    """The name of its machine."""
    workers: int
    """Processes that work there."""
    location: Location
    token: str
    """The run's."""


class RemoteWorkers(ABC):
    """The workers of one member.

    Args:
        address: Where they are.

    Raises:
        ValueError: Its certificate cannot be read.
    """

    kind: ClassVar[str]
    """See `lrl.members.registry.Kind`."""
    lost_error: ClassVar[type[LrlError]]
    """The error of what was asked of a lost member."""
    leave_s: ClassVar[float] = 0.0
    """Seconds that a member which leaves has for the end of its work."""

    def __init__(self, address: MemberAddress) -> None:
        self.number = address.number
        self.name = f"{self.kind} {address.number} on {address.node}"
        self.workers = max(1, address.workers)
        self.lost = ""
        """Why it gets no more work; empty if it does."""
        self.leaving_since: float | None = None
        """Since when it gets no new work and leaves, in monotonic seconds; None if it stays."""
        self._url = address.location.url
        self._trust = address.location.context()
        self._token = address.token
        self._requests: dict[asyncio.Task[Any], asyncio.AbstractEventLoop] = {}

    @property
    def title(self) -> str:
        """Its name as a sentence begins."""
        return self.name[:1].upper() + self.name[1:]

    @property
    def in_flight(self) -> int:
        """Requests without an answer."""
        return len(self._requests)

    @property
    def idle(self) -> bool:
        """Whether it has no work."""
        return not self.in_flight

    @abstractmethod
    async def check(self) -> None:
        """Raises OSError if it does not answer, or is none of this run's, and ConfigError if it
        answers and cannot work."""

    def lose(self, why: str) -> None:
        """Fails all that it was asked, and will be. May be called on any thread."""
        self.lost = self.lost or why
        for request, loop in list(self._requests.items()):
            loop.call_soon_threadsafe(request.cancel)

    async def answered(self, work: Coroutine[Any, Any, T]) -> T:
        """Returns the result of `work`, which asks the member.

        Raises:
            LrlError: A `lost_error`: the member is lost before the end of `work`, or by it, as it
                does not answer (OSError) or has sent a `BadAnswer`.
        """
        request = asyncio.create_task(work)
        self._requests[request] = asyncio.get_running_loop()
        try:
            self._raise_if_lost()
            return await request
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and not task.cancelling():  # then `lose` has cancelled the request
                self._raise_if_lost()
            raise
        except (OSError, BadAnswer) as error:
            self.lose(str(error))
            raise self.lost_error(self.lost) from error
        finally:
            request.cancel()
            del self._requests[request]

    def _raise_if_lost(self) -> None:
        if self.lost:
            raise self.lost_error(self.lost)

    async def request(
        self,
        method: str,
        route: str,
        deadline_s: float,
        data: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Any:
        """Returns the JSON of a response; raises OSError for none, or another status than 200."""
        import aiohttp  # not at the top: every reward worker imports this file, and none needs it

        timeout = aiohttp.ClientTimeout(total=deadline_s, sock_connect=CHECK_S)
        # A connection for each request: a server may close an idle one as a request goes out on it.
        connector = aiohttp.TCPConnector(ssl=self._trust or True)
        all_headers = {"Authorization": bearer(self._token), **(headers or {})}
        try:
            async with (
                aiohttp.ClientSession(connector=connector, timeout=timeout) as session,
                session.request(
                    method, self._url + route, data=data, headers=all_headers
                ) as response,
            ):
                if response.status != 200:
                    raise OSError(
                        f"it responded {response.status}: {(await response.text())[:200]}"
                    )
                return await response.json()
        except TimeoutError as error:
            raise OSError(f"no answer from it in {deadline_s:.0f} s") from error
        except (aiohttp.ClientError, ValueError) as error:
            raise OSError(repr(error)) from error


W = TypeVar("W", bound=RemoteWorkers)


class RemotePool(ABC, Generic[W]):
    """The members of a run that have workers of one kind. Each method may be called on any
    thread."""

    def __init__(self) -> None:
        self.replaced_by: Counter[int] = Counter()
        """Processes that were killed or died, by the number of their member, also of lost ones."""
        self.last_loss = ""
        """Name and reason of the member that was removed last; empty before."""
        self._members: dict[int, W] = {}
        self._lock = threading.Lock()

    @abstractmethod
    def terms(self) -> dict[str, Any]:
        """Returns what the workers must know, as JSON."""

    @abstractmethod
    def reach(self, address: MemberAddress) -> W:
        """Returns the workers of a member, which is not added; see `RemoteWorkers`."""

    @property
    def members(self) -> list[W]:
        """The members that were added and not removed."""
        with self._lock:
            return list(self._members.values())

    @property
    def ready(self) -> list[W]:
        """The members that get work."""
        return [each for each in self.members if not each.lost and each.leaving_since is None]

    def leave_refusal(self, member: W) -> str:
        """Returns the reason why a member must stay; empty if it need not."""
        return ""

    def add(self, member: W) -> None:
        """Adds a member, which gets work from now on."""
        with self._lock:
            self._members[member.number] = member

    def remove(self, number: int, why: str) -> bool:
        """Removes a member, whose work goes to others; returns whether it was there."""
        with self._lock:
            member = self._members.pop(number, None)
        if member is not None:
            self.last_loss = f"{member.name}: {why}"
            member.lose(why)
        return member is not None

    def close(self) -> None:
        """Removes all members."""
        for member in self.members:
            self.remove(member.number, "the run has ended")
