"""`lrl plan`: the best few ways to train a model on a cluster, forecast from data sheets.

It imports neither torch nor vLLM and works on any machine, also without the devices it plans for. With `--compare` it
lays a forecast beside what a run took.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.progress import track

from lrl.cli.recipes import recipes
from lrl.planning.lengths import FORMS, parse_lengths
from lrl.planning.planner import memory
from lrl.planning.planner.devices import DEVICES_PER_NODE, GB, Cluster, parse_cluster
from lrl.planning.planner.layouts import Sides
from lrl.planning.planner.llamarl_bounds import llamarl_problem
from lrl.planning.planner.model_shape import read_shape
from lrl.planning.planner.recipe import write_recipe
from lrl.planning.planner.report import assumed, print_plans, what_binds
from lrl.planning.planner.runnable_today import one_node, plans_today, runs_today, why_none
from lrl.planning.planner.search import Plan, across, asynchronous, best, synchronous
from lrl.planning.planner.tables import print_whole
from lrl.planning.planner.workload import Workload

GIGABIT = 1e9 / 8
DEFAULTS: dict[str, Any] = {
    "prompts": 512,
    "responses": 8,
    "prompt_tokens": 512,
    "max_lag": 1,
    "precision": "bf16",
    "devices_per_node": DEVICES_PER_NODE,
}
"""What a plan assumes where nothing is said."""
PRECISIONS = {"bf16": ("bf16",), "fp8": ("bf16", "fp8")}


def main(argv: Sequence[str] | None = None) -> int:
    """Print the plans and write the recipe.

    Args:
        argv: The words after `lrl plan`.

    Returns:
        Exit status: 2 for bad input, if nothing fits, or if a recipe was asked for and lrl can run none of the plans.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    comparing = any(word.partition("=")[0] == "--compare" for word in words)
    asked = (compare_parser() if comparing else parser()).parse_args(words)
    console = Console(highlight=False, markup=False)
    console.soft_wrap = not console.is_terminal  # a pipe takes lines of any length
    try:
        if comparing:
            compare(asked.compare, console)
        else:
            plan(asked, console)
    except (ValueError, FileNotFoundError) as error:
        sys.stderr.write(f"lrl: error: {error}\n")
        return 2
    return 0


def compare_parser() -> argparse.ArgumentParser:
    """The settings of a comparison: it takes none of those of a plan."""
    words = argparse.ArgumentParser(prog="lrl plan", allow_abbrev=False, description="Lay a forecast beside a run.")
    words.add_argument("--compare", type=Path, metavar="RUN", required=True, help="the run's folder")
    return words


def parser() -> argparse.ArgumentParser:
    """The settings of a plan."""
    about = "Forecast how to train a model on a cluster. Or, with --compare RUN alone, beside what a run took."
    words = argparse.ArgumentParser(prog="lrl plan", allow_abbrev=False, description=about)
    words.add_argument("--model", type=Path, required=True, help="folder in Hugging Face format, or its config.json")
    words.add_argument("--cluster", required=True, help="number and kind of devices, like 8xH100")
    words.add_argument("--lengths", required=True, help=f"of responses: {FORMS}")
    words.set_defaults(**DEFAULTS)
    words.add_argument("--prompts", type=int, help="prompts a step (%(default)s)")
    words.add_argument("--responses", type=int, help="responses to each prompt (%(default)s)")
    words.add_argument("--prompt-tokens", type=int, help="tokens of a prompt (%(default)s)")
    words.add_argument("--max-lag", type=int, help="largest lag that is tried (%(default)s)")
    words.add_argument("--precision", choices=PRECISIONS, help="fp8: generators may be fp8, too")
    words.add_argument("--devices-per-node", type=int, help="(%(default)s)")
    words.add_argument("--generators", help="a second cluster, elsewhere, for all generators, like 32xH20")
    words.add_argument("--link", type=float, default=80.0, help="Gb/s between the two clusters (%(default)s)")
    words.add_argument("--price", type=float, help="of one device and hour, in any currency")
    words.add_argument("--top", type=int, default=5, help="plans that are printed (%(default)s)")
    simulate_help = (
        "put so many of them through the simulator, under each rule of dispatch; it needs torch (%(default)s)"
    )
    words.add_argument("--simulate", type=int, default=0, metavar="PLANS", help=simulate_help)
    words.add_argument("--out", type=Path, help="where to write the best plan that lrl can run as a recipe")
    words.add_argument("--base", default="gsm8k", help="recipe with data, rewards, callbacks for --out (%(default)s)")
    return words


def compare(run: Path, console: Console) -> None:
    """Print what a run took beside what it should have taken.

    Raises:
        ValueError: Its folder lacks something, or holds something else.
        FileNotFoundError: It has no timeline or no config.
    """
    from lrl.planning.simulator import compare  # the simulator needs torch; a plan does not

    print_whole(console, compare.table(compare.read_run(run)))


def check(asked: argparse.Namespace) -> None:
    """Raises ValueError if a number is outside its range."""
    for name, least in {"max_lag": 0, "top": 1, "simulate": 0}.items():
        if getattr(asked, name) < least:
            flag = name.replace("_", "-")
            raise ValueError(f"--{flag} is {getattr(asked, name)}; it must be at least {least}.")
    if not asked.link > 0:
        raise ValueError(f"--link is {asked.link:g} Gb/s; it must be above 0.")
    if asked.simulate and asked.generators is not None:
        raise ValueError(
            f"--simulate is {asked.simulate}, and the simulator knows one cluster: leave out --generators "
            f"{asked.generators}, or --simulate."
        )
    if asked.price is not None and not asked.price >= 0:
        raise ValueError(f"--price is {asked.price:g}; it must be at least 0.")
    if asked.out is not None and (asked.out.is_dir() or not asked.out.parent.is_dir()):
        why = "is a folder" if asked.out.is_dir() else f"lies in no folder ({asked.out.parent} is not there)"
        raise ValueError(f"--out is {str(asked.out)!r}, which {why}. Give a file in a folder that is there.")


def plan(asked: argparse.Namespace, console: Console) -> None:
    """Search, print, write.

    Raises:
        ValueError: A setting is wrong, nothing fits, or no plan can be written as a recipe.
        FileNotFoundError: A file is not there.
    """
    check(asked)
    base = base_recipe(asked.base)
    cluster = parse_cluster(asked.cluster, devices_per_node=asked.devices_per_node)
    workload = Workload(
        prompts=asked.prompts,
        responses=asked.responses,
        prompt_tokens=asked.prompt_tokens,
        lengths=parse_lengths(asked.lengths),
    )
    sides = Sides(read_shape(asked.model), workload, PRECISIONS[asked.precision])
    today = list(plans_today(sides, cluster, asked.max_lag)) if asked.generators is None else []
    plans = first_today(
        today, [plan for plan in found(asked, sides, cluster) if not runs_today(plan, cluster)], asked.top
    )
    if not plans:
        raise ValueError(nothing_fits(sides, cluster))
    console.print(assumed(vars(asked), DEFAULTS, sides, cluster))
    if not today:
        console.print(why_not(asked, sides, cluster))
    print_plans(console, plans, cluster, workload, asked.price)
    console.print(f"Plan 1. {what_binds(plans[0], workload)}")
    if asked.generators is None:
        console.print(in_theory(sides, cluster))
    if asked.simulate:
        simulate(plans[: asked.simulate], sides, cluster, console)
    if asked.out is not None:
        write(asked, today, sides, cluster, base, console)


def first_today(today: Sequence[Plan], later: Sequence[Plan], most: int) -> list[Plan]:
    """The best `most` plans: those that lrl can run, then those that it cannot, which have two places of five."""
    able = best(today, most - (2 * most // 5 if later else 0)) if today else []
    places = most - len(able)
    return able + (best(later, places) if later and places else [])


def why_not(asked: argparse.Namespace, sides: Sides, cluster: Cluster) -> str:
    """Why lrl can run none of the plans."""
    if asked.generators is not None:
        return (
            f"lrl can run none of these plans today: it works on one node. Leave out --generators {asked.generators}."
        )
    return why_none(sides, cluster, asked.max_lag)


def write(
    asked: argparse.Namespace, today: Sequence[Plan], sides: Sides, cluster: Cluster, base: Path, console: Console
) -> None:
    """Write the best plan that lrl can run as a recipe.

    Raises:
        ValueError: There is none, or the file cannot be written.
    """
    if not today:
        raise ValueError(f"--out is {str(asked.out)!r}, and nothing was written. {why_not(asked, sides, cluster)}")
    running = best(today, 1)[0]
    dispatch = fastest_dispatch(running, sides, one_node(cluster)) if asked.simulate else None
    try:
        write_recipe(asked.out, running, sides.workload, cluster, base, asked.model, dispatch)
    except OSError as error:
        raise ValueError(f"--out is {str(asked.out)!r}, which cannot be written: {error}.") from error
    console.print(f"{asked.out}: the fastest plan that lrl runs today, {running.step_s:.3g} s a step.")
    console.print(f"lrl fit --config {shlex.quote(str(asked.out))}", soft_wrap=True)


def simulate(plans: Sequence[Plan], sides: Sides, cluster: Cluster, console: Console) -> None:
    """Print what the simulator says of each plan, under each rule of dispatch."""
    from lrl.planning.simulator import simulated_plan  # it needs torch; a plan does not

    numbered = track(enumerate(plans, start=1), "Simulating", total=len(plans), console=console, transient=True)
    outcomes = [
        (number, one)
        for number, plan in numbered
        for one in simulated_plan.outcomes(plan, sides, one_node(cluster) if runs_today(plan, cluster) else cluster)
    ]
    print_whole(console, simulated_plan.table(outcomes))


def fastest_dispatch(plan: Plan, sides: Sides, cluster: Cluster) -> dict[str, Any] | None:
    """The setting `data.dispatch` that the simulator finds fastest for a plan; None for the default."""
    from lrl.planning.simulator import simulated_plan

    return simulated_plan.best_dispatch(simulated_plan.outcomes(plan, sides, cluster))


def found(asked: argparse.Namespace, sides: Sides, cluster: Cluster) -> Iterable[Plan]:
    """All plans that fit."""
    if asked.generators is None:
        yield from asynchronous(sides, cluster, asked.max_lag)
        yield from synchronous(sides, cluster)
        return
    writers = parse_cluster(asked.generators, "--generators", asked.devices_per_node)
    for lag in range(asked.max_lag + 1):
        one = across(sides, cluster, writers, lag, asked.link * GIGABIT)
        if one is not None:
            yield one


def base_recipe(name: str) -> Path:
    """The path of a recipe that is given by name or by path.

    Raises:
        FileNotFoundError: There is none.
        ValueError: It is no recipe.
    """
    known = ", ".join(sorted(recipes()))
    path = recipes().get(name, Path(name))
    if not path.is_file():
        raise FileNotFoundError(f"--base is {name!r}; give a YAML file or one of {known}.")
    try:
        recipe = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"--base is {name!r}, which is no YAML: {' '.join(str(error).split())}.") from error
    parts = ("model", "data", "trainer")
    if not isinstance(recipe, dict) or not all(isinstance(recipe.get(part), dict) for part in parts):
        raise ValueError(f"--base is {name!r}, which is no recipe: it needs {', '.join(parts)}, as {known} have them.")
    return path


def in_theory(sides: Sides, cluster: Cluster) -> str:
    """LlamaRL's two problems in a sentence."""
    problem = llamarl_problem(sides, cluster)
    return (
        "LlamaRL's two problems, without longest responses, syncs and whole devices, with one layout for both sides "
        f"when they take turns: {problem.synchronous_s():.3g} s synchronous, {problem.asynchronous_s():.3g} s "
        "asynchronous."
    )


def nothing_fits(sides: Sides, cluster: Cluster) -> str:
    """Why there is no plan."""
    room = memory.usable(cluster.device) / GB
    trained = min(
        memory.training(sides.shape, cluster.count // tp * tp, tp).bytes_for(sides.workload.longest)
        for tp in sides.divisions(min(cluster.devices_per_node, cluster.count))
    )
    return (
        f"nothing fits: spread over all of {cluster}, training takes at least {trained / GB:.0f} GB of each device's "
        f"{room:.0f} with one response of {sides.workload.longest:,} tokens, and generators need room beside it. Take "
        "a larger --cluster, a smaller --model or shorter --lengths."
    )
