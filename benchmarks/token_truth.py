"""Whether an agent's tokens are trained as they were sampled, and what its requests cost, on a real
vLLM server; stock chat completions of the same server beside it.

    python -m benchmarks.token_truth
    python -m benchmarks.token_truth --episodes 8 --alone 1 --out runs/token_truth/r.jsonl      a rehearsal

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
import time
from collections import Counter
from collections.abc import Awaitable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedTokenizerFast

import lrl
from benchmarks import arguments, records
from benchmarks.arguments import Row
from benchmarks.random_policy import llama
from benchmarks.runs import lent_server
from benchmarks.talking_agent import plays, talk
from lrl.advantages import GroupMean
from lrl.environments import Agent
from lrl.generators.generator import Generator
from lrl.generators.pool import GeneratorPool
from lrl.generators.server import Server
from lrl.generators.settings import ServerSettings
from lrl.rollouts.controller import ResponseWriter
from lrl.rollouts.episodes.environment_of_run import EnvironmentOfRun
from lrl.rollouts.episodes.settings import EpisodeSettings
from lrl.rollouts.packing import Packer
from lrl.rollouts.response_text import PolicyText
from lrl.types import Group, MicroBatch, Prompt, Rollout, Sampling

TURNS = 8
EPISODE_TOKENS = 3500
TURN_TOKENS = 400
END, START = "<|im_end|>", "<|im_start|>"
ENDS = tuple(string.ascii_letters[:32])
"""Tokens at which a turn ends, too: a random policy takes one after 16 tokens or so."""
TEMPLATE = (
    "{% for m in messages %}" + START + "{{ m.role }}\n{{ m.content }}" + END + "\n{% endfor %}"
    "{% if add_generation_prompt %}" + START + "assistant\n{% endif %}"
)
DEADLINE_S = 600.0
SLOTS = 256
Turn = tuple[tuple[int, ...], tuple[int, ...]]
"""What the policy read, and what it wrote."""


def make_policy(folder: Path) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=[END, START],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [Path(lrl.__file__).read_text(), "user\nassistant\n\n" * 9, __doc__ or ""]
    tokenizer.train_from_iterator(texts, trainer)
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, chat_template=TEMPLATE
    )
    made.save_pretrained(folder)
    torch.manual_seed(0)
    LlamaForCausalLM(llama("tiny")).float().save_pretrained(folder)
    return made


@dataclass
class Notes:
    """A pool, with what its sampler has written."""

    pool: GeneratorPool
    turns: Counter[Turn] = field(default_factory=Counter)

    async def generate(
        self, prompt: Prompt, rollouts: list[Rollout], sampling: Sampling, **how: Any
    ) -> None:
        await self.pool.generate(prompt, rollouts, sampling, **how)
        for rollout in rollouts:
            self.turns[tuple(prompt.token_ids), tuple(rollout.token_ids)] += 1


@dataclass(frozen=True)
class Bench:
    """The running server, its pool, and the policy's tokenizer."""

    server: Server
    pool: GeneratorPool
    tokenizer: PreTrainedTokenizerFast

    @property
    def ends(self) -> list[int]:
        """Tokens at which a turn ends; the first one ends the conversation's messages, too."""
        return [self.tokenizer.convert_tokens_to_ids(end) for end in (END, *ENDS)]

    def environment(self) -> EnvironmentOfRun:
        agent = Agent(plays)
        agent.stop = ENDS
        settings = EpisodeSettings(max_turns=TURNS, max_turn_tokens=TURN_TOKENS)
        of_run = EnvironmentOfRun(agent, settings, EPISODE_TOKENS)
        of_run.start(self.text, None, parses=False)
        return of_run

    @property
    def text(self) -> PolicyText:
        ends = frozenset(self.ends[:1])
        return PolicyText(tokenizer=self.tokenizer, ends=ends, skip_special_tokens=True)

    async def play(self, episodes: ResponseWriter, number: int, changes: bool = False) -> Group:
        columns = {"turns": TURNS, "changes": changes}
        prompt = Prompt(id=number, token_ids=[], text="go", columns=columns)
        group = Group(index=number, prompt=prompt, rollouts=[Rollout()])
        sampling = Sampling(max_tokens=EPISODE_TOKENS, stop_tokens=(self.ends[0],))
        how: dict[str, Any] = {"priority": number, "due": 0, "deadline_s": DEADLINE_S}
        await episodes.generate(prompt, group.rollouts, sampling, **how)
        return group

    async def ask(self, number: int) -> int:
        """Has an agent talk with the server's own route; returns the answers to prompts that do not
        begin as they should."""
        settings = {
            "model": self.server.model,
            "max_tokens": TURN_TOKENS,
            "temperature": 1.0,
            "stop_token_ids": self.ends,
            "include_stop_str_in_output": True,
            "return_token_ids": True,
            "logprobs": True,
        }
        where = {"base_url": f"{self.server.url}/v1", "api_key": self.server.token or ""}
        return await talk(**where, turns=TURNS, settings=settings)


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


async def figures(bench: Bench, args: argparse.Namespace) -> Row:
    of_run = bench.environment()
    notes = Notes(bench.pool)
    episodes = of_run.episodes(notes.generate, bench.text)
    play = partial(bench.play, episodes)
    everybody = range(args.episodes)
    try:
        await asyncio.gather(play(0), bench.ask(0))  # warms up
        seconds: dict[str, list[float]] = {"stock": [], "agent": []}
        changed = 0
        for _ in range(args.repeats):
            taken, found = await timed(*map(bench.ask, everybody))
            seconds["stock"].append(taken)
            changed += sum(found)
            seconds["agent"].append((await timed(*map(play, everybody)))[0])
        alone: dict[str, list[float]] = {"stock_ms": [], "agent_ms": []}
        for number in range(args.alone):
            alone["stock_ms"].append((await timed(bench.ask(number)))[0])
            alone["agent_ms"].append((await timed(play(number)))[0])
        notes.turns.clear()
        # Of one episode a group, so that each has a request of its own for its first turn.
        groups = await asyncio.gather(*(play(n, changes=n % 2 == 1) for n in everybody))
    finally:
        of_run.close()
    for rollout in (one for group in groups for one in group.rollouts):
        assert not rollout.failure, rollout.failure
        rollout.reward = 1.0
    network = AutoModelForCausalLM.from_pretrained(bench.server.model, dtype=torch.float32)
    return {
        **truth(groups, notes, network),
        "stock_later_turns": args.episodes * (TURNS - 1) * args.repeats,
        "stock_changed": changed,
        **{name: records.rounded(1000 * median(all_) / TURNS) for name, all_ in alone.items()},
        "stock_s": [records.rounded(one) for one in sorted(seconds["stock"])],
        "agent_s": [records.rounded(one) for one in sorted(seconds["agent"])],
        "times_stock": records.rounded(median(seconds["agent"]) / median(seconds["stock"])),
    }


async def timed(*works: Awaitable[Any]) -> tuple[float, list[Any]]:
    """Does all at once; returns the seconds, and what they return."""
    began = time.perf_counter()
    found = await asyncio.gather(*works)
    return time.perf_counter() - began, found


async def with_pool(
    server: Server, tokenizer: PreTrainedTokenizerFast, args: argparse.Namespace
) -> Row:
    generator = Generator(server, capacity=SLOTS)
    body = {"new_version": "0"}
    await generator.client.post("/update_weight_version", body, deadline_s=DEADLINE_S)
    generator.version = 0
    generator.open()
    try:
        return await figures(Bench(server, GeneratorPool([generator]), tokenizer), args)
    finally:
        await generator.client.close()


def runs(args: argparse.Namespace) -> list[Row]:
    return [arguments.chosen(args, "episodes", "repeats")]


def measure(args: argparse.Namespace, missing: list[Row]) -> Iterator[Row]:
    policy = args.folder / "policy"
    tokenizer = make_policy(policy)
    settings = ServerSettings(
        max_model_len=4096, max_num_seqs=SLOTS, dtype="float32", kv_cache_gib=1.0
    )
    with lent_server(policy, settings, args.folder) as server:
        server.start()
        server.wait_ready()
        found = asyncio.run(with_pool(server, tokenizer, args))
    children = [" ".join(one.cmdline()) for one in psutil.Process().children(recursive=True)]
    # Python's own, which ends with this process.
    left = [child for child in children if "resource_tracker" not in child]
    yield missing[0] | found | {"processes_left": left}


def table(rows: Sequence[Row]) -> str:
    return "\n".join(f"{name}: {value}" for name, value in rows[0].items())


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments.make_parser("token_truth", __doc__)
    arguments.add(
        parser,
        episodes=(128, "at once"),
        repeats=(3, "of the timing"),
        alone=(40, "episodes alone"),
    )
    arguments.add_places(parser, "token_truth")
    return arguments.run(parser, argv, runs, measure, table)


if __name__ == "__main__":
    raise SystemExit(main())
