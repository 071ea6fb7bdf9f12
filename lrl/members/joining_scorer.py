"""A scorer that joins a run: reward workers of this machine behind a server of their own."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from lrl.members.client import RunClient
from lrl.members.discovery import NotRunning
from lrl.members.join_session import Served, ask
from lrl.members.join_spec import JoinSpec
from lrl.members.member import Kind, Member
from lrl.rewards.job import ScoringTerms
from lrl.rewards.scorer_server import ScorerServer

REMEDY = (
    "A scorer imports the rewards' modules by itself: put them on its machine, installed or in the folder where `lrl "
    "join` starts."
)


class ScorerError(RuntimeError):
    """Workers that cannot score on this machine; the message has the remedy."""


class JoiningScorer:
    """See `lrl.members.join_session.Joining`.

    Args:
        run: The run, as its user gave it.
        client: The run.
        spec: Its requirements.
        workers: Processes that score.
        endpoint: The fields of `Endpoint` that were given for this machine.

    Raises:
        NotRunning: The run takes no scorers.
        ValueError: The run does not reach this machine at that address.
    """

    kind = Kind.SCORER

    def __init__(self, run: str, client: RunClient, spec: JoinSpec, workers: int, endpoint: dict[str, Any]) -> None:
        self.workers = workers
        self._endpoint = spec.settings_here(endpoint, client.location.url).endpoint
        self._token = client.token
        fields = ask(client, client.scoring)
        try:
            self._terms = ScoringTerms.from_json(fields)
        except (KeyError, TypeError, ValueError) as error:
            raise NotRunning(f"{run} is of another release of lrl ({error!r}): use the run's.") from error

    @contextlib.contextmanager
    def served(self, number: int, say: Callable[[str], None], waiting: Callable[[], None]) -> Iterator[Served]:
        """See `Joining.served`."""
        server = ScorerServer(self._terms, self.workers, self._endpoint, self._token)
        try:
            try:
                location = server.start()
            except (ValueError, RuntimeError, TimeoutError) as error:
                raise ScorerError(f"{error} {REMEDY}") from error
            waiting()
            say(f"answers at {location.url}; waits for the run")
            yield Served(location, lambda: None)
        finally:
            server.stop()

    def how(self, member: Member) -> str:
        """See `Joining.how`."""
        return f"with {self.workers} workers"
