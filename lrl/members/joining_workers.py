"""A member without weights that joins a run: workers of this machine, served over HTTP."""

import contextlib
from abc import abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar, Protocol

from lrl.errors import NotRunning, WorkersError
from lrl.members.client import RunClient
from lrl.members.join_session import JoinSession, LocalOverrides, Served, ask
from lrl.members.join_spec import JoinSpec
from lrl.system.endpoint import Endpoint, Location


class WorkerServer(Protocol):
    """Workers and their server."""

    def start(self) -> Location:
        """Starts the workers, tries them, and opens the server; returns where it is.

        Call it on a thread that outlives the workers: Linux ends a worker with the thread that
        started it.

        Raises:
            ValueError: They cannot work on this machine.
            RuntimeError: They died while they started.
            TimeoutError: None was ready in time.
        """

    def stop(self) -> None:
        """Ends the server and the workers, whatever they are doing. Idempotent."""


class JoiningWorkers(JoinSession):
    """See `JoinSession`; also raises NotRunning if the run takes no such member."""

    remedy: ClassVar[str]
    """What to do if they cannot work."""

    def __init__(
        self, run: str, client: RunClient, spec: JoinSpec, overrides: LocalOverrides
    ) -> None:
        super().__init__(run, client, spec, overrides)
        endpoint = spec.settings_here(overrides.endpoint, client.location.url).endpoint
        terms = ask(client, lambda: client.terms(self.kind))
        try:
            self.server = self.make_server(terms, endpoint)
        except (KeyError, TypeError, ValueError) as error:
            raise NotRunning(
                f"{run} is of another release of lrl ({error!r}): use the run's."
            ) from error

    @abstractmethod
    def make_server(self, terms: dict[str, Any], endpoint: Endpoint) -> WorkerServer:
        """Returns the workers and their server, not started; raises KeyError, TypeError or
        ValueError for terms that are none.

        Args:
            terms: What the workers must know, as JSON.
            endpoint: Where the server listens.
        """

    @contextlib.contextmanager
    def serve(self) -> Iterator[Served]:
        """See `JoinSession.serve`."""
        try:
            try:
                location = self.server.start()
            except (ValueError, RuntimeError, TimeoutError) as error:
                raise WorkersError(f"{error} {self.remedy}") from error
            self.waiting()
            self.say(f"answers at {location.url}; waits for the run")
            yield Served(location, lambda: None)
        finally:
            self.server.stop()
