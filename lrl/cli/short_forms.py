"""Short forms of settings, widened to their class when one of its settings is changed.

`prompts: problems.jsonl` is short for the class `lrl.Prompts` with the setting `source`, and a
reward's name for `lrl.rewards.Function`. jsonargparse knows of no connection: over a short form,
`--data.prompts.limit 2` became a data set of one row with the column `limit`.
"""

from collections.abc import Collection
from typing import Any

from jsonargparse import Namespace

from lrl.callbacks import Evaluation


def widen(settings: Namespace, owner: type, changed: Collection[str]) -> Namespace:
    """Returns the settings of a class, those in `changed` as classes where they have a short form.

    Args:
        settings: The settings so far; they stay as they are.
        owner: The class whose constructor takes them.
        changed: Names of the settings of which one of their own settings is given now.
    """
    widened = settings.clone() if {"prompts", "rewards"} & set(changed) else settings
    if "prompts" in changed:
        _widen_prompts(widened, owner)
    if "rewards" in changed:
        _widen_rewards(widened)
    return widened


def changed_in(config: dict[str, Any] | Namespace) -> list[str]:
    """Returns the names of the settings that a config changes in part: it names no class for
    them."""
    values = vars(config) if isinstance(config, Namespace) else config
    return [
        name for name, value in values.items() if _has_settings(value) and "class_path" not in value
    ]


def _widen_prompts(settings: Namespace, owner: type) -> None:
    source = settings.get("prompts")
    if not source or _has_settings(source):
        return
    # What `Prompts.coerce` makes of a source; an evaluation's is the test split.
    split = {"split": "test"} if issubclass(owner, Evaluation) else {}
    settings.prompts = _class("lrl.Prompts", source=source, **split)


def _widen_rewards(settings: Namespace) -> None:
    rewards = settings.get("rewards")
    # Settings that follow belong to it.
    last = rewards[-1] if rewards and isinstance(rewards, list) else rewards
    if not last or _has_settings(last):
        return
    widened = _class("lrl.rewards.Function", function=last)
    settings.rewards = [*rewards[:-1], widened] if isinstance(rewards, list) else widened


def _has_settings(value: Any) -> bool:
    return isinstance(value, dict | Namespace)


def _class(path: str, **settings: Any) -> Namespace:
    return Namespace(class_path=path, init_args=Namespace(**settings))
