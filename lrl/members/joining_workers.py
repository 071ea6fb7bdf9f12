"""A scorer or an environment that joins a run: workers of this machine, served over HTTP."""

import contextlib
from collections.abc import Iterator
from typing import Any, ClassVar

from lrl.environments.environment_server import EnvironmentServer
from lrl.environments.worker import WorkerSpec
from lrl.errors import NotRunning, WorkersError
from lrl.members.client import RunClient
from lrl.members.join_session import JoinSession, LocalOverrides, Served, ask
from lrl.members.join_spec import JoinSpec
from lrl.members.member import Kind
from lrl.rewards.job import ScoringTerms
from lrl.rewards.scorer_server import ScorerServer


class JoiningWorkers(JoinSession):
    """See `JoinSession`; also raises NotRunning if the run takes no such member."""

    server_kind: ClassVar[type[ScorerServer | EnvironmentServer]]
    terms_kind: ClassVar[type[ScoringTerms | WorkerSpec]]
    """What its workers must know."""
    remedy: ClassVar[str]
    """What to do if they cannot work."""

    def __init__(
        self, run: str, client: RunClient, spec: JoinSpec, overrides: LocalOverrides
    ) -> None:
        super().__init__(run, client, spec, overrides)
        endpoint = spec.settings_here(overrides.endpoint, client.location.url).endpoint
        terms = ask(client, lambda: client.terms(self.kind))
        try:
            known: Any = self.terms_kind.from_json(terms)
            self.server = self.server_kind(known, overrides.workers, endpoint, client.token)
        except (KeyError, TypeError, ValueError) as error:
            raise NotRunning(
                f"{run} is of another release of lrl ({error!r}): use the run's."
            ) from error

    @contextlib.contextmanager
    def serve(self) -> Iterator[Served]:
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


class JoiningScorer(JoiningWorkers):
    """See `JoiningWorkers`."""

    kind = Kind.SCORER
    server_kind = ScorerServer
    terms_kind = ScoringTerms
    remedy = (
        "A scorer imports the rewards' modules by itself: put them on its machine, installed or in "
        "the folder where `lrl join` starts."
    )


class JoiningEnvironment(JoiningWorkers):
    """See `JoiningWorkers`."""

    kind = Kind.ENVIRONMENT
    server_kind = EnvironmentServer
    terms_kind = WorkerSpec
    remedy = (
        "It imports the environment's module by itself: put that on its machine, installed or in "
        "the folder where `lrl join` starts."
    )
