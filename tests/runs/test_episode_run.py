"""Whole runs with an environment on a real vLLM server."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lrl.types import ENVIRONMENT
from tests.environments.worlds import Echo
from tests.lent_server import LentServer
from tests.runs.test_async_run import GROUPS, STEPS, TEMPERATURE, fit


def test_episodes_are_trained_as_sampled_and_what_the_environment_wrote_is_context(
    lent_server: LentServer, policy_folder: Path, tmp_path: Path
) -> None:
    run = fit(
        lent_server,
        policy_folder,
        tmp_path,
        environment=Echo(),
        rewards=[],
        max_turn_tokens=20,
        max_lag=1,
    )
    tokenizer = AutoTokenizer.from_pretrained(policy_folder)
    network = AutoModelForCausalLM.from_pretrained(policy_folder, dtype=torch.float32)
    assert len({group.index for _, group in run.groups}) == STEPS * GROUPS
    turns = 0
    for step, group in run.groups:
        for rollout in group.rollouts:
            turns += len(rollout.turns)
            assert rollout.reward == sum(rollout.turn_rewards)
            assert [turn.stop for turn in rollout.turns] == rollout.turn_ends
            for earlier, later in zip(rollout.turns, rollout.turns[1:], strict=False):
                turn = rollout.token_ids[earlier.start : earlier.stop]
                last = tokenizer.decode(turn, skip_special_tokens=True)[-1:]
                between = rollout.token_ids[earlier.stop : later.start]
                assert tokenizer.decode(between) == f"[{last}]"
                assert set(rollout.versions[earlier.stop : later.start]) == {ENVIRONMENT}
            ids = group.prompt.token_ids + rollout.token_ids
            for version in sorted(set(rollout.policy_versions)):
                assert 0 <= step - version <= 1
                network.load_state_dict(run.weights[version])
                logits = network(torch.tensor([ids])).logits[0].detach() / TEMPERATURE
                found = logits.log_softmax(-1)
                for place, (token, logprob, by) in enumerate(
                    zip(rollout.token_ids, rollout.logprobs, rollout.versions, strict=True),
                    start=len(group.prompt.token_ids) - 1,
                ):
                    if by == version:
                        assert abs(found[place, token].item() - logprob) < 1e-3
    assert turns > 1.5 * sum(len(group.rollouts) for _, group in run.groups)
