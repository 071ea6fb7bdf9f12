"""A reward model: what it is asked, that a failure is never a 0, and that vLLM's scores are those of
transformers. The endpoints are real servers.
"""

from __future__ import annotations

import asyncio
import sys
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from lrl.errors import ConfigError, CountedError
from lrl.generators.server import Server
from lrl.generators.settings import ServerSettings
from lrl.preflight.model import check_reward_models
from lrl.rewards import RewardModel, RewardPool
from lrl.types import Chat, Fork, Prompt
from tests.lent_server import LentServer
from tests.rewards import odd_rewards
from tests.rewards.judge_server import CLOSE, ScoreServer, fails, gives, served
from tests.rewards.scenes import counted, rollouts_of, scored, started
from tests.runs.test_async_run import fit
from tests.tiny_policies import byte_tokenizer, tiny_reward_model

URL = "http://127.0.0.1:9"
TOKENS = {"prompt_token_ids": [5, 6], "response_token_ids": [7, 2], "prompt_messages": None}


@pytest.fixture
def server():
    with served(ScoreServer()) as score_server:
        yield score_server


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.01)


def score(model, response="r", prompt="p", **columns):
    return asyncio.run(model(prompt, response, **(TOKENS | columns)))


def failure(model, response="r", **columns):
    with pytest.raises(CountedError) as caught:
        score(model, response, **columns)
    return caught.value


# ---- what it is asked


def test_without_a_chat_the_prompt_is_the_users_message(server):
    assert score(RewardModel(url=server.url)) == 0.5
    messages = [{"role": "user", "content": "p"}, {"role": "assistant", "content": "r"}]
    assert server.bodies == [{"messages": messages, "use_activation": False}]


def test_a_pool_gives_it_all_messages_of_a_chat_and_the_tokens_of_prompt_and_response(server):
    system = {"role": "system", "content": "Be short."}
    prompt = Prompt(id=0, token_ids=[5, 6], text="2+2?", chat=Chat([system]))
    rewards = [RewardModel(url=server.url), odd_rewards.told]
    with started(rewards, 1, timeout_s=150.0, first=prompt) as pool:
        assert server.bodies[0]["messages"] == [system, {"role": "assistant", "content": "0"}]
        (rollout,) = scored(pool, "four")
    assert rollout.reward_parts == {"reward_model": 0.5, "told": 1 + 1000 * 12}


def test_of_an_episode_with_branches_it_gets_the_tokens_of_the_last_one():
    with started([odd_rewards.told], 1) as pool:
        pool._tells_tokens = True  # as beside a reward that reads them
        (rollout,) = rollouts_of("four")
        rollout.token_ids, rollout.forks = [3, 4, 5, 6], [Fork(2, 1)]
        asyncio.run(pool.score(Prompt(id=0, token_ids=[1, 2], text="go"), [rollout]))
        assert rollout.reward_parts == {"told": 1 + 2 + 1000 * 356}


def test_the_score_is_that_of_the_label(server):
    server.replies["r"] = [gives(-3.0, 0.25)]
    assert score(RewardModel(url=server.url, label=1)) == 0.25
    assert score(RewardModel(url=server.url, label=0)) == -3.0
    for label in (None, 2, -1):
        found = failure(RewardModel(url=server.url, label=label))
        assert found.kind == "reward_model_refused"
        assert f"gives 2 numbers, and RewardModel.label is {label}" in found.message


# ---- failures


def test_each_failure_is_counted_and_none_is_a_zero(server):
    server.replies = {
        "worst": [gives(0.0)],
        "busy": [fails(429, Retry_After="0"), CLOSE, gives(2.0)],
        "gone": [CLOSE],
        "garbage": [gives(1.0)._replace(body="<html>no")],
        "endless": [gives(float("inf"))],
        "none": [gives()],
        "long": [fails(400, "maximum context length")],
    }
    model = RewardModel(url=server.url, retries=3)
    with started([model], 1, timeout_s=150.0, max_failures=1.0) as pool:
        rewards = [one.reward for one in scored(pool, *server.replies, "fine")]
    assert rewards == [0.0, 2.0, None, None, None, None, None, 0.5]
    failed = {"reward_model_failed": 1, "reward_model_refused": 4}
    assert counted(pool) == {"scored": 3, "zero": 1, "retried": 5} | failed


def test_a_model_that_does_not_answer_is_refused_before_a_run():
    pool = RewardPool([RewardModel(url=URL, retries=0)], 1, timeout_s=150.0)
    with pytest.raises(ConfigError, match="reward_model_failed: reward_model: .*See that the serv"):
        pool.start(Prompt(id=0, token_ids=[1], text=""))


# ---- in vLLM


class PoolingServer(Server):
    """`vllm serve MODEL --runner pooling`."""

    def command(self):
        words = ["--model", self.model, "--runner", "pooling", "--host", "127.0.0.1"]
        words += ["--port", str(self.port), "--dtype", "float32", "--max-model-len", "256"]
        words += ["--gpu-memory-utilization", "0.1"]  # of the memory, whatever else is in it
        return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *words]


@pytest.fixture(scope="module")
def served_model(tmp_path_factory):
    """A reward model in vLLM, and its server."""
    folder = tmp_path_factory.mktemp("reward-model")
    tiny_reward_model(folder / "model")
    settings = ServerSettings(kv_cache_gib=0.1)
    server = PoolingServer(str(folder / "model"), settings, "", [], folder, 0, "reward")
    server.start()
    try:
        server.wait_ready()
        tokens = RewardModel(url=server.url, reads="tokens")
        messages = RewardModel(url=server.url)
        yield SimpleNamespace(tokens=tokens, messages=messages, server=server, folder=server.model)
    finally:
        server.stop()


@pytest.fixture(scope="module")
def network(served_model):
    return AutoModelForSequenceClassification.from_pretrained(served_model.folder).eval()


def own_score(network, token_ids):
    with torch.no_grad():
        return network(torch.tensor([token_ids])).logits.item()


def test_scores_are_those_of_transformers(served_model, network):
    texts = [f"What is {number} + {number}?" * (1 + number % 5) for number in range(32)]
    inputs = [byte_tokenizer().encode(text) for text in texts]

    async def scores():
        columns = [{"prompt_token_ids": ids[:4], "response_token_ids": ids[4:]} for ids in inputs]
        return await asyncio.gather(*(served_model.tokens("", "", **one) for one in columns))

    own = [own_score(network, ids) for ids in inputs]
    assert asyncio.run(scores()) == pytest.approx(own, abs=1e-4)
    assert max(own) < 0, "an activation would put them between 0 and 1"


def test_messages_go_through_the_reward_models_own_template(served_model, network):
    messages = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    rendered = byte_tokenizer().apply_chat_template(messages, return_dict=False)
    found = score(served_model.messages, "4", "2+2?")
    assert found == pytest.approx(own_score(network, rendered), abs=1e-4)


def test_an_activation_is_applied_only_if_asked_for(served_model, network):
    squashed = RewardModel(url=served_model.server.url, reads="tokens", activation=True)
    raw = torch.tensor(own_score(network, [5, 6, 7, 2]))
    assert score(squashed) == pytest.approx(raw.sigmoid().item(), abs=1e-4)


def test_an_input_beyond_the_context_is_refused_and_not_cut(served_model):
    found = failure(served_model.tokens, response_token_ids=[7] * 300)
    assert found.kind == "reward_model_refused" and "256" in found.message


def test_a_run_learns_from_its_scores(
    served_model, network, lent_server: LentServer, policy_folder, tmp_path
):
    rewards = {"rewards": [served_model.tokens], "reward_timeout_s": 150.0}
    run = fit(lent_server, policy_folder, tmp_path, steps=1, **rewards)
    groups = [group for _, group in run.groups]
    assert groups
    for group in groups:
        for rollout in group.rollouts:
            own = own_score(network, [*group.prompt.token_ids, *rollout.token_ids])
            assert rollout.reward == pytest.approx(own, abs=1e-4)


# ---- settings


def policy_with(tokenizer):
    return SimpleNamespace(tokenizer=tokenizer)


def test_tokens_need_a_server_that_makes_the_policys_tokens(served_model, monkeypatch):
    rewards = [served_model.tokens, served_model.messages]
    tokenizer = byte_tokenizer()
    check_reward_models(rewards, policy_with(tokenizer))
    monkeypatch.setattr(type(tokenizer), "encode", lambda *_, **__: [9, 9])
    with pytest.raises(ConfigError, match="Set reads to messages or text"):
        check_reward_models(rewards, policy_with(tokenizer))


def test_tokens_need_a_server_that_says_its_own():
    with pytest.raises(ConfigError, match="does not say its own"):
        check_reward_models([RewardModel(url=URL, reads="tokens")], policy_with(byte_tokenizer()))
