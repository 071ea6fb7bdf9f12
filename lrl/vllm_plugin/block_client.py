"""Asks the trainer's ranks and other machines for what they have of a version
(`lrl.weights.parts`)."""

import http.client
import select
import threading
import time
from collections.abc import Callable, Sequence

from lrl.errors import BadTransfer, DamagedDelta, FetchFailed
from lrl.system.auth import bearer
from lrl.system.endpoint import Location, connect
from lrl.weights.parts import PARTS, FetchOrder

Content = bytes | bytearray

ATTEMPTS = 5
"""At one answer of the trainer."""
BACKOFF_S = 0.5
"""Seconds before a second attempt; each further one waits so much longer."""
STALL_S = 10.0
"""Seconds without a byte that end an attempt, and without a block that a machine is waited for."""
FAILURES = (OSError, http.client.HTTPException, BadTransfer, DamagedDelta)
"""Of one attempt."""


class BlockClient:
    """Asks for the blocks of one version, from several threads.

    Args:
        order: The version, and who has it.
        token: The run's.
        superseded: Whether the trainer has sent another order.
    """

    def __init__(self, order: FetchOrder, token: str, superseded: Callable[[], bool]) -> None:
        self._order = order
        self._superseded = superseded
        self._end = time.monotonic() + order.deadline_s
        self._authorization = {"Authorization": bearer(token)}
        self._connections = threading.local()

    def of_rank(self, rank: int, ask: Callable[[Location], Content | None]) -> Content:
        """Returns what `ask` gets from a rank of the trainer; raises FetchFailed after several
        attempts."""
        at, failures = self._order.ranks[rank], list[str]()
        whence = f" from rank {rank} at {at.url}"
        for attempt in range(ATTEMPTS):
            time.sleep(min(BACKOFF_S * attempt, max(0.0, self._end - time.monotonic())))
            try:
                if (found := ask(at)) is not None:
                    return found
            except FAILURES as error:
                failures.append(str(error) or type(error).__name__)
            self.raise_if_over(whence, failures)
        raise FetchFailed(
            f"{self._order.version} could not be fetched{whence}: {'; '.join(failures)}"
        )

    def raise_if_over(self, whence: str = "", failures: Sequence[str] = ()) -> None:
        """Raises FetchFailed if the deadline has passed or the trainer has sent another order."""
        over = ""
        if time.monotonic() > self._end:
            over = f"the deadline of {self._order.deadline_s:.0f} s has passed"
        elif self._superseded():
            over = "the trainer has sent another order"
        if over:
            raise FetchFailed(
                f"{self._order.version} could not be fetched{whence}: "
                f"{'; '.join([*failures, over])}"
            )

    def get(self, at: Location, what: str, waits: bool = False) -> bytes | None:
        """Returns what a rank or a machine has under a path, once; to the deadline if it `waits`.

        Returns:
            The content; None if it has to fetch it first.

        Raises:
            OSError, HTTPException, BadTransfer: It does not answer.
        """
        left_s = max(0.1, self._end - time.monotonic())
        timeout_s = left_s if waits else min(STALL_S, left_s)
        kept: dict[str, http.client.HTTPConnection] = vars(self._connections)
        connection = kept.pop(at.url, None)
        if connection is None or _has_ended(connection):
            connection = connect(at.url, at.context(), timeout_s)
        elif connection.sock is not None:
            connection.sock.settimeout(timeout_s)
        try:
            path = f"{PARTS}{self._order.version}/{what}"
            connection.request("GET", path, headers=self._authorization)
            answer = connection.getresponse()
            body = answer.read()
        except BaseException:
            connection.close()
            raise
        kept[at.url] = connection
        if answer.status == http.client.CONFLICT:
            return None
        if answer.status != http.client.OK:
            raise BadTransfer(f"it answered {answer.status}: {body[:200].decode(errors='replace')}")
        return body


def _has_ended(connection: http.client.HTTPConnection) -> bool:
    """Whether the other side has closed a connection, as servers do after some idle seconds."""
    if connection.sock is None:
        return True
    readable = select.poll()  # not select.select, which takes no descriptor above 1,023
    readable.register(connection.sock, select.POLLIN)
    return bool(readable.poll(0))
