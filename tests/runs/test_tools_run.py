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
from lrl.callbacks import Evaluation, Export, WeightSync
from lrl.cli.chat import main as chat
from lrl.environments import ToolCall, Tools
from lrl.generators.generator import Generator
from lrl.generators.pool import GeneratorPool
from lrl.generators.tool_calls import ToolCallParser
from lrl.types import ENVIRONMENT
from tests.environments.tool_functions import add
from tests.lent_server import PARSER, Borrowing, LentServer
from tests.runs.test_async_run import Witness
from tests.taught_policy import ANSWER, CALL, QUESTION, RESULT, teach
from tests.tiny_policies import byte_tokenizer

ROWS = [{"prompt": QUESTION, "answer": "It is 5"}] * 4


def exact(prompt: str, response: str, *, answer: str, **columns: Any) -> float:
    return float(response == answer)


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
        find = ToolCallParser(GeneratorPool([generator]), Tools([add]).tools, {end})
        try:
            return [await find(tokenizer.encode(turn), 12) for turn in turns]
        finally:
            await generator.client.close()

    found = asyncio.run(ask())
    assert [[(call.name, json.loads(call.arguments)) for call in one] for one in found] == [
        *turns.values()
    ]
    assert [call.id for call in found[2]] == ["t0012c000", "t0012c001"]


def test_calls_run_and_their_results_are_context_in_training_and_evaluation(
    lent_server: LentServer,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    policy = teach(tmp_path / "policy")
    witness = Witness()
    held_out = lrl.Prompts(ROWS[:1], name="held_out")
    evaluation = Evaluation(held_out, every_n_steps=100)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=Borrowing(lent_server, server=lrl.ServerSettings(tool_parser=PARSER)),
        callbacks=[WeightSync(), evaluation, Export(tmp_path / "export"), witness],
        max_steps=1,
        max_epochs=-1,
        logger=False,
        default_root_dir=tmp_path,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = lrl.RolloutDataModule(
        prompts=ROWS,
        rewards=["tests.runs.test_tools_run:exact"],
        groups_per_step=2,
        rollouts_per_group=4,
        max_prompt_tokens=64,
        max_response_tokens=200,
        environment=Tools([add]),
    )
    trainer.fit(lrl.PolicyModule(model=str(policy), lr=1e-6), data)
    assert "finds no call" not in caplog.text, "the parser reads what the template writes"
    tokenizer = AutoTokenizer.from_pretrained(policy)
    network = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    called = 0
    for _, group in witness.groups:
        for rollout in group.rollouts:
            assert not rollout.failure
            turns = [rollout.token_ids[turn.start : turn.stop] for turn in rollout.turns]
            if list(map(tokenizer.decode, turns)) != [CALL, ANSWER]:
                continue
            called += 1
            first, second = rollout.turns
            between = slice(first.stop, second.start)
            assert rollout.token_ids[between] == tokenizer.encode(RESULT)
            assert set(rollout.versions[between]) == {ENVIRONMENT}
            assert rollout.reward == 1.0, "rewards get the last turn"
            ids = torch.tensor([group.prompt.token_ids + rollout.token_ids])
            logits = network(ids).logits[0, len(group.prompt.token_ids) - 1 : -1].detach()
            ours = logits.log_softmax(-1).gather(-1, torch.tensor(rollout.token_ids)[:, None])[:, 0]
            difference = (ours - torch.tensor(rollout.logprobs)).abs()
            assert difference[torch.tensor(rollout.mask)].max() < 1e-3
    assert called >= 4, "the policy has learnt to call"
    assert [report.accuracy for _, report in evaluation.reports] == [1.0, 1.0]
    assert chat([str(tmp_path / "export"), QUESTION]) == 0
    written = capsys.readouterr()
    assert written.out.endswith(f"{CALL.removesuffix('<|end|>')}\n"), "it saw its tools"
    assert "With the tools of the run" in written.err
