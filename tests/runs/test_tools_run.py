"""A whole run with tools on a real vLLM server, whose parser finds the calls."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import lrl
from lrl.callbacks import Evaluation, Export
from lrl.cli.chat import main as chat
from lrl.environments import Agent, Environment, ToolCall, Tools
from lrl.errors import ConfigError
from lrl.generators.generator import Generator
from lrl.generators.pool import GeneratorPool
from lrl.generators.tool_calls import ToolCallParser
from lrl.types import ENVIRONMENT, Group
from tests.environments.agents import ADD, adds, adds_or_changes_history
from tests.environments.tool_functions import add
from tests.lent_server import PARSER, Borrowing, LentServer
from tests.runs.test_async_run import train
from tests.taught_policy import ANSWER, CALL, QUESTION, RESULT, teach
from tests.tiny_policies import byte_tokenizer

ROWS = [{"prompt": QUESTION, "answer": "It is 5", "how": "adds"}] * 4


def test_a_server_finds_the_calls_of_a_turn(lent_server: LentServer) -> None:
    tokenizer = byte_tokenizer()
    turns = {
        CALL: [("add", {"a": 2, "b": 3})],
        f"I add. {CALL}": [("add", {"a": 2, "b": 3})],
        CALL.removesuffix("<|end|>") * 2 + "<|end|>": [("add", {"a": 2, "b": 3})] * 2,
        '<tool_call>{"name": "add", "arguments": {"a": 2,</tool_call><|end|>': [],
        '<tool_call>{"name": "no such", "arguments": {}}</tool_call>': [("no such", {})],
        "It is 5<|end|>": [],
        "<|start|><|end|>": [],
        "<|end|>": [],
        "": [],
    }

    async def ask() -> list[list[ToolCall]]:
        generator = Generator(lent_server, 8)
        end = tokenizer.convert_tokens_to_ids("<|end|>")
        find = ToolCallParser(GeneratorPool([generator]), {end})
        tools = Tools([add]).tools
        try:
            return [(await find(tokenizer.encode(turn), 12, tools))[1] for turn in turns]
        finally:
            await generator.client.close()

    found = asyncio.run(ask())
    assert [[(call.name, json.loads(call.arguments)) for call in one] for one in found] == [
        *turns.values()
    ]
    assert [call.id for call in found[2]] == ["t0012c000", "t0012c001"]


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return teach(tmp_path_factory.mktemp("taught") / "policy")


def trained(
    policy: Path,
    environment: Environment,
    strategy: lrl.AsyncSingleDevice,
    folder: Path,
    *callbacks: L.Callback,
    **settings: Any,
) -> list[Group]:
    """Trains one step in an environment; returns its groups."""
    settings |= {"devices": 2, "steps": 1, "learning": {"lr": 1e-6}, "environment": environment}
    settings = {"prompts": ROWS} | settings | {"rewards": [lrl.rewards.ExactMatch()]}
    settings |= {"max_response_tokens": 200, "temperature": 1.0}
    _, witness = train(strategy, policy, folder, *callbacks, **settings)
    return [group for _, group in witness.groups]


def evaluated() -> Evaluation:
    return Evaluation(lrl.Prompts(ROWS[:1], name="held_out"), every_n_steps=100)


def parses(lent_server: LentServer) -> Borrowing:
    return Borrowing(lent_server, server=lrl.ServerSettings(tool_parser=PARSER))


def check_sampled(policy: Path, groups: list[Group]) -> None:
    """Checks that each token of the policy has its log-prob behind what the policy read, in every
    branch of an episode, and that no episode has failed."""
    network = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    for prompt, rollout in ((group.prompt, one) for group in groups for one in group.rollouts):
        assert not rollout.failure
        for places, shared in rollout.branches:
            read = prompt.token_ids + [rollout.token_ids[place] for place in places]
            logprobs = network(torch.tensor([read])).logits[0].detach().log_softmax(-1)
            own = [place for place in places[shared:] if rollout.versions[place] != ENVIRONMENT]
            assert own
            for place in own:
                at = len(prompt.token_ids) + list(places).index(place)
                ours = logprobs[at - 1, read[at]].item()
                assert ours == pytest.approx(rollout.logprobs[place], abs=1e-3)


def check_calls(policy: Path, groups: list[Group]) -> None:
    """Checks the episodes in which the policy has called the tool and used its result, whose tokens
    are context."""
    check_sampled(policy, groups)
    tokenizer = AutoTokenizer.from_pretrained(policy)
    called = 0
    for rollout in (rollout for group in groups for rollout in group.rollouts):
        turns = [rollout.token_ids[turn.start : turn.stop] for turn in rollout.turns]
        if list(map(tokenizer.decode, turns)) != [CALL, ANSWER]:
            continue
        called += 1
        first, second = rollout.turns
        between = slice(first.stop, second.start)
        assert rollout.token_ids[between] == tokenizer.encode(RESULT)
        assert set(rollout.versions[between]) == {ENVIRONMENT}
        assert rollout.reward == 1.0, "rewards get the last turn"
    assert called >= 4, "the policy has learnt to call"


def test_calls_run_and_their_results_are_context_in_training_and_evaluation(
    policy: Path,
    lent_server: LentServer,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    evaluation = evaluated()
    export = Export(tmp_path / "export")
    check_calls(
        policy, trained(policy, Tools([add]), parses(lent_server), tmp_path, evaluation, export)
    )
    assert "finds no call" not in caplog.text, "the parser reads what the template writes"
    assert [report.reward for _, report in evaluation.reports] == [1.0, 1.0]
    assert chat([str(tmp_path / "export"), QUESTION]) == 0
    written = capsys.readouterr()
    assert written.out.endswith(f"{CALL.removesuffix('<|end|>')}\n"), "it saw its tools"
    assert "With the tools of the run" in written.err


def test_agents_that_know_nothing_of_lrl_are_trained_through_their_client_in_every_branch(
    policy: Path, lent_server: LentServer, tmp_path: Path
) -> None:
    evaluation = evaluated()
    agent, rows = Agent(adds_or_changes_history), [row | {"how": "changes"} for row in ROWS[:2]]
    groups = trained(
        policy,
        agent,
        parses(lent_server),
        tmp_path,
        evaluation,
        prompts=[*ROWS[:2], *rows],
        groups_per_step=4,
    )
    check_calls(policy, groups)
    tokenizer = AutoTokenizer.from_pretrained(policy)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}],
        tools=[ADD],
        add_generation_prompt=True,
        return_dict=False,
    )
    assert [report.reward for _, report in evaluation.reports] == [1.0, 1.0]
    branched = []
    for group in groups:
        for rollout in group.rollouts:
            if group.prompt.columns["how"] == "adds":
                begun_with = group.prompt.token_ids + rollout.token_ids[: rollout.turns[0].start]
                assert begun_with == prompt, "the agent's first request is the prompt"
                continue
            branched.append(len(rollout.branches) == 2)
            assert len(rollout.branches) == len(rollout.turns)
            # Once in a while the taught policy samples another token, and writes on to the limit.
            assert rollout.cut or len(rollout.turns) == 2
    assert any(branched)


@pytest.mark.parametrize(
    ("parser", "room", "said"),
    [
        (None, 64, "gets tools, and strategy.server.tool_parser is null"),
        (
            PARSER,
            8,
            r"request has \d+ tokens, its tools' schemas included, and .*max_prompt_tokens is 8",
        ),
    ],
)
def test_what_an_agents_first_request_needs_is_refused_before_a_server_starts(
    parser: str | None, room: int, said: str, policy: Path, tmp_path: Path
) -> None:
    strategy = lrl.AsyncSingleDevice(server=lrl.ServerSettings(tool_parser=parser))
    with pytest.raises(ConfigError, match=said):
        trained(policy, Agent(adds), strategy, tmp_path, max_prompt_tokens=room)
