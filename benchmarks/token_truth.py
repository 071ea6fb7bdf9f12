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
import secrets
import string
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedTokenizerFast

import lrl
from benchmarks import arguments, records
from benchmarks.random_policy import llama
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
from lrl.rollouts.response_text import PolicyText, ResponseDecoder
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
    turns: Counter[tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=Counter)
    """(what the policy read, what it wrote)."""

    async def generate(
        self, prompt: Prompt, rollouts: list[Rollout], sampling: Sampling, **how: Any
    ) -> None:
        await self.pool.generate(prompt, rollouts, sampling, **how)
        for rollout in rollouts:
            self.turns[tuple(prompt.token_ids), tuple(rollout.token_ids)] += 1


@dataclass(frozen=True)
class Bench:
    """The running server.

    Args:
        server: It.
        pool: Its pool.
        tokenizer: The policy's.
    """

    server: Server
    pool: GeneratorPool
    tokenizer: PreTrainedTokenizerFast

    @property
    def ends(self) -> list[int]:
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
        ends = frozenset({self.tokenizer.convert_tokens_to_ids(END)})
        decode = ResponseDecoder(tokenizer=self.tokenizer, ends=ends, skip_special_tokens=True)
        return PolicyText(tokenizer=self.tokenizer, ends=ends, decode=decode)

    async def play(
        self, episodes: ResponseWriter, number: int, changes: bool = False, turns: int = TURNS
    ) -> Group:
        columns = {"turns": turns, "changes": changes}
        prompt = Prompt(id=number, token_ids=[], text="go", columns=columns)
        group = Group(index=number, prompt=prompt, rollouts=[Rollout()])
        end = self.tokenizer.convert_tokens_to_ids(END)
        sampling = Sampling(max_tokens=EPISODE_TOKENS, stop_tokens=(end,))
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


def truth(groups: Sequence[Group], notes: Notes, network: Any) -> dict[str, Any]:
    """Compares what would be trained with what was sampled, and its log-probs with a
    recomputation."""
    packer = Packer(4 * EPISODE_TOKENS, Advantage(), 1.0, share_rows=False)
    rounds = [each for group in groups for each in packer.add(group)] + list(packer.flush())
    trained: Counter[tuple[tuple[int, ...], tuple[int, ...]]] = Counter()
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


def turns_of(micro: MicroBatch, row: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    ids, mask = micro.input_ids[row].tolist(), micro.mask[row].tolist()
    labels = micro.labels[row].tolist()
    found: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
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


async def measure(bench: Bench, args: argparse.Namespace) -> dict[str, Any]:
    of_run = bench.environment()
    notes = Notes(bench.pool)
    episodes = of_run.episodes(notes.generate, bench.text)
    try:
        await asyncio.gather(bench.play(episodes, 0), bench.ask(0))  # warms up
        seconds: dict[str, list[float]] = {"stock": [], "agent": []}
        changed = 0
        for _ in range(args.repeats):
            began = time.perf_counter()
            changed += sum(await asyncio.gather(*map(bench.ask, range(args.episodes))))
            seconds["stock"].append(time.perf_counter() - began)
            began = time.perf_counter()
            await asyncio.gather(*(bench.play(episodes, n) for n in range(args.episodes)))
            seconds["agent"].append(time.perf_counter() - began)
        alone = await one_at_a_time(bench, episodes, args.alone)
        notes.turns.clear()
        # Of one episode a group, so that each has a request of its own for its first turn.
        groups = await asyncio.gather(
            *(bench.play(episodes, n, changes=n % 2 == 1) for n in range(args.episodes))
        )
    finally:
        of_run.close()
    for rollout in (one for group in groups for one in group.rollouts):
        assert not rollout.failure, rollout.failure
        rollout.reward = 1.0
    network = AutoModelForCausalLM.from_pretrained(bench.server.model, dtype=torch.float32)
    later = args.episodes * (TURNS - 1) * args.repeats
    return {
        **truth(groups, notes, network),
        "stock_later_turns": later,
        "stock_changed": changed,
        **alone,
        "stock_s": [records.rounded(one) for one in sorted(seconds["stock"])],
        "agent_s": [records.rounded(one) for one in sorted(seconds["agent"])],
        "times_stock": records.rounded(median(seconds["agent"]) / median(seconds["stock"])),
    }


async def one_at_a_time(
    bench: Bench, episodes: ResponseWriter, count: int
) -> dict[str, float | None]:
    found: dict[str, list[float]] = {"stock_ms": [], "agent_ms": []}
    for number in range(count):
        began = time.perf_counter()
        await bench.ask(number)
        found["stock_ms"].append(time.perf_counter() - began)
        began = time.perf_counter()
        await bench.play(episodes, number)
        found["agent_ms"].append(time.perf_counter() - began)
    return {name: records.rounded(1000 * median(all_) / TURNS) for name, all_ in found.items()}


async def with_pool(
    server: Server, tokenizer: PreTrainedTokenizerFast, args: argparse.Namespace
) -> dict[str, Any]:
    generator = Generator(server, capacity=SLOTS)
    await generator.client.post(
        "/update_weight_version", {"new_version": "0"}, deadline_s=DEADLINE_S
    )
    generator.version = 0
    generator.verify()
    bench = Bench(server, GeneratorPool([generator]), tokenizer)
    try:
        return await measure(bench, args)
    finally:
        await generator.client.close()


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments.make_parser("token_truth", __doc__)
    parser.add_argument("--episodes", type=int, default=128, help="at once (%(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="of the timing (%(default)s)")
    parser.add_argument("--alone", type=int, default=40, help="episodes alone (%(default)s)")
    arguments.add_places(parser, "token_truth")
    args = arguments.parse(parser, argv)
    args.folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make_policy(args.folder / "policy")
    settings = ServerSettings(
        max_model_len=4096, max_num_seqs=SLOTS, dtype="float32", kv_cache_gib=1.0
    )
    policy, run_id = str(args.folder / "policy"), secrets.token_hex(4)
    server = Server(policy, settings, "shared_memory", [], args.folder, 0, run_id)
    server.start()
    try:
        server.wait_ready()
        figures = asyncio.run(with_pool(server, tokenizer, args))
    finally:
        server.stop()
    sizes = {"episodes": args.episodes, "repeats": args.repeats}
    children = [" ".join(one.cmdline()) for one in psutil.Process().children(recursive=True)]
    # Python's own, which ends with this process.
    left = [child for child in children if "resource_tracker" not in child]
    record = sizes | figures | {"processes_left": left, "command": args.command}
    records.append(args.out, record)
    print("\n".join(f"{name}: {value}" for name, value in record.items()))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
