"""The token counts of a generator."""

from lrl.generators.stats import GeneratorStats
from lrl.types import Rollout


def test_a_prompt_is_read_once_by_its_request_and_not_before_a_token_of_it() -> None:
    stats = GeneratorStats()
    first, second = Rollout(), Rollout(token_ids=[7, 8])
    shared, continued = stats.begin(5, [[first, Rollout()], [second]])
    assert stats.snapshot().read == 0
    first.token_ids.append(1)
    assert (stats.snapshot().read, stats.snapshot().written) == (5, 1)
    stats.end([shared])
    second.token_ids += [1, 2]
    assert (stats.snapshot().read, stats.snapshot().written) == (5 + 5 + 2, 3)
    stats.end([continued])
    assert not stats.requests and stats.snapshot().written == 3
    stats.end(stats.begin(5, [[Rollout()]]))
    assert stats.snapshot().read == 12, "a prompt of which nothing was written was not read"
