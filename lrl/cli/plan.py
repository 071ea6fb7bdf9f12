"""`lrl plan`: the best few ways to train a model on a cluster, forecast from data sheets.

It imports neither torch nor vLLM and runs on any machine, also without the planned devices; only
the simulator needs torch. With `--compare` it compares a run with its forecast.
"""

import argparse
import shlex
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from lrl.cli.recipes import recipes
from lrl.planning.model_shape import read_shape
from lrl.planning.report import bottleneck, in_flight, print_whole, recipe_of, table
from lrl.planning.roofline import DEVICES_PER_NODE, WEIGHT_BYTES, Cluster, Held, parse_cluster
from lrl.planning.search import (
    Layouts,
    Plan,
    across,
    asynchronous,
    best,
    memory_needed,
    plans_today,
    runs_today,
    synchronous,
    today_first,
)
from lrl.planning.workload import FORMS, Episodes, Quantiles, Workload, parse_lengths
from lrl.training.tree_cost import attention_tokens_of

GIGABIT = 1e9 / 8
PRECISIONS = {"bf16": ("bf16",), "fp8": ("bf16", "fp8")}
ASSUMED = (
    *("prompts", "responses", "prompt_tokens", "max_lag", "precision", "devices_per_node"),
    *("dtype", "recompute_every", "observation_tokens"),
)
"""Settings whose defaults decide a plan; the last one only with episodes."""


def main(argv: Sequence[str]) -> int:
    """Runs `lrl plan`; returns the exit status. Raises ValueError if nothing fits, or a recipe was
    requested and lrl can run none of the plans."""
    args = parser().parse_args(argv)
    console = Console(highlight=False, markup=False)
    console.soft_wrap = not console.is_terminal  # a pipe takes lines of any length
    if args.compare is not None:
        from lrl.planning import simulated

        tool_ms = args.tool_ms and parse_lengths(args.tool_ms, "--tool-ms").values
        run = simulated.read_run(args.compare, tool_ms)
        print_whole(console, simulated.comparison_table(run))
    elif args.model is None or args.cluster is None or args.lengths is None:
        raise ValueError("give --model, --cluster and --lengths, or --compare alone.")
    else:
        plan(args, console)
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
    add("--lengths", help=f"of responses: {FORMS}")
    turns = (
        "of an episode, like fixed:3 or lognormal:mean=2,max=8; --lengths is then of a turn "
        "(data.max_turns of a --base with data.environment, else 1)"
    )
    add("--turns", help=turns)
    answer = "tokens of an environment's answer (%(default)s)"
    add("--observation-tokens", type=at_least(1), default=64, help=answer)
    add("--tool-ms", help="milliseconds of an environment's answer, like fixed:500 (none)")
    add("--prompts", type=at_least(1), default=512, help="prompts a step (%(default)s)")
    add("--responses", type=at_least(1), default=8, help="responses to each prompt (%(default)s)")
    add("--prompt-tokens", type=at_least(1), default=512, help="tokens of a prompt (%(default)s)")
    add("--max-lag", type=at_least(0), default=1, help="largest lag to try (%(default)s)")
    add("--precision", choices=PRECISIONS, default="bf16", help="fp8: also try generators in fp8")
    add("--dtype", choices=WEIGHT_BYTES, default="float32", help="as model.dtype (%(default)s)")
    every = "as the number in model.gradient_checkpointing; 0 recomputes no layer (%(default)s)"
    add("--recompute-every", type=at_least(0), default=1, metavar="N", help=every)
    add("--devices-per-node", type=at_least(1), default=DEVICES_PER_NODE, help="(%(default)s)")
    add("--generators", help="a second cluster, elsewhere, for all generators, like 32xH20")
    link = "Gb/s between the two clusters (%(default)s)"
    add("--link", type=at_least(0.001, float), default=80.0, help=link)
    add("--price", type=float, help="of one device and hour, in any currency")
    add("--top", type=at_least(1), default=5, help="plans to print (%(default)s)")
    simulate = "simulate as many of them under each dispatch policy; needs torch (%(default)s)"
    add("--simulate", type=at_least(0), default=0, metavar="PLANS", help=simulate)
    add("--out", type=Path, help="file for the best plan that lrl can run, as a recipe")
    base = "recipe with data, rewards, callbacks for --out (%(default)s)"
    add("--base", default="gsm8k", help=base)
    return words


def at_least(least: float, kind: Callable[[str], Any] = int) -> Callable[[str], Any]:
    """Returns a type of argument: a number that is not below `least`."""

    def number(text: str) -> Any:
        if (value := kind(text)) < least:
            raise argparse.ArgumentTypeError(f"{text} is below {least}")
        return value

    return number


def plan(args: argparse.Namespace, console: Console) -> None:
    """Searches for plans and prints them."""
    if args.generators is not None and (args.simulate or args.out):
        raise ValueError("--generators: --simulate and --out know one cluster only.")
    base, data = read_base(args.base)
    cluster = parse_cluster(args.cluster, devices_per_node=args.devices_per_node)
    shape = read_shape(args.model)
    lengths = parse_lengths(args.lengths)
    episodes = episodes_of(args, data, lengths)
    shares = data.get("share_prefixes", True)
    workload = Workload(
        prompts=args.prompts,
        responses=args.responses,
        prompt_tokens=args.prompt_tokens,
        lengths=lengths if episodes is None else episodes.lengths,
        episodes=episodes,
        attention_tokens=attention_tokens_of(shape.hidden) if shares else 0,
    )
    held = Held(dtype=args.dtype, recompute_every=args.recompute_every)
    layouts = Layouts(shape, workload, PRECISIONS[args.precision], held=held)
    today = list(plans_today(layouts, cluster, args.max_lag)) if args.generators is None else []
    later = [one for one in search(args, layouts, cluster) if not runs_today(one, cluster)]
    plans = today_first(today, later, args.top)
    if not plans:
        raise ValueError(f"nothing fits: {memory_needed(layouts, cluster)}")
    console.print(assumed(args, layouts, cluster))
    why_not = f"lrl can run none of these plans today: {memory_needed(layouts, cluster)}"
    if args.generators is None and not today:
        console.print(why_not)
    print_whole(console, table(plans, cluster, workload, args.price))
    console.print(f"Plan 1. {bottleneck(plans[0], workload)}")
    if episodes is not None:
        console.print(in_flight(plans[0], workload))
    if args.simulate:
        from lrl.planning import simulated

        outcomes = [simulated.outcomes(one, workload) for one in plans[: args.simulate]]
        print_whole(console, simulated.outcome_table(outcomes))
    if args.out is not None:
        if not today:
            raise ValueError(f"--out is {str(args.out)!r}, and nothing was written: {why_not}")
        chosen, dispatch = best(today, 1)[0], None
        if args.simulate:
            dispatch = simulated.best_dispatch(simulated.outcomes(chosen, workload))
        recipe = recipe_of(
            chosen, workload, cluster, base=base, model=args.model, dispatch=dispatch
        )
        args.out.write_text(recipe)
        console.print(
            f"{args.out}: the fastest plan that lrl runs today, {chosen.step_s:.3g} s a step."
        )
        console.print(f"lrl fit --config {shlex.quote(str(args.out))}", soft_wrap=True)


def read_base(name: str) -> tuple[Path, dict[str, Any]]:
    """Returns the path of a recipe, given by name or path, and the settings of its data."""
    path = recipes().get(name, Path(name))
    try:
        recipe = yaml.safe_load(path.read_text())
        return path, recipe["data"].get("init_args") or {}
    except (OSError, yaml.YAMLError, KeyError, TypeError, AttributeError) as error:
        known = ", ".join(sorted(recipes()))
        raise ValueError(
            f"--base is {name!r}; give a recipe's file or one of {known}. {error}"
        ) from error


def episodes_of(
    args: argparse.Namespace, data: dict[str, Any], lengths: Quantiles
) -> Episodes | None:
    """Returns the episodes of a plan, with turns of these lengths; None for single turns."""
    turns, setting = args.turns, "--turns"
    if turns is None and data.get("environment") and "max_turns" in data:
        turns, setting = f"fixed:{data['max_turns']}", "data.max_turns of --base"
    if turns is None:
        if data.get("environment") or args.tool_ms is not None:
            raise ValueError("--turns is missing: say how many turns an episode has, like fixed:2.")
        return None
    return Episodes(
        turns=parse_lengths(turns, setting),
        turn_lengths=lengths,
        observation_tokens=args.observation_tokens,
        tool_ms=None if args.tool_ms is None else parse_lengths(args.tool_ms, "--tool-ms"),
    )


def search(args: argparse.Namespace, layouts: Layouts, cluster: Cluster) -> Iterator[Plan]:
    """Yields all plans that fit."""
    if args.generators is None:
        yield from asynchronous(layouts, cluster, args.max_lag)
        yield from synchronous(layouts, cluster)
        return
    writers = parse_cluster(args.generators, "--generators", args.devices_per_node)
    for lag in range(args.max_lag + 1):
        if one := across(layouts, cluster, writers=writers, lag=lag, link=args.link * GIGABIT):
            yield one


def assumed(args: argparse.Namespace, layouts: Layouts, cluster: Cluster) -> str:
    """Returns the work of a step, and the settings that were not given."""
    work = layouts.workload
    default = parser().get_default
    names = ASSUMED[: None if work.episodes else -1]
    left = [
        f"--{name.replace('_', '-')} {value}"
        for name in names
        if (value := getattr(args, name)) == default(name)
    ]
    episodes = ""
    if work.episodes is not None:
        turns = work.episodes.turns
        episodes = (
            f" in episodes of {turns.mean:.3g} turns in the mean and {turns.longest:.0f} at most"
        )
    return (
        f"A step: {work.samples:,} responses of {work.lengths.mean:,.0f} tokens in the mean and "
        f"{work.lengths.longest:,.0f} at most{episodes}; {work.tokens:,.0f} tokens to train, with "
        f"each prompt read {work.trees} times. Policy of {layouts.shape.parameters / 1e9:.3g} "
        f"billion parameters on {cluster}.\nBy default: {', '.join(left) or 'nothing'}."
    )
