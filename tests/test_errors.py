"""The errors of lrl are one tree; a constructor refuses what cannot work, by the setting's name, and a
word that the setting does not know. What a whole run refuses is in tests/preflight/bad_input.py."""

from __future__ import annotations

import ast
import inspect
import math
import typing
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal

import pytest

import lrl
import lrl.errors
from lrl.advantages import GAE, GRPO
from lrl.environments import Agent, Tools
from lrl.errors import ConfigError
from lrl.generators.settings import ServerSettings
from lrl.objectives import AIPO, CISPO, GSPO, PPO, TBA, TIS, DecoupledPPO, IcePop
from lrl.rewards import Code, ExactMatch, Function, Judge, Math, RewardPool
from lrl.training.beside.critic import Critic
from lrl.training.beside.reference import Reference
from lrl.training.beside.teacher import Teacher
from lrl.training.beside.turn_critic import TurnCritic
from lrl.training.lora import LoRA
from tests.environments import agents, tool_functions
from tests.public_api import public_names
from tests.rewards import odd_rewards
from tests.test_imports import ROOT, modules

PRIVATE = {"Gone", "Deadlock", "JoinEnded", "RunEnded", "TooMuchError", "_Tried"}
"""Errors that never leave the room that raises them."""


def test_an_error_that_leaves_its_room_is_in_the_tree() -> None:
    classes = inspect.getmembers(lrl.errors, inspect.isclass)
    own = {name: one for name, one in classes if one.__module__ == "lrl.errors"}
    assert all(issubclass(one, lrl.errors.LrlError) for one in own.values())
    outside = set()
    for name, path in modules(ROOT).items():
        if name == "lrl.errors":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and any(map(is_error, node.bases)):
                outside.add(node.name)
    assert outside == PRIVATE and not outside & set(own)


def is_error(base: ast.expr) -> bool:
    """Whether a class with this base is an error, by the name of the base."""
    name = base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", "")
    return name.endswith(("Error", "Exception")) or hasattr(lrl.errors, name)


NEEDED: dict[str, Any] = {
    "model": "lrl.quickstart.warmup:policy",
    "prompts": [{"prompt": "1+1="}],
    "rewards": lrl.rewards.ExactMatch(),
    "source": [{"prompt": "1+1="}],
    "tasks": "leg_counting",
    "jobs": 1,
    "template": "{response}",
}
"""What classes need besides."""


def settings_of_words() -> Iterator[tuple[type, str]]:
    """Each public class with a setting that takes words, and the setting."""
    for kind in dict.fromkeys(value for _, value in public_names() if inspect.isclass(value)):
        hints = {} if issubclass(kind, Exception) else typing.get_type_hints(kind.__init__)
        for name, hint in hints.items():
            if any(typing.get_origin(part) is Literal for part in (hint, *typing.get_args(hint))):
                yield kind, name


SETTINGS = [*settings_of_words()]
assert {"GAE", "Prompts", "Reference", "TIS"} <= {kind.__name__ for kind, _ in SETTINGS}


@pytest.mark.parametrize(("kind", "setting"), SETTINGS)
def test_a_word_that_a_setting_does_not_know_is_refused(kind: type, setting: str) -> None:
    """A script may give any: such a `data.stragglers` neither waited nor masked, and tokens of any
    age were trained."""
    parameters = inspect.signature(kind).parameters
    required = inspect.Parameter.empty
    needed = {name: value for name, value in NEEDED.items() if name in parameters}
    if "tasks" in parameters:
        pytest.importorskip("reasoning_gym")
    if "url" in parameters:
        needed = {"url": "http://127.0.0.1:1"} | {
            name: value for name, value in needed.items() if parameters[name].default is required
        }
    with pytest.raises(ConfigError, match=f"{setting} is 'odd'"):
        kind(**needed | {setting: "odd"})


URL = "http://127.0.0.1:9"
DATA = partial(lrl.RolloutDataModule, [{"prompt": "1+1="}], ExactMatch())
POLICY = partial(lrl.PolicyModule, "any")
JUDGE = partial(Judge, url=URL, model="m", template="{response}")
SIGNATURE = r"def {}\(prompt, response, \*\*columns\)".format

REFUSED: list[tuple[Callable[[], object], str]] = [
    (partial(AIPO, 0.5), "rho is 0.5; it must be at least 1"),
    (partial(AIPO, math.nan), "rho is nan; it must be at least 1"),
    (partial(TIS, 0.9), "cap is 0.9; it must be at least 1"),
    (partial(PPO, 0.0), "epsilon_low"),
    (partial(PPO, 1.5), "epsilon_low"),
    (partial(PPO, 0.2, 0.0), "epsilon_high"),
    (partial(DecoupledPPO, max_weight=0.5), "max_weight"),
    (partial(IcePop, 1.5), "low"),
    (partial(CISPO, epsilon_high=-1.0), "epsilon_high"),
    (partial(GSPO, math.nan), "epsilon_low"),
    (partial(TBA, 0.0), "beta"),
    (partial(GRPO, epsilon=0.0), "epsilon"),
    (partial(GAE, lam=1.01), "lam"),
    (partial(GAE, alpha=0.0, lam=0.9), "alpha"),
    (partial(GAE, alpha=0.05, lam=1.0), "alpha"),
    (partial(Critic, lr=-1.0), "model.critic.lr"),
    (partial(Critic, lam=1.5), "model.critic.lam"),
    (partial(Critic, value_only_steps=-1), "model.critic.value_only_steps"),
    (partial(Critic, max_grad_norm=0.0), "model.critic.max_grad_norm"),
    (partial(TurnCritic, gamma=1.5), "model.critic.gamma"),
    (partial(TurnCritic, tau=0.0), "model.critic.tau"),
    (partial(Reference, -1.0), "model.reference.coefficient"),
    (partial(Reference, 0.1, "k1"), "model.reference.estimator"),
    (partial(Reference, refresh_every_n_steps=0), "model.reference.refresh_every_n_steps"),
    (partial(POLICY, objective=TBA()), "TBA needs a reference policy: set model.reference"),
    (
        partial(POLICY, lora=LoRA(), reference=Reference(refresh_every_n_steps=2)),
        "refresh_every_n_steps is 2, and model.lora trains",
    ),
    (Teacher, "model.reference.url is None and model.reference.model is None"),
    (partial(Teacher, model="m", url=URL), "give one of them"),
    (partial(Teacher, model="m", api_key_env="KEY"), "leave them out"),
    (partial(Teacher, model="m", deadline_s=5.0), "leave them out"),
    (partial(Teacher, model="m", coefficient=0.0), "coefficient is"),
    (partial(Teacher, model="m", coefficient=math.nan), "coefficient is"),
    (Agent, "a function, `agent`, a program, `command`, or a `port`"),
    (partial(Agent, agents.adds, port=0), "run elsewhere: one of them"),
    (partial(Agent, "no.such:thing"), "Agent.agent is 'no.such:thing'"),
    (partial(Tools, ["tests.environments.tool_functions.ad"]), "^Tools.tools .*Did you mean add?"),
    (partial(Tools, [int]), "^Tools.tools .*no schema"),
    (partial(Tools, [tool_functions.add] * 2), "^Tools.tools .*two functions of a name: add"),
    (partial(Code, isolation="none", timeout_s=math.nan), "Code.timeout_s is nan"),
    (partial(Code, isolation="none", memory_mib=0), "Code.memory_mib is 0"),
    (partial(Code, isolation="none", python="/no/such/python"), "/no/such/python"),
    (partial(Math, give_up_s=0), "Math.give_up_s is 0"),
    (partial(JUDGE, template="{prompt}"), "Write {response}"),
    (partial(Function, odd_rewards.no_columns), SIGNATURE("no_columns")),
    (partial(Function, odd_rewards.swapped), SIGNATURE("swapped")),
    (partial(Function, odd_rewards.trl_reward), SIGNATURE("trl_reward")),
    (partial(Function, ExactMatch), SIGNATURE("ExactMatch")),
    (partial(lrl.callbacks.Export, push_to_hub="a/b/c"), "a/b/c"),
    (partial(LoRA, rank=0), "model.lora.rank is"),
    (partial(LoRA, alpha=0.0), "model.lora.alpha is"),
    (partial(LoRA, target_modules="linear"), "model.lora.target_modules is"),
    (partial(LoRA, target_modules=[]), "model.lora.target_modules is"),
    (partial(RewardPool, []), "rewards is empty"),
    (partial(RewardPool, [ExactMatch()], workers=0), "data.reward_workers is 0"),
    (partial(RewardPool, [ExactMatch()], max_failures=10), "data.max_reward_failures is 10"),
    (partial(RewardPool, [ExactMatch()], max_failures=0), "data.max_reward_failures is 0"),
    (partial(RewardPool, [odd_rewards.obey] * 2), "more than one named 'obey'"),
    (partial(RewardPool, [Math()], timeout_s=3), "timeout_s is 3, .* after 2 s: .* at least 4"),
    (partial(DATA, advantages=GRPO), r"data.advantages is .*; give GRPO\(\)"),
    (partial(DATA, replay=4), "data.replay is 4; give an object of the class Replay"),
    (partial(lrl.AsyncDDP, model_averaging_period=2), "period is 2.*Leave it out"),
    (partial(lrl.AsyncDDP, static_graph=True), "strategy.static_graph is True.*Leave it out"),
    (partial(lrl.AsyncFSDP, data_parallel_size=2), "strategy.data_parallel_size is 2. It follows"),
    (partial(ServerSettings, max_model_len=0), "strategy.server.max_model_len is 0"),
    (partial(ServerSettings, kv_cache_gib=-1.0), "strategy.server.kv_cache_gib is -1.0"),
    (partial(ServerSettings, gpu_memory_utilization=1.5), "gpu_memory_utilization is 1.5"),
    (partial(ServerSettings, extra_args={"spec-tokens": 3}), "one mapping"),
    (partial(ServerSettings, extra_args={"speculative-config.method": 3}), "one mapping"),
]


@pytest.mark.parametrize(("make", "words"), REFUSED)
def test_what_cannot_work_is_refused_by_name(make: Callable[[], object], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as refused:
        make()
    assert "\n" not in str(refused.value)
