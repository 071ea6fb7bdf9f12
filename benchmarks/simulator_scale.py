"""The cost of simulating a large run: processor seconds on one core, and memory.

    python -m benchmarks.simulator_scale
    python -m benchmarks.simulator_scale --generators 100 --groups 125 --steps 2     # seconds

Groups of 8, lag 1, responses of about 20,000 tokens (lognormal, median 20,000, sigma 0.5, cut at
32,768), decode steps of 10 ms and more, at most 256 responses and 2 million tokens of context in a
generator.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Sequence

from benchmarks import arguments, records
from lrl.planning.costs import LinearGenerator, LinearTrainer
from lrl.planning.simulator.length_sampling import Lognormal
from lrl.planning.simulator.simulate import Simulation

RESPONSES = 8
"""Of a group."""


def main(argv: Sequence[str] | None = None) -> int:
    """Simulates one run and prints its cost."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.simulator_scale", description="The simulator's cost."
    )
    parser.add_argument("--generators", type=int, default=2000, help="(%(default)s)")
    parser.add_argument("--groups", type=int, default=2500, help="of a step (%(default)s)")
    parser.add_argument("--steps", type=int, default=5, help="(%(default)s)")
    arguments.add_out(parser, "simulator_scale")
    args = arguments.parse(parser, argv)
    generator = LinearGenerator(
        kv_tokens=2_000_000,
        step_s=0.01,
        response_s=2e-5,
        context_token_s=1e-9,
        prefill_token_s=1e-5,
        pause_s=1.0,
    )
    scene = Simulation(
        generators=[generator] * args.generators,
        trainer=LinearTrainer(token_s=1e-6, token_squared_s=1e-12, optimizer_s=1.0, weights_s=2.0),
        lengths=Lognormal(20_000, 0.5, 32_768),
        steps=args.steps,
        groups_per_step=args.groups,
        rollouts_per_group=RESPONSES,
        micro_batch_tokens=1_000_000,
    )
    started = time.process_time()
    forecast = scene.run()
    record = {
        "generators": args.generators,
        "responses": args.groups * args.steps * RESPONSES,
        "tokens": sum(one.tokens for one in forecast.generators),
        "simulated_s": records.rounded(forecast.seconds),
        "processor_s": records.rounded(time.process_time() - started),
        "peak_mb": round(
            resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        ),  # Linux counts in KiB
    }
    records.append(args.out, record | {"command": args.command})
    print("| " + " | ".join(record) + " |\n" + "|---" * len(record) + "|")
    print("| " + " | ".join(f"{value:,}" for value in record.values()) + " |")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
