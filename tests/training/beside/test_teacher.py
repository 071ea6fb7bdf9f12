"""On-policy distillation: the gradient, and teachers on a server, whose log-probs are those of the
model: nothing is trained without them, and what cannot teach is refused before a run."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterable, Iterator
from itertools import repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from lrl.advantages import GroupMean
from lrl.errors import ConfigError, TeacherError
from lrl.objectives import AIPO, REINFORCE, TBA
from lrl.preflight.model import check_beside, check_reference, check_teacher, shape_of
from lrl.preflight.settings import check_objective
from lrl.training.beside.teacher import Teacher
from lrl.types import ENVIRONMENT, Fork, Group, Rollout
from tests.lent_server import LentServer
from tests.policies import make_group, opened, pack, prepared
from tests.rewards.judge_server import CLOSE, JudgeServer, Reply, fails, served
from tests.runs.test_async_run import GROUPS, Witness, fit
from tests.tiny_policies import byte_tokenizer, response_logprobs, save_tiny

URL = "http://127.0.0.1:9"
KEY = "key-0123456789abcdef"
LOGPROB = -1.5
Positions = list[dict[str, Any] | None]


def positions(text: list[int], logprobs: Iterable[float] = repeat(LOGPROB)) -> Positions:
    """vLLM's `prompt_logprobs` of a text: none of its first token."""
    entries = zip(text[1:], logprobs, strict=False)
    return [None, *({str(token): {"logprob": one, "rank": 1}} for token, one in entries)]


def gives(*texts: Positions) -> Reply:
    """What vLLM's route for completions answers."""
    choices = [
        {"index": index, "text": "a", "prompt_logprobs": text} for index, text in enumerate(texts)
    ]
    return Reply(200, json.dumps({"choices": choices[::-1]}), {})


class TeacherServer(JudgeServer):
    """Use: `with served(TeacherServer()) as server`."""

    def __init__(self) -> None:
        super().__init__()
        self.script: list[Reply | None] = []
        """Replies to the requests for log-probs, in their order; None for the usual one, and the
        last one stays."""

    def reply_to(self, path: str, headers: dict[str, str], body: dict[str, Any]) -> Reply:
        if path == "/tokenize":
            tokens = byte_tokenizer().encode(body["prompt"], add_special_tokens=False)
            return Reply(200, json.dumps({"tokens": tokens, "max_model_len": 1024}), {})
        if path != "/v1/completions":
            return fails(404, f"no route {path}")
        self.bodies.append(body)
        self.headers.append(headers)
        reply = self.script[0] if self.script else None
        if len(self.script) > 1:
            self.script.pop(0)
        return reply or gives(*(positions(text) for text in body["prompt"]))


@pytest.fixture
def server() -> Iterator[TeacherServer]:
    with served(TeacherServer()) as found:
        assert isinstance(found, TeacherServer)
        yield found


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.01)
    monkeypatch.setattr("openai._base_client.MAX_RETRY_DELAY", 0.05)


def asked(teacher: Teacher, group: Group) -> list[list[float] | None]:
    asyncio.run(teacher.ask(group))
    return [rollout.reference_logprobs for rollout in group.rollouts]


# ---- in the trainer


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(("coefficient", "weight"), [(1.0, 0.0), (0.5, 1.0)])
def test_the_gradient_is_that_of_a_plain_computation_in_float64(
    folder: str, alike_folder: str, coefficient: float, weight: float, temperature: float
) -> None:
    policy = opened(folder, objective=REINFORCE(), reference=Teacher(alike_folder, coefficient))
    given = [make_group(index) for index in range(3)]
    groups = prepared(policy, given, temperature=temperature)
    for group in groups:
        for rollout in group.rollouts:
            assert rollout.reward is not None
            rollout.reward *= weight
    (batch,) = pack(groups, 10_000, temperature)
    policy.compute_loss(batch).backward()

    own = AutoModelForCausalLM.from_pretrained(folder).double()
    theirs = AutoModelForCausalLM.from_pretrained(alike_folder).double()
    loss = torch.zeros((), dtype=torch.float64)
    for group in groups:
        mean = sum(rollout.reward or 0.0 for rollout in group.rollouts) / len(group.rollouts)
        for rollout in group.rollouts:
            words = group.prompt.token_ids, rollout.token_ids, temperature
            pi, pi_teacher = (response_logprobs(model, *words) for model in (own, theirs))
            advantages = rollout.reward - mean + coefficient * (pi_teacher - pi).detach()
            loss -= (advantages * pi).sum()
    loss.backward()
    expected = dict(own.named_parameters())
    for name, found in policy.network.named_parameters():
        torch.testing.assert_close(
            found.grad.double(), expected[name].grad, rtol=1e-3, atol=1e-4, msg=name
        )


def test_an_objective_of_whole_responses_is_refused_beside_a_teacher() -> None:
    data: Any = SimpleNamespace(
        advantages=GroupMean(), stragglers="wait", environment=None, max_skipped_per_step=0
    )

    def check(objective: Any) -> None:
        policy: Any = SimpleNamespace(objective=objective, reference=Teacher("any"), critic=None)
        check_objective(policy, data)

    check(AIPO())
    with pytest.raises(ConfigError, match="model.objective TBA .*rewards each token"):
        check(TBA())


def test_models_beside_the_policy_have_its_tokens(folder: str, tmp_path: Path) -> None:
    """A teacher may have more rows, which are often padded; but it has the policy's tokenizer."""
    rows = shape_of(folder, None).vocabulary
    larger = save_tiny("llama", tmp_path / "larger", vocab_size=rows + 8)
    policy: Any = SimpleNamespace(
        tokenizer=byte_tokenizer(), attention=None, policy_folder="own", reference=Teacher(larger)
    )

    def check(model: str = larger, rows: int = rows) -> None:
        shape: Any = SimpleNamespace(vocabulary=rows)
        check_reference(model, policy, shape)

    check()
    with pytest.raises(ConfigError, match=f"has {rows + 8} tokens"):
        check(rows=rows + 9)
    with pytest.raises(ConfigError, match=f"critic.model=.* has {rows + 8} tokens .* {rows}"):
        check_beside(larger, "model.critic.model", policy, shape_of(folder, None))
    with pytest.raises(ConfigError, match="model.reference.model="):
        check(str(tmp_path / "none"))
    other = byte_tokenizer()
    other.add_tokens(["<tool>"])
    other.save_pretrained(larger)
    with pytest.raises(ConfigError, match="another tokenizer.*same family"):
        check()


# ---- on a server


def test_a_run_learns_from_the_log_probs_of_transformers(
    lent_server: LentServer, policy_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The generator is the teacher, too: in the first step it has the weights of the folder."""
    monkeypatch.setenv("TEACHER_KEY", lent_server.token)
    teacher = Teacher(url=lent_server.url, api_key_env="TEACHER_KEY")
    learning = {"reference": teacher}
    run = fit(lent_server, policy_folder, tmp_path, steps=1, temperature=1.0, learning=learning)
    model = AutoModelForCausalLM.from_pretrained(policy_folder)
    for _, group in run.groups:
        for rollout in group.rollouts:
            with torch.no_grad():
                own = response_logprobs(model, group.prompt.token_ids, rollout.token_ids)
            assert rollout.reference_logprobs == pytest.approx(own.tolist(), abs=1e-4)
    assert len(run.groups) == GROUPS


def test_each_token_of_an_episode_with_branches_has_the_log_prob_of_its_own_branch(
    server: TeacherServer, folder: str
) -> None:
    """As for a teacher in the trainer."""
    model = AutoModelForCausalLM.from_pretrained(folder)

    def says(path: str, headers: Any, body: dict[str, Any]) -> Reply:
        found = []
        for text in body["prompt"]:
            with torch.no_grad():
                logprobs = response_logprobs(model, text[:1], text[1:])
            found.append(positions(text, logprobs.tolist()))
        return gives(*found)

    server.reply_to = says  # type: ignore[method-assign]
    groups = [make_group(0), make_group(0)]
    for group in groups:
        group.prompt.token_ids = [9, 8, 7]
        group.rollouts[1] = Rollout(token_ids=[])
        branched = Rollout(
            token_ids=[3, 4, 5, 6, 7],
            logprobs=[-1.0] * 5,
            versions=[0, 0, ENVIRONMENT, 0, 0],
            turn_ends=[2, 5],
            turn_rewards=[0.0, 0.0],
            forks=[Fork(2, 1)],
        )
        group.rollouts.append(branched)
    (group,) = prepared(opened(folder, reference=Teacher(folder)), groups[1:])
    expected = [rollout.reference_logprobs for rollout in group.rollouts]
    found = asked(Teacher(url=server.url), groups[0])
    for theirs, ours in zip(found, expected, strict=True):
        assert theirs is None if ours is None else theirs == pytest.approx(ours, abs=1e-5)
    assert sum(numbers is None for numbers in found) == 1


def test_a_group_is_asked_for_once_and_in_one_request_with_the_key(
    server: TeacherServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEACHER_KEY", KEY)
    teacher, group = Teacher(url=server.url, api_key_env="TEACHER_KEY"), make_group(0)
    found = asked(teacher, group)
    assert asked(teacher, group) == found
    assert [set(numbers or ()) for numbers in found] == [{LOGPROB}] * len(group.rollouts)
    assert server.bodies == [{"prompt": TEXTS, "max_tokens": 1, "prompt_logprobs": 0}]
    assert server.headers[0]["Authorization"] == f"Bearer {KEY}"
    assert KEY not in str(vars(teacher.endpoint))


# ---- a server that fails


def test_a_group_waits_until_the_server_answers_again(server: TeacherServer) -> None:
    server.script = [CLOSE, fails(503), CLOSE, None]
    group = make_group(0)
    assert None not in asked(Teacher(url=server.url, timeout_s=60.0, deadline_s=120.0), group)


GROUP = make_group(0)
TEXTS = [GROUP.prompt.token_ids + rollout.token_ids for rollout in GROUP.rollouts]
READ = "cannot read its answer"


def logprob_of(number: float) -> Reply:
    return gives(*(positions(text, repeat(number)) for text in TEXTS))


GARBAGE: dict[str, tuple[Reply, str]] = {
    "of fewer texts": (gives(positions([1, 2])), READ),
    "of fewer tokens": (gives(*[positions([1, 2])] * 4), READ),
    "of other tokens": (gives(*(positions([33] * len(text)) for text in TEXTS)), READ),
    **{
        f"a log-prob of {number}": (logprob_of(number), "is no log-prob")
        for number in (math.nan, math.inf, -math.inf, 3.0)
    },
}


@pytest.mark.parametrize(("reply", "named"), GARBAGE.values(), ids=GARBAGE)
def test_an_answer_without_all_log_probs_sets_none(
    server: TeacherServer, reply: Reply, named: str
) -> None:
    server.script = [reply]
    group = make_group(0)
    with pytest.raises(TeacherError, match=named) as caught:
        asked(Teacher(url=server.url), group)
    assert caught.value.kind == "teacher_refused" and server.url in str(caught.value)
    assert [rollout.reference_logprobs for rollout in group.rollouts] == [None] * 4
    assert group.reference_version is None and len(server.bodies) == 1


def test_a_run_whose_teacher_dies_ends_and_names_it_and_trains_nothing_without_it(
    server: TeacherServer, lent_server: LentServer, policy_folder: Path, tmp_path: Path
) -> None:
    trial = 1
    server.script = [None] * (trial + GROUPS) + [CLOSE]
    witness = Witness()
    with pytest.raises(TeacherError, match=f"teacher_failed: {server.url}.*deadline_s 3"):
        fit(
            lent_server,
            policy_folder,
            tmp_path,
            callbacks=[witness],
            temperature=1.0,
            learning={"reference": Teacher(url=server.url, timeout_s=3.0, deadline_s=3.0)},
        )
    assert len(witness.groups) == GROUPS, "one step"
    for _, group in witness.groups:
        assert all(set(rollout.reference_logprobs or ()) == {LOGPROB} for rollout in group.rollouts)


def test_a_group_of_a_checkpoint_is_asked_for_when_its_step_comes(
    server: TeacherServer, folder: str
) -> None:
    policy = opened(folder, reference=Teacher(url=server.url))
    run = SimpleNamespace(
        fleet=SimpleNamespace(call=lambda work, what, within_s: asyncio.run(work))
    )
    policy._trainer = SimpleNamespace(datamodule=SimpleNamespace(run=run))  # type: ignore[assignment]
    (group,) = prepared(policy, [make_group(0)])
    assert not hasattr(policy.reference, "network")
    assert all(set(one.reference_logprobs or ()) == {LOGPROB} for one in group.rollouts)


# ---- before a run


def check(teacher: Teacher, longest: int = 100, temperature: float = 1) -> str:
    """Returns what is wrong; empty if nothing is."""
    sampling = SimpleNamespace(temperature=temperature)
    data: Any = SimpleNamespace(max_model_tokens=longest, sampling=sampling)
    try:
        policy: Any = SimpleNamespace(tokenizer=byte_tokenizer())
        check_teacher(teacher, policy, data)
    except ConfigError as error:
        assert len(str(error)) < 500
        return str(error)
    return ""


def test_a_server_that_cannot_teach_the_policy_is_refused(
    lent_server: LentServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEACHER_KEY", lent_server.token)
    teacher = Teacher(url=lent_server.url, api_key_env="TEACHER_KEY")
    assert check(teacher, longest=1023) == ""
    assert "has a context of 1024 tokens" in check(teacher, longest=1024)
    assert "401" in check(Teacher(url=lent_server.url))
    assert "data.temperature is 0.7" in check(teacher, temperature=0.7)
    found = check(Teacher(url=URL, timeout_s=1.0, deadline_s=1.0))
    assert "model.reference.url cannot be the run's teacher" in found and URL in found
    other = byte_tokenizer()
    with monkeypatch.context() as patched:
        patched.setattr(type(other), "encode", lambda *_, **__: [9, 9])
        assert "serve a teacher of the same family" in check(teacher)
    monkeypatch.setattr(type(other), "get_vocab", lambda _: {"beyond": 100_000})
    assert "Token id 100000 is out of vocabulary" in check(teacher)
