"""`lrl plan`: the best few ways to train a model on a cluster, forecast from data sheets.

It imports neither torch nor vLLM and runs on any machine, also without the planned devices. With
`--compare` it compares a run with its forecast.
"""

import argparse
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.progress import track

from lrl.cli import config_file
from lrl.cli.recipes import recipes
from lrl.planning.planner import memory
from lrl.planning.planner.devices import DEVICES_PER_NODE, GB, Cluster, parse_cluster
from lrl.planning.planner.episodes import Episodes
from lrl.planning.planner.layouts import Layouts
from lrl.planning.planner.llamarl_bounds import llamarl_problem
from lrl.planning.planner.model_shape import read_shape
from lrl.planning.planner.quantiles import FORMS, Quantiles, parse_lengths
from lrl.planning.planner.recipe import write_recipe
from lrl.planning.planner.report import (
    assumed,
    bottleneck,
    in_flight,
    print_plans,
    print_whole,
)
from lrl.planning.planner.runnable_today import plans_today, runs_today, why_none
from lrl.planning.planner.search import Plan, across, asynchronous, best, synchronous
from lrl.planning.planner.workload import Workload
from lrl.training.tree_cost import attention_tokens_of

GIGABIT = 1e9 / 8
OBSERVATION_TOKENS = 64
TOOL_HELP = "milliseconds of an environment's answer, like fixed:500 (none)"
PRECISIONS = {"bf16": ("bf16",), "fp8": ("bf16", "fp8")}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `lrl plan` with these arguments; returns the exit status: 2 for bad input, if nothing
    fits, or if a recipe was requested and lrl can run none of the plans."""
    words = list(sys.argv[1:] if argv is None else argv)
    comparing = any(word.partition("=")[0] == "--compare" for word in words)
    args = (compare_parser() if comparing else parser()).parse_args(words)
    console = Console(highlight=False, markup=False)
    console.soft_wrap = not console.is_terminal  # a pipe takes lines of any length
    try:
        if comparing:
            # The simulator needs torch; a plan does not.
            from lrl.planning.simulator import compare
            from lrl.planning.simulator.simulated_plan import observed

            tool_ms = args.tool_ms and observed(parse_lengths(args.tool_ms, "--tool-ms"))
            print_whole(console, compare.table(compare.read_run(args.compare, tool_ms)))
        else:
            plan(args, console)
    except (ValueError, FileNotFoundError) as error:
        sys.stderr.write(f"lrl: error: {error}\n")
        return 2
    return 0


def compare_parser() -> argparse.ArgumentParser:
    """Returns the settings of a comparison: none of a plan's."""
    words = argparse.ArgumentParser(
        prog="lrl plan", allow_abbrev=False, description="Compare a run with its forecast."
    )
    words.add_argument(
        "--compare", type=Path, metavar="RUN", required=True, help="the run's folder"
    )
    words.add_argument("--tool-ms", help=TOOL_HELP)
    return words


def parser() -> argparse.ArgumentParser:
    """Returns the settings of a plan."""
    about = (
        "Forecast how to train a model on a cluster. With --compare RUN alone: compare a run with "
        "its forecast."
    )
    words = argparse.ArgumentParser(prog="lrl plan", allow_abbrev=False, description=about)
    words.add_argument(
        "--model",
        type=Path,
        required=True,
        help="folder in Hugging Face format, or its config.json",
    )
    words.add_argument("--cluster", required=True, help="number and kind of devices, like 8xH100")
    words.add_argument("--lengths", required=True, help=f"of responses: {FORMS}")
    words.add_argument(
        "--turns",
        help="of an episode, like fixed:3 or lognormal:mean=2,max=8; --lengths is then of a turn "
        "(data.max_turns of a --base with data.environment, else 1)",
    )
    words.add_argument(
        "--observation-tokens",
        type=int,
        default=OBSERVATION_TOKENS,
        help="tokens of an environment's answer (%(default)s)",
    )
    words.add_argument("--tool-ms", help=TOOL_HELP)
    words.add_argument("--prompts", type=int, default=512, help="prompts a step (%(default)s)")
    words.add_argument(
        "--responses", type=int, default=8, help="responses to each prompt (%(default)s)"
    )
    words.add_argument(
        "--prompt-tokens", type=int, default=512, help="tokens of a prompt (%(default)s)"
    )
    words.add_argument("--max-lag", type=int, default=1, help="largest lag to try (%(default)s)")
    words.add_argument(
        "--precision", choices=PRECISIONS, default="bf16", help="fp8: also try generators in fp8"
    )
    words.add_argument(
        "--devices-per-node", type=int, default=DEVICES_PER_NODE, help="(%(default)s)"
    )
    words.add_argument(
        "--generators", help="a second cluster, elsewhere, for all generators, like 32xH20"
    )
    words.add_argument(
        "--link", type=float, default=80.0, help="Gb/s between the two clusters (%(default)s)"
    )
    words.add_argument("--price", type=float, help="of one device and hour, in any currency")
    words.add_argument("--top", type=int, default=5, help="plans to print (%(default)s)")
    simulate_help = "simulate as many of them under each dispatch policy; needs torch (%(default)s)"
    words.add_argument("--simulate", type=int, default=0, metavar="PLANS", help=simulate_help)
    words.add_argument(
        "--out", type=Path, help="file for the best plan that lrl can run, as a recipe"
    )
    words.add_argument(
        "--base",
        default="gsm8k",
        help="recipe with data, rewards, callbacks for --out (%(default)s)",
    )
    return words


def check(args: argparse.Namespace) -> None:
    """Raises ValueError if a setting is outside its range."""
    for name, least in {"max_lag": 0, "top": 1, "simulate": 0}.items():
        if getattr(args, name) < least:
            raise ValueError(
                f"--{name.replace('_', '-')} is {getattr(args, name)}; it must be at least {least}."
            )
    if not args.link > 0:
        raise ValueError(f"--link is {args.link:g} Gb/s; it must be above 0.")
    if args.simulate and args.generators is not None:
        raise ValueError(
            f"--simulate is {args.simulate}, and the simulator knows one cluster: leave out "
            f"--generators {args.generators}, or --simulate."
        )
    if args.price is not None and not args.price >= 0:
        raise ValueError(f"--price is {args.price:g}; it must be at least 0.")
    if args.out is not None and (args.out.is_dir() or not args.out.parent.is_dir()):
        why = (
            "is a folder"
            if args.out.is_dir()
            else f"lies in no folder ({args.out.parent} is not there)"
        )
        raise ValueError(
            f"--out is {str(args.out)!r}, which {why}. Give a file in a folder that is there."
        )


def plan(args: argparse.Namespace, console: Console) -> None:
    """Searches, prints, simulates and writes.

    Raises:
        ValueError: A setting is wrong, nothing fits, or no plan can be written as a recipe.
        FileNotFoundError: A file is missing.
    """
    check(args)
    base = base_recipe(args.base)
    cluster = parse_cluster(args.cluster, devices_per_node=args.devices_per_node)
    lengths = parse_lengths(args.lengths)
    shape = read_shape(args.model)
    episodes = episodes_of(args, base, lengths)
    workload = Workload(
        prompts=args.prompts,
        responses=args.responses,
        prompt_tokens=args.prompt_tokens,
        lengths=lengths if episodes is None else episodes.lengths,
        episodes=episodes,
        attention_tokens=attention_tokens_of(shape.hidden)
        if data_of(base).get("share_prefixes", True)
        else 0,
    )
    layouts = Layouts(shape, workload, PRECISIONS[args.precision])
    today = list(plans_today(layouts, cluster, args.max_lag)) if args.generators is None else []
    later = [plan for plan in search(args, layouts, cluster) if not runs_today(plan, cluster)]
    plans = today_first(today, later, args.top)
    if not plans:
        raise ValueError(nothing_fits(layouts, cluster))
    console.print(assumed(vars(args), parser().get_default, layouts, cluster))
    why_not = why_no_recipe(args, layouts, cluster, today)
    if why_not:
        console.print(why_not)
    print_plans(console, plans, cluster=cluster, workload=workload, price=args.price)
    console.print(f"Plan 1. {bottleneck(plans[0], workload)}")
    if episodes is not None:
        console.print(in_flight(plans[0], workload))
    if args.generators is None:
        problem = llamarl_problem(layouts, cluster)
        console.print(
            "LlamaRL's two problems, without longest responses, syncs and whole devices, with one "
            f"layout for both sides when they take turns: {problem.synchronous_s():.3g} s "
            f"synchronous, {problem.asynchronous_s():.3g} s asynchronous."
        )
    if args.simulate:
        simulate(plans[: args.simulate], workload, console)
    if args.out is not None:
        if why_not:
            raise ValueError(f"--out is {str(args.out)!r}, and nothing was written. {why_not}")
        write(
            args, best(today, 1)[0], workload=workload, cluster=cluster, base=base, console=console
        )


def data_of(base: Path) -> dict[str, Any]:
    """Returns the settings of the data in a recipe."""
    return yaml.safe_load(base.read_text())["data"].get("init_args") or {}


def episodes_of(args: argparse.Namespace, base: Path, lengths: Quantiles) -> Episodes | None:
    """Returns the episodes of a plan, with turns of these lengths; None for single turns.

    Raises:
        ValueError: The number of turns is missing, or a setting of episodes has no meaning.
    """
    data = data_of(base)
    turns, setting = args.turns, "--turns"
    if turns is None and data.get("environment"):
        if "max_turns" not in data:
            raise ValueError(
                f"--base {args.base} has data.environment, so its responses are episodes, and no "
                "data.max_turns: say how many turns they have with --turns, like fixed:2."
            )
        turns = f"fixed:{data['max_turns']}"
        setting = f"data.max_turns of --base {args.base}"
    if turns is None:
        for name, unset in {"observation_tokens": OBSERVATION_TOKENS, "tool_ms": None}.items():
            if (value := getattr(args, name)) != unset:
                raise ValueError(
                    f"--{name.replace('_', '-')} is {value}, and responses have one turn: say how "
                    "many turns they have with --turns, or leave it out."
                )
        return None
    if args.out is not None and not data.get("environment"):
        raise ValueError(
            f"--turns is {args.turns!r}, and --base {args.base} has no data.environment for the "
            "recipe that --out writes: name a --base with one."
        )
    return Episodes(
        turns=parse_lengths(turns, setting),
        turn_lengths=lengths,
        observation_tokens=args.observation_tokens,
        tool_ms=None if args.tool_ms is None else parse_lengths(args.tool_ms, "--tool-ms"),
    )


def why_no_recipe(
    args: argparse.Namespace, layouts: Layouts, cluster: Cluster, today: list[Plan]
) -> str:
    """Returns why none of the plans can be a recipe; empty if one can."""
    if args.generators is not None:
        flag = f"--generators {args.generators}"
        return (
            f"{flag}: lrl writes no recipe for two clusters, and has run none. Leave it out for "
            "one."
        )
    return "" if today else why_none(layouts, cluster, args.max_lag)


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


def today_first(today: Sequence[Plan], later: Sequence[Plan], most: int) -> list[Plan]:
    """Returns the best `most` plans: first plans that lrl can run, then others, which have two
    places of five."""
    able, others = (best(plans, most) if plans else [] for plans in (today, later))
    kept = max(most - len(others), most - 2 * most // 5)
    return (able[:kept] + others)[:most]


def simulate(plans: Sequence[Plan], workload: Workload, console: Console) -> None:
    """Prints each plan's simulation under each dispatch policy."""
    from lrl.planning.simulator import simulated_plan  # it needs torch; a plan does not

    numbered = track(
        enumerate(plans, start=1), "Simulating", total=len(plans), console=console, transient=True
    )
    outcomes = []
    for number, plan in numbered:
        outcomes += [(number, one) for one in simulated_plan.outcomes(plan, workload)]
    print_whole(console, simulated_plan.table(outcomes))


def write(
    args: argparse.Namespace,
    plan: Plan,
    workload: Workload,
    cluster: Cluster,
    base: Path,
    console: Console,
) -> None:
    """Writes a plan as a recipe, with its fastest dispatch policy if it is simulated.

    Raises:
        ValueError: The file cannot be written.
    """
    dispatch = None
    if args.simulate:
        from lrl.planning.simulator import simulated_plan

        dispatch = simulated_plan.best_dispatch(simulated_plan.outcomes(plan, workload))
    try:
        write_recipe(
            args.out,
            plan,
            workload=workload,
            cluster=cluster,
            base=base,
            model=args.model,
            dispatch=dispatch,
        )
    except OSError as error:
        raise ValueError(
            f"--out is {str(args.out)!r}, which cannot be written: {error}."
        ) from error
    console.print(f"{args.out}: the fastest plan that lrl runs today, {plan.step_s:.3g} s a step.")
    console.print(f"lrl fit --config {shlex.quote(str(args.out))}", soft_wrap=True)


def base_recipe(name: str) -> Path:
    """Returns the path of a recipe that is given by name or by path.

    Raises:
        FileNotFoundError: There is none.
        ValueError: It is no recipe.
    """
    known = ", ".join(sorted(recipes()))
    path = recipes().get(name, Path(name))
    if not path.is_file():
        raise FileNotFoundError(f"--base is {name!r}; give a YAML file or one of {known}.")
    text = config_file.read(path)
    try:
        config_file.check(text)
    except ValueError as error:
        raise ValueError(f"--base {name}: {error}") from error
    recipe = yaml.safe_load(text)
    parts = ("model", "data", "trainer")
    if not isinstance(recipe, dict) or not all(
        isinstance(recipe.get(part), dict) for part in parts
    ):
        raise ValueError(
            f"--base is {name!r}, which is no recipe: it needs {', '.join(parts)}, as {known} have "
            "them."
        )
    return path


def nothing_fits(layouts: Layouts, cluster: Cluster) -> str:
    """Explains why there is no plan."""
    longest = layouts.workload.longest
    room = memory.usable(cluster.device) / GB
    trained = min(
        memory.training(layouts.shape, cluster.count // tp * tp, tp).bytes_for(longest)
        for tp in layouts.divisions(min(cluster.devices_per_node, cluster.count))
    )
    return (
        f"nothing fits: spread over all of {cluster}, training takes at least {trained / GB:.0f} "
        f"GB of each device's {room:.0f} with one response of {longest:,} tokens, and generators "
        "need room next to it. Take a larger --cluster, a smaller --model or shorter --lengths."
    )
