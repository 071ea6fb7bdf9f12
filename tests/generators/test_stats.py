"""The token counts of a generator, and their cost."""

from typing import Any

from lrl.generators.stats import GeneratorStats
from lrl.types import Rollout


class Watched(Rollout):
    """Counts the reads of its tokens."""

    reads = 0

    def __getattribute__(self, name: str) -> Any:
        if name == "token_ids":
            self.reads += 1
        return super().__getattribute__(name)


def asked(stats: GeneratorStats, prompt_tokens: int, *rollouts: Rollout) -> list[Rollout]:
    stats.begin(prompt_tokens, [list(rollouts)])
    return list(rollouts)


def test_the_end_of_a_response_reads_no_other_one() -> None:
    stats, beside = GeneratorStats(), [Watched() for _ in range(50)]
    for other in beside:
        asked(stats, 7, other)
    own, before = asked(stats, 5, Rollout(), Rollout()), sum(other.reads for other in beside)
    own[0].token_ids.append(1)
    stats.end(own)
    assert sum(other.reads for other in beside) == before > 0
    assert stats.snapshot().read == 5 and stats.snapshot().written == 1


def test_a_prompt_is_read_once_even_if_its_responses_end_one_by_one() -> None:
    stats = GeneratorStats()
    first, second = asked(stats, 5, Rollout(), Rollout())
    first.token_ids.append(1)
    stats.end([first])
    second.token_ids += [1, 2]
    assert not stats.is_empty and stats.snapshot().read == 5
    stats.end([second])
    assert stats.is_empty and stats.snapshot().read == 5 and stats.snapshot().written == 3


def test_a_prompt_of_which_nothing_was_written_was_not_read() -> None:
    stats = GeneratorStats()
    stats.end(asked(stats, 5, Rollout()))
    assert stats.is_empty and stats.snapshot().read == 0 == stats.snapshot().written
