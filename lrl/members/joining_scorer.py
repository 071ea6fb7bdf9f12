"""A scorer that joins a run: reward workers of this machine, served over HTTP."""

import contextlib
from collections.abc import Iterator

from lrl.errors import NotRunning, ScorerError
from lrl.members.client import RunClient
from lrl.members.join_session import JoinSession, LocalOverrides, Served, ask
from lrl.members.join_spec import JoinSpec
from lrl.members.member import Kind
from lrl.rewards.job import ScoringTerms
from lrl.rewards.scorer_server import ScorerServer

REMEDY = (
    "A scorer imports the rewards' modules by itself: put them on its machine, installed or in the "
    "folder where `lrl join` starts."
)


class JoiningScorer(JoinSession):
    """See `JoinSession`; also raises NotRunning if the run takes no scorers."""

    kind = Kind.SCORER

    def __init__(
        self, run: str, client: RunClient, spec: JoinSpec, overrides: LocalOverrides
    ) -> None:
        super().__init__(run, client, spec, overrides)
        endpoint = spec.settings_here(overrides.endpoint, client.location.url).endpoint
        fields = ask(client, client.scoring)
        try:
            terms = ScoringTerms.from_json(fields)
        except (KeyError, TypeError, ValueError) as error:
            raise NotRunning(
                f"{run} is of another release of lrl ({error!r}): use the run's."
            ) from error
        self.server = ScorerServer(terms, overrides.workers, endpoint, client.token)

    @contextlib.contextmanager
    def serve(self) -> Iterator[Served]:
        """See `JoinSession.serve`."""
        try:
            try:
                location = self.server.start()
            except (ValueError, RuntimeError, TimeoutError) as error:
                raise ScorerError(f"{error} {REMEDY}") from error
            self.waiting()
            self.say(f"answers at {location.url}; waits for the run")
            yield Served(location, lambda: None)
        finally:
            self.server.stop()
