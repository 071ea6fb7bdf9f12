"""The quickstart with several seeds, one after the other: accuracy before and after, minutes,
memory. Prints a table, longer by a row after each.

    python -m benchmarks.quickstart_seeds [--seeds 0 1 2] [-- WORDS]

WORDS are further settings of `lrl fit`, such as `--model.lora.rank 16`.

Each run is the command of a new user, from the warm-up on.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil

from benchmarks import arguments, records

HEADS = ("seed", "before", "after", "95 % interval", "minutes", "memory (GB)")


def run(seed: int, more: list[str]) -> list[str]:
    policy, found = (Path(f"runs/quickstart/{name}{seed}") for name in ("policy-seed", "seeds-"))
    for folder in (policy, found):
        shutil.rmtree(folder, ignore_errors=True)
    words = ["fit", "--config", "quickstart", "--seed_everything", str(seed)]
    words += ["--trainer.logger.version", found.name, *more]
    started = time.monotonic()
    # The program itself: Lightning starts the other ranks by the command of the first, and `python
    # -c` has no file.
    process = psutil.Popen([str(Path(sys.executable).with_name("lrl")), *words])
    peak = 0
    while process.poll() is None:
        peak = max(peak, memory(process))
        time.sleep(1.0)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, words)
    minutes = (time.monotonic() - started) / 60
    scores = scores_of(found)
    after, low, high = scores[-1]
    cells = [f"{scores[0][0]:.3f}", f"{after:.3f}", f"{low:.3f} to {high:.3f}"]
    return [str(seed), *cells, f"{minutes:.1f}", f"{peak / 1e9:.1f}"]


def memory(process: psutil.Process) -> int:
    total = 0
    for one in [process, *process.children(recursive=True)]:
        try:
            total += one.memory_full_info().pss
        except psutil.Error:
            continue  # it ended meanwhile
    return total


def scores_of(folder: Path) -> list[tuple[float, float, float]]:
    """Returns accuracy, low and high of each evaluation, in the order of steps; from the responses
    themselves."""
    from lrl.evaluation import mean_interval

    found = []
    for path in sorted((folder / "evaluation").glob("*.jsonl")):
        answers = [json.loads(line) for line in path.read_text().splitlines()]
        rewards = [answer["reward"] for answer in answers]
        found.append(mean_interval([[one] for one in rewards if one is not None]))
    return found


def main() -> None:
    parser = arguments.make_parser("quickstart_seeds", __doc__)
    arguments.add(parser, seeds=([0, 1, 2, 3, 4], "one run each"))
    parser.add_argument("words", nargs="*", help="further settings of `lrl fit`, behind --")
    args = parser.parse_args()
    rows = []
    for seed in args.seeds:
        rows.append(run(seed, args.words))
        print(records.markdown(HEADS, rows), flush=True)


if __name__ == "__main__":
    main()
