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

from lrl.errors import CountedError
from lrl.generators.server import Server
from lrl.generators.settings import ServerSettings
from lrl.rewards import RewardModel
from lrl.types import Chat, Prompt
from tests.rewards.judge_server import ScoreServer, fails, gives, served
from tests.rewards.scenes import started
from tests.tiny_policies import byte_tokenizer, tiny_reward_model

URL = "http://127.0.0.1:9"


@pytest.fixture
def server():
    with served(ScoreServer()) as score_server:
        yield score_server


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.01)


def score(model, response="r", prompt="p"):
    return asyncio.run(model(prompt, response, prompt_messages=None))


def failure(model, response="r"):
    with pytest.raises(CountedError) as caught:
        score(model, response)
    return caught.value


# ---- what it is asked


def test_without_a_chat_the_prompt_is_the_users_message(server):
    assert score(RewardModel(url=server.url)) == 0.5
    messages = [{"role": "user", "content": "p"}, {"role": "assistant", "content": "r"}]
    assert server.bodies == [{"messages": messages, "use_activation": False}]


def test_a_pool_gives_it_all_messages_of_a_chat(server):
    system = {"role": "system", "content": "Be short."}
    prompt = Prompt(id=0, token_ids=[5, 6], text="2+2?", chat=Chat([system]))
    with started([RewardModel(url=server.url)], 1, timeout_s=150.0, first=prompt):
        assert server.bodies[0]["messages"] == [system, {"role": "assistant", "content": "0"}]


def test_the_score_is_that_of_the_label(server):
    server.replies["r"] = [gives(-3.0, 0.25)]
    assert score(RewardModel(url=server.url, label=1)) == 0.25
    assert score(RewardModel(url=server.url, label=0)) == -3.0
    for label in (None, 2, -1):
        found = failure(RewardModel(url=server.url, label=label))
        assert found.kind == "reward_model_refused"
        assert f"gives 2 numbers, and RewardModel.label is {label}" in found.message


# ---- failures


ODD = [gives(1.0)._replace(body="<html>no"), gives(float("inf")), gives(), fails(400, "too long")]


@pytest.mark.parametrize("reply", ODD)
def test_what_has_no_finite_number_is_a_failure_and_never_a_score(server, reply):
    server.replies["r"] = [reply]
    assert failure(RewardModel(url=server.url)).kind == "reward_model_refused"


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
        yield SimpleNamespace(reward=RewardModel(url=server.url), folder=server.model)
    finally:
        server.stop()


@pytest.fixture(scope="module")
def network(served_model):
    return AutoModelForSequenceClassification.from_pretrained(served_model.folder).eval()


def own_score(network, prompt, response):
    messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]
    token_ids = byte_tokenizer().apply_chat_template(messages, return_dict=False)
    with torch.no_grad():
        return network(torch.tensor([token_ids])).logits.item()


def test_scores_are_those_of_transformers_in_the_models_own_template(served_model, network):
    texts = [f"What is {number} + {number}?" * (1 + number % 5) for number in range(32)]

    async def scores():
        one = served_model.reward
        return await asyncio.gather(*(one("2+2?", text, prompt_messages=None) for text in texts))

    own = [own_score(network, "2+2?", text) for text in texts]
    assert asyncio.run(scores()) == pytest.approx(own, abs=1e-4)
    assert min(own) > 1, "an activation would put them between 0 and 1"


def test_an_activation_is_applied_only_if_asked_for(served_model, network):
    squashed = RewardModel(url=served_model.reward.endpoint.url, activation=True)
    raw = torch.tensor(own_score(network, "p", "r"))
    assert score(squashed) == pytest.approx(raw.sigmoid().item(), abs=1e-4)


def test_an_input_beyond_the_context_is_refused_and_not_cut(served_model):
    found = failure(served_model.reward, "4" * 300)
    assert found.kind == "reward_model_refused" and "256" in found.message
