"""`lrl plan`: the best few ways to train a model on a cluster, forecast from data sheets.

It imports neither torch nor vLLM and runs on any machine, also without the planned devices.
"""

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import yaml

from lrl.cli.main import recipes
from lrl.errors import at_least
from lrl.planning.model_shape import read_shape
from lrl.planning.report import BOTTLENECKS, recipe_of, table
from lrl.planning.roofline import (
    DEVICES_PER_NODE,
    GB,
    WEIGHT_BYTES,
    Held,
    parse_cluster,
    training_memory,
    usable,
)
from lrl.planning.search import Search, best
from lrl.planning.workload import FORMS, Workload, parse_lengths
from lrl.training.prefix_tree import attention_tokens_of


def main(argv: Sequence[str]) -> int:
    """Runs `lrl plan`; returns the exit status. Raises ValueError if nothing fits."""
    words = argparse.ArgumentParser(
        prog="lrl plan",
        allow_abbrev=False,
        description="Forecast how to train a model on a cluster.",
    )
    add = words.add_argument
    model = "folder in Hugging Face format, or its config.json"
    add("--model", type=Path, required=True, help=model)
    add("--cluster", required=True, help="number and kind of devices, like 8xH100")
    add("--lengths", required=True, help=f"of responses, or of whole episodes: {FORMS}")
    add("--prompts", type=int, default=512, help="prompts a step (%(default)s)")
    add("--responses", type=int, default=8, help="responses to each prompt (%(default)s)")
    add("--prompt-tokens", type=int, default=512, help="tokens of a prompt (%(default)s)")
    add("--max-lag", type=int, default=1, help="largest lag to try (%(default)s)")
    add("--dtype", choices=WEIGHT_BYTES, default="float32", help="as model.dtype (%(default)s)")
    every = "as the number in model.gradient_checkpointing; 0 recomputes no layer (%(default)s)"
    add("--recompute-every", type=int, default=1, metavar="N", help=every)
    add("--devices-per-node", type=int, default=DEVICES_PER_NODE, help="(%(default)s)")
    add("--top", type=int, default=5, help="plans to print (%(default)s)")
    add("--out", type=Path, help="file for the best plan, as a recipe")
    base = "recipe with data, rewards, callbacks for --out (%(default)s)"
    add("--base", default="gsm8k", help=base)
    args = words.parse_args(argv)
    sizes = ("prompts", "responses", "prompt_tokens", "devices_per_node", "top")
    at_least(1, "lrl plan", **{name: vars(args)[name] for name in sizes})
    at_least(0, "lrl plan", max_lag=args.max_lag, recompute_every=args.recompute_every)
    sys.stdout.write(plan(args))
    return 0


def plan(args: argparse.Namespace) -> str:
    """Returns the best plans as text; writes the first one as a recipe if `args.out` is given."""
    base = recipes().get(args.base, Path(args.base))
    data = yaml.safe_load(base.read_text())["data"].get("init_args") or {}
    cluster = parse_cluster(args.cluster, devices_per_node=args.devices_per_node)
    if cluster.count == 1:
        raise ValueError(f"--cluster is {args.cluster!r}; a plan divides two devices or more.")
    shape = read_shape(args.model)
    workload = Workload(
        prompts=args.prompts,
        responses=args.responses,
        prompt_tokens=args.prompt_tokens,
        lengths=parse_lengths(args.lengths),
        attention_tokens=attention_tokens_of(shape.hidden) * data.get("share_prefixes", True),
    )
    held = Held(dtype=args.dtype, recompute_every=args.recompute_every)
    search = Search(shape, workload, cluster, held)
    plans = best(search.plans(args.max_lag), args.top)
    if not plans:
        trainers = cluster.count - 1
        taken = training_memory(shape, trainers, tp=1, held=held).bytes_for(workload.longest)
        raise ValueError(
            f"nothing fits: with one response, training takes {taken / GB:.0f} GB of each of "
            f"{trainers} devices, of which plans may fill {usable(cluster.device) / GB:.0f}. Take "
            "more devices, larger ones, or a smaller model."
        )
    text = (
        f"A step: {workload.samples:,} responses of {workload.lengths.mean:,.0f} tokens in the mean "
        f"and {workload.lengths.longest:,.0f} at most; {workload.tokens:,.0f} tokens to train, with "
        f"each prompt read {workload.trees} times. Policy of {shape.parameters / 1e9:.3g} billion "
        f"parameters on {cluster}.\n{table(plans, workload)}\n"
        f"Plan 1. {BOTTLENECKS[plans[0].bound]}\n"
    )
    if args.out is not None:
        recipe = recipe_of(plans[0], workload, cluster, base=base, model=args.model)
        args.out.write_text(recipe)
        text += f"{args.out}: plan 1.\nlrl fit --config {shlex.quote(str(args.out))}\n"
    return text
