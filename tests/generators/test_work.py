"""What a generator's work says, and what it costs to keep it."""

from typing import Any

from lrl.generators.stats import Work
from lrl.types import Rollout


class Watched(Rollout):
    """Counts the looks at its tokens."""

    looks = 0

    def __getattribute__(self, name: str) -> Any:
        if name == "token_ids":
            self.looks += 1
        return super().__getattribute__(name)


def asked(work: Work, prompt_tokens: int, *rollouts: Rollout) -> list[Rollout]:
    work.begin(prompt_tokens, [list(rollouts)])
    return list(rollouts)


def test_the_end_of_an_answer_looks_at_no_other_one() -> None:
    work, beside = Work(), [Watched() for _ in range(50)]
    for other in beside:
        asked(work, 7, other)
    own, before = asked(work, 5, Rollout(), Rollout()), sum(other.looks for other in beside)
    own[0].token_ids.append(1)
    work.end(own)
    assert sum(other.looks for other in beside) == before > 0
    assert work.seen().read == 5 and work.seen().written == 1


def test_a_prompt_is_read_once_though_its_answers_end_one_by_one() -> None:
    work = Work()
    first, second = asked(work, 5, Rollout(), Rollout())
    first.token_ids.append(1)
    work.end([first])
    second.token_ids += [1, 2]
    assert not work.is_empty and work.seen().read == 5
    work.end([second])
    assert work.is_empty and work.seen().read == 5 and work.seen().written == 3


def test_a_prompt_of_which_nothing_was_written_was_not_read() -> None:
    work = Work()
    work.end(asked(work, 5, Rollout()))
    assert work.is_empty and work.seen().read == 0 == work.seen().written
