"""A scorer that joins a run: reward workers of this machine."""

from typing import Any

from lrl.members.joining_workers import JoiningWorkers
from lrl.members.member import Kind
from lrl.rewards.job import ScoringTerms
from lrl.rewards.scorer_server import ScorerServer
from lrl.system.endpoint import Endpoint


class JoiningScorer(JoiningWorkers):
    """See `JoiningWorkers`."""

    kind = Kind.SCORER
    remedy = (
        "A scorer imports the rewards' modules by itself: put them on its machine, installed or in "
        "the folder where `lrl join` starts."
    )

    def make_server(self, terms: dict[str, Any], endpoint: Endpoint) -> ScorerServer:
        """See `JoiningWorkers.make_server`."""
        return ScorerServer(
            ScoringTerms.from_json(terms), self.overrides.workers, endpoint, self.client.token
        )
