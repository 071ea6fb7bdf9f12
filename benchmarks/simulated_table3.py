"""StreamRL's table 3 in the simulator: the throughput that each of its parts adds for a 72B model
on 128 H800.

    python -m benchmarks.simulated_table3
    python -m benchmarks.simulated_table3 --contexts
    python -m benchmarks.simulated_table3 --passes 11 --generation 48

Four scenes of one workload, PPO with responses of at most 20,000 tokens: both sides take turns on
all devices with random FIFO; the same with `SkewnessAware`; each side on devices of its own,
training while responses are still written; and with a lag of 1. `SkewnessAware` has lengths with
noise, down to the recall of the paper's ranker.

Generators are from `benchmarks.streamrl_setup`, 8 devices each. The trainer is
`lrl.planning.planner.roofline`'s, with its constants, for a dense model of Qwen2.5-72B's shape and
tensor parallelism of 8. Assumed: switching between generation and training costs nothing; and the
number of forward passes of a micro-batch. An actor alone costs 4 (forward, again for recomputation,
backward, which counts as two); PPO with critic and reference of its size up to 11. The default
makes training as long as figure 10 has it on 80 + 48 devices: 1.04 of generation.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, Literal

from benchmarks import arguments, records
from benchmarks.oracle import Oracle
from benchmarks.streamrl_setup import (
    MODELS,
    PROMPT_TOKENS,
    PROMPTS,
    RANKER_BLUR,
    Model,
    Random,
    drawn,
)
from lrl.planning.planner.devices import Cluster, parse_cluster
from lrl.planning.planner.model_shape import ModelShape
from lrl.planning.planner.roofline import PASSES, RooflineGenerator, RooflineTrainer
from lrl.planning.simulator.simulate import Simulation
from lrl.routing.dispatch import DispatchPolicy, SkewnessAware

DEVICES, TP = 128, 8
LONGEST = 20_000
SHAPE = ModelShape(
    layers=80,
    hidden=8192,
    heads=64,
    kv_heads=8,
    head_dim=128,
    ffn=29_568,
    vocabulary=152_064,
    small_per_layer=26_624,
)
PASSES_OF_FIGURE_10 = 6.2
MICRO_BATCH_TOKENS = 2**18
MEASURED = slice(2, -1)
"""Steps: before these the pipeline fills, in the last one nothing is left to generate."""


@dataclass(frozen=True, slots=True)
class Scene:
    """A row of the table."""

    name: str
    paper: float
    skewness_aware: bool
    placement: Literal["split", "shared"]
    max_lag: int


SCENES = (
    Scene("in turn, random FIFO", 1.00, False, "shared", 0),
    Scene("+ skewness-aware", 1.08, True, "shared", 0),
    Scene("+ apart, streaming", 1.23, True, "split", 0),
    Scene("+ lag 1", 1.48, True, "split", 1),
)


@dataclass(frozen=True, slots=True)
class PPOTrainer:
    """An actor with PPO's other models (`TrainerCosts`)."""

    one: RooflineTrainer
    passes: float

    def micro_batch_s(self, tokens: int, tokens_squared: int) -> float:
        """Returns the seconds of all passes of a micro-batch."""
        return self.passes / PASSES * self.one.micro_batch_s(tokens, tokens_squared)

    def update_s(self) -> float:
        """Returns the seconds for actor and critic."""
        return 2 * self.one.update_s()

    @property
    def pause_overlaps(self) -> bool:
        """See `TrainerCosts`."""
        return self.one.pause_overlaps

    def sync_s(self) -> float:
        """Returns the seconds for the actor alone."""
        return self.one.sync_s()


def simulate(scene: Scene, cluster: Cluster, args: argparse.Namespace) -> dict[str, Any]:
    """Simulates one scene; returns seconds of a step and of its two sides, the means of the
    measured steps."""
    turns = scene.placement == "shared"
    writing = DEVICES if turns else args.generation
    training = DEVICES if turns else DEVICES - args.generation
    pause_s = RooflineGenerator(shape=SHAPE, cluster=cluster, tp=TP).sync_pause_s()
    model = replace(MODELS["72B"], reads_contexts=args.contexts, pause_s=pause_s)
    found = Simulation(
        generators=[model] * (writing // model.devices),
        trainer=PPOTrainer(
            RooflineTrainer(shape=SHAPE, cluster=cluster, devices=training, tp=TP), args.passes
        ),
        lengths=drawn(LONGEST, args.seed),
        steps=args.steps,
        groups_per_step=PROMPTS,
        rollouts_per_group=1,
        max_lag=scene.max_lag,
        micro_batch_tokens=MICRO_BATCH_TOKENS,
        max_num_seqs=512,
        prompt_tokens=PROMPT_TOKENS,
        prompts=args.steps * PROMPTS,
        dispatch=lambda: make_rule(scene, model, args),
        placement=scene.placement,
    ).run()
    steps = found.steps[MEASURED]
    return {
        "scene": scene.name,
        "step_s": records.rounded(fmean(step.seconds for step in steps)),
        "generation_s": records.rounded(fmean(step.generation_s for step in steps)),
        "train_s": records.rounded(fmean(step.train_s for step in steps)),
        "generation": writing,
        "training": training,
        "settings": {name: getattr(args, name) for name in ("passes", "contexts", "steps", "seed")},
        "paper": scene.paper,
    }


def make_rule(scene: Scene, model: Model, args: argparse.Namespace) -> DispatchPolicy:
    """The scene's rule of dispatch, with the lengths that it is told."""
    if not scene.skewness_aware:
        return Random()
    oracle = Oracle(drawn(LONGEST, args.seed), args.steps * PROMPTS, blur=RANKER_BLUR)
    rule = SkewnessAware(decode_latency=model.decode_latency(oracle.mean))
    rule.lengths = oracle
    return rule


def line(found: dict[str, Any], first: float) -> str:
    """Returns a row of the table; `first` is the first scene's seconds of a step."""
    turns = found["generation"] == found["training"] == DEVICES
    devices = str(DEVICES) if turns else f"{found['generation']} + {found['training']}"
    seconds = [f"{found[name]:.0f}" for name in ("step_s", "generation_s", "train_s")]
    ratios = [f"{ratio:.2f}" for ratio in (first / found["step_s"], found["paper"])]
    return f"| {' | '.join([found['scene'], devices, *seconds, *ratios])} |"


def main(argv: Sequence[str] | None = None) -> int:
    """Simulates the four scenes and prints the table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.simulated_table3", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "--generation", type=int, default=80, help="devices that generate, when apart (%(default)s)"
    )
    parser.add_argument(
        "--passes", type=float, default=PASSES_OF_FIGURE_10, help="of a micro-batch (%(default)s)"
    )
    parser.add_argument(
        "--contexts", action="store_true", help="count the time in which contexts are read"
    )
    parser.add_argument(
        "--steps", type=int, default=8, help="the first two and the last do not count (%(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the lengths (%(default)s)")
    arguments.add_out(parser, "simulated_table3")
    args = arguments.parse(parser, argv)
    cluster = parse_cluster(f"{DEVICES}xH800")
    print(
        "| scene | devices | step s | generation s | training s | throughput | paper |\n"
        + "|---" * 7
        + "|"
    )
    first = None
    for scene in SCENES:
        found = simulate(scene, cluster, args)
        first = first or found["step_s"]
        throughput = records.rounded(first / found["step_s"])
        records.append(args.out, found | {"throughput": throughput, "command": args.command})
        print(line(found, first), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
