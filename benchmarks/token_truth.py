"""Whether an agent's tokens are trained as they were sampled, on a real vLLM server; stock chat
completions of the same server beside it.

    python -m benchmarks.token_truth
    python -m benchmarks.token_truth --episodes 8 --out runs/token_truth/r.jsonl      a rehearsal

The policy has random weights and a tokenizer that merges across words and special places, so that
hardly any text that it writes has the tokens that it sampled. Agents talk with it by
`lrl.environments.Agent`: the real processes, server, loop of episodes and pool, without a trainer.
Half of them keep their history, the others change it every third turn. Every turn is noted at the
pool as the sampler has written it, with all that it read. Then the episodes are packed as for a
step, and each row is compared with the notes, and its log-probs with those of transformers.

With stock chat completions each request is tokenised anew: it is counted how often a prompt does
not begin with the tokens of the one before and its answer.
"""

from __future__ import annotations

import argparse
import asyncio
import string
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks import arguments, records
from benchmarks.arguments import Row
from benchmarks.random_policy import llama
from benchmarks.runs import lent_server, serve_first_version
from lrl.advantages import GroupMean
from lrl.environments import Agent
from lrl.generators.generator import Generator
from lrl.generators.pool import GeneratorPool
from lrl.generators.server import Server
from lrl.generators.settings import ServerSettings
from lrl.rollouts.episodes.environment_of_run import EnvironmentOfRun
from lrl.rollouts.episodes.episode import Episodes
from lrl.rollouts.packing import Packer
from lrl.rollouts.policy_text import PolicyText
from lrl.system.event_loop import LoopThread
from lrl.types import Group, MicroBatch, Prompt, Rollout, Sampling
from tests.chat_templates import CHATML, merging_tokenizer

TURNS = 8
PROMPT_TOKENS, EPISODE_TOKENS = 512, 3500
TURN_TOKENS = 400
END = "<|im_end|>"
ENDS = tuple(string.ascii_letters[:32])
"""Tokens at which a turn ends, too: a random policy takes one after 16 tokens or so."""
DEADLINE_S = 600.0
SLOTS = 256
WORDS = ("higher", "lower", "warm, but not there yet")
SETTINGS: dict[str, Any] = {"episodes": (128, "at once")}
Turn = tuple[tuple[int, ...], tuple[int, ...]]
"""What the policy read, and what it wrote."""


async def talk(
    *,
    base_url: str,
    api_key: str,
    turns: int,
    changes: bool = False,
    settings: dict[str, Any] | None = None,
    **columns: Any,
) -> int:
    """Is an agent that knows nothing of lrl. In its conversation every third request says something
    else of the past if it `changes`. Returns how many answers were to a prompt that does not begin
    with the tokens of the one before and its answer, if the endpoint tells tokens."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Guess my number."}]
    before: list[int] = []
    changed = 0
    headers = {"Authorization": f"Bearer {api_key}"}
    async with aiohttp.ClientSession(headers=headers) as session:
        for turn in range(turns):
            body = {"model": "policy", "messages": messages} | (settings or {})
            async with session.post(f"{base_url}/chat/completions", json=body) as answered:
                answer = await answered.json()
                assert answered.status == 200, answer
            choice = answer["choices"][0]
            if (read := answer.get("prompt_token_ids")) is not None:
                changed += read[: len(before)] != before
                before = read + choice["token_ids"]
            said = {"role": "assistant", "content": choice["message"]["content"]}
            messages = [*messages, said, {"role": "user", "content": WORDS[turn % len(WORDS)]}]
            if changes and turn % 3 == 2:
                messages[-3] = {"role": "user", "content": f"I had said {turn}."}
    return changed


async def plays(**columns: Any) -> float:
    await talk(**columns)
    return 1.0


def make_policy(folder: Path) -> PreTrainedTokenizerFast:
    tokenizer = merging_tokenizer(CHATML.template)
    tokenizer.save_pretrained(folder)
    config = llama("tiny")
    config.vocab_size = len(tokenizer)
    torch.manual_seed(0)
    LlamaForCausalLM(config).float().save_pretrained(folder)
    return tokenizer


class Notes:
    """A pool, with what its sampler has written."""

    def __init__(self, pool: GeneratorPool) -> None:
        self.pool = pool
        self.turns: Counter[Turn] = Counter()

    async def generate(
        self, prompt: Prompt, rollouts: list[Rollout], sampling: Sampling, **how: Any
    ) -> None:
        await self.pool.generate(prompt, rollouts, sampling, **how)
        for rollout in rollouts:
            self.turns[tuple(prompt.token_ids), tuple(rollout.token_ids)] += 1


async def play(episodes: Any, number: int, end: int) -> Group:
    """Plays an episode in a group of its own, so that its first turn has a request of its own."""
    columns = {"turns": TURNS, "changes": number % 2 == 1}
    prompt = Prompt(id=number, token_ids=[], text="go", columns=columns)
    group = Group(index=number, prompt=prompt, rollouts=[Rollout()])
    sampling = Sampling(max_tokens=EPISODE_TOKENS, stop_tokens=(end,))
    how: dict[str, Any] = {"priority": number, "due": 0, "deadline_s": DEADLINE_S}
    await episodes.generate(prompt, group.rollouts, sampling, **how)
    (rollout,) = group.rollouts
    assert not rollout.failure, rollout.failure
    rollout.reward = 1.0
    return group


async def ask(server: Server, ends: Sequence[int]) -> int:
    """Has an agent talk with the server's own route; returns the answers to prompts that do not
    begin as they should."""
    settings = {
        "model": server.model,
        "max_tokens": TURN_TOKENS,
        "temperature": 1.0,
        "stop_token_ids": list(ends),
        "include_stop_str_in_output": True,
        "return_token_ids": True,
        "logprobs": True,
    }
    base_url, api_key = f"{server.url}/v1", server.token or ""
    return await talk(base_url=base_url, api_key=api_key, turns=TURNS, settings=settings)


def truth(groups: Sequence[Group], notes: Notes, network: Any) -> Row:
    """Compares what would be trained with what was sampled, and its log-probs with a
    recomputation."""
    packer = Packer(4 * EPISODE_TOKENS, Advantage(), 1.0, share_rows=False)
    rounds = [each for group in groups for each in packer.add(group)] + list(packer.flush())
    trained: Counter[Turn] = Counter()
    worst = 0.0
    for micro in (one for each in rounds for one in each if one is not None):
        for row in range(len(micro.input_ids)):
            trained.update(turns_of(micro, row))
            worst = max(worst, difference(micro, row, network))
    lacking, strange = notes.turns - trained, trained - notes.turns
    return {
        "turns": notes.turns.total(),
        "branches": sum(len(one.branches) for group in groups for one in group.rollouts),
        "tokens": sum(len(turn) * times for (_, turn), times in notes.turns.items()),
        "tokens_trained": packer.tokens,
        "turns_not_trained_as_sampled": lacking.total(),
        "turns_that_nobody_sampled": strange.total(),
        "logprob_difference_max": records.rounded(worst),
    }


class Advantage(GroupMean):
    """Takes a group of one."""

    min_rollouts = 1


def turns_of(micro: MicroBatch, row: int) -> list[Turn]:
    ids, mask = micro.input_ids[row].tolist(), micro.mask[row].tolist()
    labels = micro.labels[row].tolist()
    found: list[Turn] = []
    begin = None
    for place, own in enumerate([*mask, False]):
        if own and begin is None:
            begin = place
        elif not own and begin is not None:
            found.append((tuple(ids[: begin + 1]), tuple(labels[begin:place])))
            begin = None
    return found


@torch.no_grad()
def difference(micro: MicroBatch, row: int, network: Any) -> float:
    mask = micro.mask[row]
    logits = network(micro.input_ids[row : row + 1]).logits[0][mask]
    ours = logits.log_softmax(-1).gather(-1, micro.labels[row][mask][:, None])[:, 0]
    return (ours - micro.behaviour_logprobs[row][mask]).abs().max().item()


def figures(server: Server, tokenizer: PreTrainedTokenizerFast, episodes: int) -> Row:
    # Tokens at which a turn ends; the first one ends the conversation's messages, too.
    ends = [tokenizer.convert_tokens_to_ids(end) for end in (END, *ENDS)]
    text = PolicyText(tokenizer=tokenizer, ends=frozenset(ends[:1]), skip_special_tokens=True)
    agent = Agent(plays)
    agent.stop = ENDS
    of_run = EnvironmentOfRun(
        agent,
        max_tokens=EPISODE_TOKENS,
        max_prompt_tokens=PROMPT_TOKENS,
        max_turns=TURNS,
        max_turn_tokens=TURN_TOKENS,
        turn_timeout_s=60.0,
        episode_timeout_s=1800.0,
        environment_workers=1,
        environment_memory_gib=4.0,
    )

    async def written() -> tuple[list[Group], Notes, int]:
        generator = Generator(server, capacity=SLOTS)
        generator.version = 0
        generator.open()
        notes = Notes(GeneratorPool([generator]))
        try:
            writer = Episodes(of_run, notes.generate, text)
            changed = await asyncio.gather(*(ask(server, ends) for _ in range(episodes)))
            groups = await asyncio.gather(*(play(writer, n, ends[0]) for n in range(episodes)))
        finally:
            await generator.client.close()
        return groups, notes, sum(changed)

    loop = LoopThread()
    try:
        of_run.start(loop, text, None, parses=False)
        groups, notes, changed = loop.wait(written(), 4 * DEADLINE_S, "writing the episodes")
    finally:
        of_run.pool.close()
        loop.close()
    network = AutoModelForCausalLM.from_pretrained(server.model, dtype=torch.float32)
    stock = {"stock_later_turns": episodes * (TURNS - 1), "stock_changed": changed}
    return truth(groups, notes, network) | stock


def runs(args: argparse.Namespace) -> list[Row]:
    return [arguments.chosen(args, "episodes")]


def measure(args: argparse.Namespace, missing: list[Row]) -> Iterator[Row]:
    policy = args.folder / "policy"
    tokenizer = make_policy(policy)
    settings = ServerSettings(
        max_model_len=4096, max_num_seqs=SLOTS, dtype="float32", kv_cache_gib=1.0
    )
    with lent_server(policy, settings, args.folder) as server:
        serve_first_version(server)
        yield missing[0] | figures(server, tokenizer, args.episodes)


def table(rows: Sequence[Row]) -> str:
    return records.listed(rows[0])


if __name__ == "__main__":
    arguments.run("token_truth", __doc__, SETTINGS, runs, measure, table)
