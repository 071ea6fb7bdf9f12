"""`lrl plan`: the best few ways to train a model on a cluster, forecast from data sheets.

It imports neither torch nor vLLM and runs on any machine, also without the planned devices. With
`--compare` it compares a run with its forecast by the simulator, which needs torch.
"""

import argparse
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

import yaml

from lrl.cli.main import recipes
from lrl.planning.model_shape import read_shape
from lrl.planning.report import BOTTLENECKS, compare, recipe_of, table
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
    args = parser().parse_args(argv)
    if args.compare is not None:
        print(compare(args.compare))
    elif args.model is None or args.cluster is None or args.lengths is None:
        raise ValueError("give --model, --cluster and --lengths, or --compare alone.")
    else:
        plan(args)
    return 0


def parser() -> argparse.ArgumentParser:
    """Returns the settings."""
    about = (
        "Forecast how to train a model on a cluster. With --compare RUN alone: compare a run with "
        "its forecast."
    )
    words = argparse.ArgumentParser(prog="lrl plan", allow_abbrev=False, description=about)
    add = words.add_argument
    add("--compare", type=Path, metavar="RUN", help="folder of a run to compare")
    add("--model", type=Path, help="folder in Hugging Face format, or its config.json")
    add("--cluster", help="number and kind of devices, like 8xH100")
    add("--lengths", help=f"of responses, or of whole episodes: {FORMS}")
    add("--prompts", type=at_least(1), default=512, help="prompts a step (%(default)s)")
    add("--responses", type=at_least(1), default=8, help="responses to each prompt (%(default)s)")
    add("--prompt-tokens", type=at_least(1), default=512, help="tokens of a prompt (%(default)s)")
    add("--max-lag", type=at_least(0), default=1, help="largest lag to try (%(default)s)")
    add("--dtype", choices=WEIGHT_BYTES, default="float32", help="as model.dtype (%(default)s)")
    every = "as the number in model.gradient_checkpointing; 0 recomputes no layer (%(default)s)"
    add("--recompute-every", type=at_least(0), default=1, metavar="N", help=every)
    add("--devices-per-node", type=at_least(1), default=DEVICES_PER_NODE, help="(%(default)s)")
    add("--top", type=at_least(1), default=5, help="plans to print (%(default)s)")
    add("--out", type=Path, help="file for the best plan, as a recipe")
    base = "recipe with data, rewards, callbacks for --out (%(default)s)"
    add("--base", default="gsm8k", help=base)
    return words


def at_least(least: int) -> Callable[[str], int]:
    """Returns a type of argument: a number that is not below `least`."""

    def number(text: str) -> int:
        if (value := int(text)) < least:
            raise argparse.ArgumentTypeError(f"{text} is below {least}")
        return value

    return number


def plan(args: argparse.Namespace) -> None:
    """Searches for plans and prints them."""
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
    print(
        f"A step: {workload.samples:,} responses of {workload.lengths.mean:,.0f} tokens in the mean "
        f"and {workload.lengths.longest:,.0f} at most; {workload.tokens:,.0f} tokens to train, with "
        f"each prompt read {workload.trees} times. Policy of {shape.parameters / 1e9:.3g} billion "
        f"parameters on {cluster}."
    )
    print(table(plans, workload))
    print(f"Plan 1. {BOTTLENECKS[plans[0].bound]}")
    if args.out is not None:
        recipe = recipe_of(plans[0], workload, cluster, base=base, model=args.model)
        args.out.write_text(recipe)
        print(f"{args.out}: plan 1.\nlrl fit --config {shlex.quote(str(args.out))}")
