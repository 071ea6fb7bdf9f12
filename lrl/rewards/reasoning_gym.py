"""The scorers of reasoning-gym as one reward: each row is judged by the task that made it."""

import functools
import json
from typing import Any

from lrl.errors import ConfigError
from lrl.rewards.base import GaveUp, Reward
from lrl.rewards.verifiers.final_answer import marked_answers
from lrl.system.import_by_name import did_you_mean


class ReasoningGym(Reward):
    r"""The score of the task's own scorer, from 0 to 1, for the prompts of `lrl.ReasoningGym`.

    Many tasks give part of it for an answer that is nearly right, or in the wrong form. The answer
    is what stands in the last `<answer></answer>` or `\boxed{}`, else the whole response.
    """

    name = "reasoning_gym"

    def __call__(self, prompt: str, response: str, **columns: Any) -> float:
        """Returns the score; `GaveUp` for an answer at which the scorer raises an exception.

        `item`, and not the prompt, has the question: a template may have changed it.
        """
        task, item = columns["task"], columns["item"]
        marked = marked_answers(response)
        answer = (marked[0] if marked else response).strip()
        score = _scorer(task, json.dumps(columns["settings"], sort_keys=True)).score_answer
        try:
            return float(score(answer, item))
        except Exception as error:
            # Four tasks raise whatever int() or json makes of an answer in another form. A scorer
            # that fails at the right answer too is broken, and this call says so.
            score(item["answer"], item)
            return GaveUp(f"{task} cannot read {answer!r:.60}: {type(error).__name__}: {error}")


def registered(task: str) -> tuple[Any, Any]:
    """Returns the classes of a task: its data set, and the dataclass of its settings."""
    try:
        # Not at the top: it imports all of its tasks, and every reward worker this file.
        from reasoning_gym.factory import DATASETS
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error}: pip install 'lrl[reasoning-gym]'.") from error
    if task not in DATASETS:
        raise ConfigError(f"reasoning-gym has no task {task!r}.{did_you_mean(task, DATASETS)}")
    dataset_class, config_class = DATASETS[task]
    return dataset_class, config_class


@functools.cache
def _scorer(task: str, settings: str) -> Any:
    dataset_class, config_class = registered(task)
    return dataset_class(config_class(**json.loads(settings)))
