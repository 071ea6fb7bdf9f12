"""A reward model: what it is asked, that a failure is never a 0, and that vLLM's scores are those of
transformers. The endpoints are real servers.

Covers lrl/generators/pooling_server.py, lrl/members/reward_models.py,
lrl/preflight/reward_models.py, lrl/rewards/score_endpoint.py.
"""

from __future__ import annotations

import asyncio
import inspect
import pickle
import re
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from jsonargparse import ArgumentParser
from transformers import AutoModelForSequenceClassification

sys.path.insert(0, str(Path(__file__).parent))

import odd_rewards  # noqa: E402
from judge_server import CLOSE, HANG, ScoreServer, fails, gives, served  # noqa: E402
from scenes import counted, rollouts_of, scored  # noqa: E402

from lrl.checkpoints.made_with import fingerprint  # noqa: E402
from lrl.errors import ConfigError, RewardModelError  # noqa: E402
from lrl.generators.pooling_server import PoolingServer  # noqa: E402
from lrl.generators.settings import ServerSettings  # noqa: E402
from lrl.members.launchers import Given  # noqa: E402
from lrl.members.reward_models import RewardModels  # noqa: E402
from lrl.preflight.reward_models import check_reward_models  # noqa: E402
from lrl.rewards import (  # noqa: E402
    Reward,
    RewardModel,
    RewardModelServer,
    RewardPool,
)
from lrl.system import job_supervisor  # noqa: E402
from lrl.types import Chat, Fork, Prompt  # noqa: E402
from tests.http_call import call  # noqa: E402
from tests.lent_server import LentServer  # noqa: E402
from tests.runs.test_async_run import fit  # noqa: E402
from tests.tiny_policies import (  # noqa: E402
    byte_tokenizer,
    tiny_llama,
    tiny_reward_model,
    with_special_tokens,  # noqa: E402
)

URL = "http://127.0.0.1:9"
KEY = "key-0123456789abcdef"
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
    with pytest.raises(RewardModelError) as caught:
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
    pool = RewardPool([RewardModel(url=server.url), odd_rewards.told], 1, timeout_s=150.0)
    pool.start(prompt)
    try:
        assert server.bodies[0]["messages"] == [system, {"role": "assistant", "content": "0"}]
        (rollout,) = scored(pool, "four")
        assert rollout.reward_parts == {"reward_model": 0.5, "told": 1 + 1000 * 12}
    finally:
        pool.close()


def test_of_an_episode_with_branches_it_gets_the_tokens_of_the_last_one():
    pool = RewardPool([odd_rewards.told], 1)
    pool._tells_tokens = True  # as beside a reward that reads them
    pool.start()
    try:
        (rollout,) = rollouts_of("four")
        rollout.token_ids, rollout.forks = [3, 4, 5, 6], [Fork(2, 1)]
        asyncio.run(pool.score(Prompt(id=0, token_ids=[1, 2], text="go"), [rollout]))
        assert rollout.reward_parts == {"told": 1 + 2 + 1000 * 356}
    finally:
        pool.close()


def test_without_a_reward_that_reads_tokens_none_are_sent_to_a_worker():
    pool = RewardPool([odd_rewards.told], 1, max_failures=1.0)
    pool.start()
    try:
        (rollout,) = scored(pool, "four")
        assert "prompt_token_ids" in rollout.reward_failure
    finally:
        pool.close()


@pytest.mark.parametrize("response_token_ids", [[7, 2], []])
def test_tokens_are_sent_as_they_are(monkeypatch, response_token_ids):
    sent = []
    model = RewardModel(url=URL, reads="tokens")

    async def answer(body):
        sent.append(body)
        return [1.5]

    monkeypatch.setattr(model._endpoint, "answer", answer)
    assert score(model, response_token_ids=response_token_ids) == 1.5
    assert sent == [{"input": [5, 6, *response_token_ids], "use_activation": False}]


def test_the_score_is_that_of_the_label(server):
    server.replies["r"] = [gives(-3.0, 0.25)]
    assert score(RewardModel(url=server.url, label=1)) == 0.25
    assert score(RewardModel(url=server.url, label=0)) == -3.0
    for label in (None, 2):
        found = failure(RewardModel(url=server.url, label=label))
        assert found.kind == "reward_model_refused"
        assert f"gives 2 numbers, and RewardModel.label is {label}" in found.message


def test_the_key_is_sent_and_is_in_no_object_and_no_message(server, monkeypatch):
    monkeypatch.setenv("MODEL_KEY", KEY)
    model = RewardModel(url=server.url, api_key_env="MODEL_KEY")
    server.replies["r"] = [fails(401, f"bad {KEY}")]
    found = failure(model)
    assert "bad ***. Set the key" in found.message and "RewardModel.api_key_env" in found.message
    assert server.headers[0]["Authorization"] == f"Bearer {KEY}"
    assert KEY not in repr(model) and KEY.encode() not in pickle.dumps(model)


# ---- failures


def test_each_failure_is_counted_and_none_is_a_zero(server):
    garbage = gives(1.0)._replace(body="<html>no")
    server.replies = {
        "worst": [gives(0.0)],
        "busy": [fails(429, Retry_After="0"), gives(2.0)],
        "slow": [HANG, gives(3.0)],
        "restarting": [CLOSE, fails(503), gives(4.0)],
        "gone": [CLOSE],
        "garbage": [garbage],
        "endless": [gives(float("inf"))],
        "none": [gives()],
        "long": [fails(400, "maximum context length")],
    }
    model = RewardModel(url=server.url, timeout_s=5.0, retries=3)
    responses = [*server.replies, *(f"fine {number}" for number in range(91))]
    pool = RewardPool([model], 1, timeout_s=150.0, max_failures=1.0)
    pool.start()
    try:
        rollouts = dict(zip(responses, scored(pool, *responses), strict=True))
    finally:
        pool.close()
    rewards = {name: one.reward for name, one in rollouts.items() if not name.startswith("fine")}
    failed = dict.fromkeys(("gone", "garbage", "endless", "none", "long"))
    assert rewards == {"worst": 0.0, "busy": 2.0, "slow": 3.0, "restarting": 4.0, **failed}
    assert all(rollouts[f"fine {number}"].reward == 0.5 for number in range(91))
    assert counted(pool) == {
        "scored": 95,
        "zero": 1,
        "retried": 5,
        "reward_model_failed": 1,
        "reward_model_refused": 4,
    }
    assert "maximum context length" in rollouts["long"].reward_failure


def test_no_response_waits_longer_than_the_deadline(server):
    server.replies["r"] = [HANG]
    model = RewardModel(url=server.url, timeout_s=0.2, deadline_s=0.5, retries=1000)
    found = failure(model)
    assert found.kind == "reward_model_failed" and "RewardModel.deadline_s (0.5)" in found.message


def test_a_model_that_does_not_answer_is_refused_before_a_run():
    pool = RewardPool([RewardModel(url=URL, retries=0)], 1, timeout_s=150.0)
    with pytest.raises(ConfigError, match="reward_model_failed: reward_model: .*See that the serv"):
        pool.start(Prompt(id=0, token_ids=[1], text=""))


def test_outside_of_a_run_a_model_has_no_server():
    found = failure(RewardModel(model="anywhere"))
    assert found.kind == "reward_model_refused" and "Outside of a run give" in found.message


# ---- a server of the run's own


class Program(PoolingServer):
    """The server with a small program in the place of vLLM."""

    SOURCE = """
import http.server, sys

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""

    def command(self):
        return [sys.executable, "-c", self.SOURCE, str(self.port)]


@pytest.fixture
def program(tmp_path):
    settings = ServerSettings(start_timeout_s=60.0, stop_timeout_s=30.0)
    found = Program("", settings, [], tmp_path, "reward model 0")
    yield found
    found.close()


def until(holds, within_s=60.0):
    end = time.monotonic() + within_s
    while not holds() and time.monotonic() < end:
        time.sleep(0.02)
    return holds()


def test_a_server_that_dies_answers_again_at_the_same_address(program):
    program.open()
    url, first = program.url, program.processes()
    for process in first:
        process.kill()
    assert until(lambda: program._starts == 2 and program.alive and program.ready())
    assert program.url == url and not {one.pid for one in first} & {
        one.pid for one in program.processes()
    }


@pytest.mark.parametrize("cause", ["ValueError: no room", "Is a directory"])
def test_a_server_that_cannot_start_again_is_tried_again_and_says_why(
    program, caplog, monkeypatch, cause
):
    monkeypatch.setattr(job_supervisor, "FIRST_BACKOFF_S", 0.01)
    program.open()
    program.SOURCE = "raise ValueError('no room')"
    if cause == "Is a directory":  # as a disk without room for a file
        program.log_path.unlink()
        program.log_path.mkdir()
    for process in program.processes():
        process.kill()
    assert until(lambda: caplog.text.count(cause) > 2)
    assert "Reward model 0 is replaced in" in caplog.text


def test_a_server_that_is_closed_is_not_started_again(program, caplog):
    program.open()
    left = program.processes()
    program.close()
    assert not program.alive and "is replaced" not in caplog.text
    assert left and not any(process.is_running() for process in left)


@pytest.fixture(scope="module")
def served_model(tmp_path_factory):
    """A reward model in vLLM, as a run serves it, and its server."""
    folder = tmp_path_factory.mktemp("reward-model")
    tiny_reward_model(folder / "model")
    settings = RewardModelServer(dtype="float32", max_tokens=256, kv_cache_gib=0.1)
    model = RewardModel(model=str(folder / "model"), reads="tokens", server=settings)
    twin = RewardModel(model=str(folder / "model"), server=settings, name="twin")
    models = RewardModels(folder, lambda: None)
    try:
        models.serve([model, twin])
        (one,) = models.servers.values()
        yield SimpleNamespace(tokens=model, messages=twin, server=one, folder=folder / "model")
    finally:
        models.close()


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
    model = served_model.tokens
    squashed = RewardModel(model=model.model, reads="tokens", activation=True)
    squashed.serve_at(served_model.server.url, served_model.server.token)
    raw = torch.tensor(own_score(network, [5, 6, 7, 2]))
    assert score(squashed) == pytest.approx(raw.sigmoid().item(), abs=1e-4)


def test_an_input_beyond_the_context_is_refused_and_not_cut(served_model):
    found = failure(served_model.tokens, response_token_ids=[7] * 300)
    assert found.kind == "reward_model_refused" and "256" in found.message


def test_a_server_of_the_run_answers_with_its_token_alone(served_model):
    for route in ("/classify", "/tokenize", "/v1/models", "/collective_rpc"):
        assert call(served_model.server.url, "POST", route, {}, b"{}")[0] == 401
    stranger = RewardModel(url=served_model.server.url, reads="tokens")
    assert "status 401" in failure(stranger).message


def test_a_run_learns_from_its_scores(
    served_model, network, lent_server: LentServer, policy_folder, tmp_path, monkeypatch
):
    # The run finds its server started, and leaves it running.
    monkeypatch.setattr(RewardModels, "_server", lambda *_: served_model.server)
    model = RewardModel(model=str(served_model.folder), reads="tokens")
    run = fit(
        lent_server, policy_folder, tmp_path, steps=1, rewards=[model], reward_timeout_s=150.0
    )
    groups = [group for _, group in run.groups]
    assert groups
    for group in groups:
        for rollout in group.rollouts:
            own = own_score(network, [*group.prompt.token_ids, *rollout.token_ids])
            assert rollout.reward == pytest.approx(own, abs=1e-4)


# ---- settings


def policy_with(tokenizer):
    return SimpleNamespace(tokenizer=tokenizer)


def data_with(*rewards, max_model_tokens=100, reward_launcher=None):
    return SimpleNamespace(
        reward_pool=SimpleNamespace(rewards=rewards),
        max_model_tokens=max_model_tokens,
        reward_launcher=reward_launcher,
    )


def accepted(*rewards):
    check_reward_models(rewards, policy_with(byte_tokenizer()), data_with(*rewards), False)


def refusal(*rewards, tokenizer=None, on_cuda=False, **data):
    with pytest.raises(ConfigError) as caught:
        policy = policy_with(tokenizer or byte_tokenizer())
        check_reward_models(rewards, policy, data_with(*rewards, **data), on_cuda)
    message = str(caught.value)
    assert len(message) < 500 and len(message.splitlines()) <= 2
    return message


def test_tokens_need_a_server_that_makes_the_policys_tokens(served_model, monkeypatch):
    monkeypatch.setenv("MODEL_KEY", served_model.server.token)
    model = RewardModel(url=served_model.server.url, reads="tokens", api_key_env="MODEL_KEY")
    accepted(model)
    other = byte_tokenizer()
    monkeypatch.setattr(type(other), "encode", lambda *_, **__: [9, 9])
    assert "Set reads to messages or text" in refusal(model, tokenizer=other)
    assert "status 401" in refusal(RewardModel(url=served_model.server.url, reads="tokens"))


def test_tokens_need_a_model_with_the_policys_tokenizer(served_model):
    check = [served_model.tokens, served_model.messages]
    accepted(*check)
    other = byte_tokenizer()
    other.add_tokens(["<tool>"])
    found = refusal(*check, tokenizer=other)
    assert "the token '<tool>' is None there and 259 here" in found and "set it to mess" in found


def test_a_model_that_cannot_work_is_refused_before_a_server_starts(served_model, tmp_path):
    folder = str(served_model.folder)
    assert "RewardModel.label is 1, and the model has the labels 0 to 0" in refusal(
        RewardModel(model=folder, label=1)
    )
    assert (
        "server.max_tokens is 256 tokens, and a prompt with its response may have 300"
        in refusal(served_model.tokens, max_model_tokens=300)
    )
    assert "listens on this machine alone" in refusal(
        served_model.messages, reward_launcher=Given(1)
    )
    assert "RewardModel.server.device is null" in refusal(served_model.messages, on_cuda=True)
    with_device = RewardModel(model=folder, server=RewardModelServer(device=0))
    assert "the trainer is on a CPU" in refusal(with_device)
    assert "RewardModel.model='no/such'" in refusal(RewardModel(model="no/such"))
    writer = tiny_llama(tmp_path / "writer")
    assert "is a LlamaForCausalLM, whose number" in refusal(RewardModel(model=str(writer)))
    plain = tiny_reward_model(tmp_path / "plain")
    with_special_tokens("$A").save_pretrained(plain)
    (plain / "chat_template.jinja").unlink(missing_ok=True)
    assert "has no chat template" in refusal(RewardModel(model=str(plain)))


BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "no place": ({"url": None}, "RewardModel.url is None and RewardModel.model is None"),
    "two places": ({"model": "m"}, "give one of them"),
    "no model": ({"url": None, "model": " "}, "RewardModel.model is ' '"),
    "no address": ({"url": "model:8000"}, "RewardModel.url is 'model:8000'"),
    "settings of another's server": ({"server": RewardModelServer()}, "RewardModel.server is set"),
    "a key for the run's own": (
        {"url": None, "model": "m", "api_key_env": "KEY"},
        "RewardModel.api_key_env is set",
    ),
    "something else to read": ({"reads": "words"}, "RewardModel.reads is 'words'"),
    "no label": ({"label": -1}, "RewardModel.label is -1"),
    "no time": ({"timeout_s": 0}, "RewardModel.timeout_s is 0"),
    "a request beyond the deadline": ({"timeout_s": 200}, "RewardModel.deadline_s"),
    "fewer than no retries": ({"retries": -1}, "RewardModel.retries is -1"),
    "a variable that is not set": ({"api_key_env": "NO_SUCH_KEY"}, "NO_SUCH_KEY, which is not set"),
}


@pytest.mark.parametrize(("settings", "named"), BROKEN.values(), ids=BROKEN)
def test_a_setting_that_cannot_work_is_refused_by_name(settings, named):
    with pytest.raises(ConfigError) as caught:
        RewardModel(**({"url": URL} | settings))
    assert named in str(caught.value) and len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"device": -1}, "RewardModel.server.device is -1"),
        ({"max_tokens": 0}, "RewardModel.server.max_tokens is 0"),
        ({"gpu_memory_utilization": 1.5}, "give at most 1"),
        ({"kv_cache_gib": 0}, "RewardModel.server.kv_cache_gib is 0"),
        ({"start_timeout_s": 0}, "RewardModel.server.start_timeout_s is 0"),
    ],
)
def test_a_setting_of_the_server_that_cannot_work_is_refused_by_name(settings, named):
    with pytest.raises(ConfigError, match=re.escape(named)):
        RewardModelServer(**settings)


def test_a_pool_that_would_end_it_before_its_deadline_is_refused():
    with pytest.raises(ConfigError, match="data.reward_timeout_s is 10.*'reward_model'"):
        RewardPool([RewardModel(url=URL)])


def test_a_checkpoint_sees_a_change_of_the_score_and_not_of_how_long_it_is_tried():
    same = [RewardModel(url=URL), RewardModel(url=URL, retries=1, timeout_s=1.0)]
    others = [
        RewardModel(url=URL, reads="text"),
        RewardModel(model="m"),
        RewardModel(url=URL + "0"),
    ]
    assert len({fingerprint(model) for model in same}) == 1
    assert len({fingerprint(model) for model in [*same, *others]}) == 4


def test_it_is_configured_by_class_path():
    parser = ArgumentParser()
    parser.add_argument("--rewards", type=list[Reward])
    init_args = {"model": "m", "server": {"max_tokens": 64}, "weight": 0.5}
    given = [{"class_path": "lrl.rewards.RewardModel", "init_args": init_args}]
    (model,) = parser.instantiate(parser.parse_object({"rewards": given})).rewards
    assert (type(model), model.server.max_tokens, model.weight) == (RewardModel, 64, 0.5)


@pytest.mark.parametrize(
    ("heading", "kind"),
    [("## A reward model", RewardModel), ("### Its server", RewardModelServer)],
)
def test_the_settings_of_the_page_are_those_of_the_class(heading, kind):
    page = (Path(__file__).parents[2] / "docs/rewards.md").read_text()
    section = re.split("\n##", page.partition(f"\n{heading}\n")[2])[0]
    rows = re.findall(r"^\| (`[^|]+) \|", section, re.M)
    named = {word for row in rows for word in re.findall(r"`(\w+)`", row)}
    assert named == set(inspect.signature(kind).parameters) - {"weight", "name"}
