"""How fast `lrl view` shows a run with many rollouts, and pictures of a run.

    python -m benchmarks.view --rollouts 10000
    python -m benchmarks.view --run runs/calculator/version_0 --pictures docs/view

The run of the first is made: rollouts of random tokens with random rewards, written by the functions
of `lrl.callbacks.RolloutFile`. Needs Chromium in the path.
"""

from __future__ import annotations

import argparse
import io
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from PIL import Image

from benchmarks import chromium
from lrl.callbacks.rollout_file import group_lines
from lrl.rollouts.token_texts import TokenTexts
from lrl.training.prefix_tree import TrainingSample
from lrl.types import Group, Prompt, Rollout
from lrl.viewer import rollout_file

GROUPS_PER_STEP, RESPONSES = 8, 8
WINDOWS = {"": (1400, 860, False), "_narrow": (420, 800, True)}
"""End of the name of each picture; its width and height, and whether it has the dark scheme."""
COLOURS = 128


class Words:
    """A tokenizer of 26 words."""

    def __len__(self) -> int:
        return 26

    def decode(self, token_ids: Sequence[int], **settings: object) -> str:
        return "".join(f" {chr(97 + token) * (1 + token % 7)}" for token in token_ids)


def write_run(folder: Path, rollouts: int, tokens: int) -> float:
    """Writes a run of so many rollouts, of `tokens` tokens each; returns the seconds of a core that
    the lines took."""
    draw = random.Random(0)
    texts = TokenTexts(Words())  # type: ignore[arg-type]
    seconds = 0.0
    for number in range(rollouts // RESPONSES):
        step = number // GROUPS_PER_STEP
        group, samples, ratios = make_group(draw, number, step, tokens)
        began = time.process_time()
        text = group_lines(group, samples, ratios, step=step, texts=texts)
        rollout_file.append(folder / rollout_file.FILE, text)
        seconds += time.process_time() - began
    return seconds


def make_group(
    draw: random.Random, number: int, step: int, tokens: int
) -> tuple[Group, list[list[TrainingSample]], dict[int, dict[int, float]]]:
    """Returns a group, what a step has trained of it, and the log-ratios of its tokens, as
    `group_lines` takes them."""
    prompt = Prompt(id=number, token_ids=[1, 2, 3], text=f"prompt {number}")
    samples = []
    for _ in range(RESPONSES):
        oldest = max(0, step - draw.randrange(3))
        rollout = Rollout(
            token_ids=draw.choices(range(26), k=tokens),
            logprobs=[-draw.expovariate(2.0) for _ in range(tokens)],
            versions=[oldest] * (tokens // 2) + [step] * (tokens - tokens // 2),
            finish_reason="stop",
            reward=float(draw.random() < 0.5),
        )
        advantage = torch.tensor(draw.uniform(-1, 1))
        sample = TrainingSample(
            number,
            prompt.token_ids,
            rollout=rollout,
            advantages=advantage,
            trained=[True] * tokens,
        )
        samples.append(sample)
    group = Group(index=number, prompt=prompt, rollouts=[one.rollout for one in samples])
    ratios = {
        id(rollout): {place: draw.gauss(0, 0.1) for place in range(tokens)}
        for rollout in group.rollouts
    }
    return group, [[one] for one in samples], ratios


@contextmanager
def viewer(run: Path) -> Iterator[tuple[str, float]]:
    """Gives the address that `lrl view` prints, and the seconds until it does."""
    began = time.perf_counter()
    words = [sys.executable, "-c", "import sys; from lrl.cli.main import main; sys.exit(main())"]
    server = subprocess.Popen([*words, "view", str(run)], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        for line in server.stdout:
            if found := re.search(r"http\S+", line):
                yield found[0], time.perf_counter() - began
                break
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(30)


def measure(run: Path) -> None:
    """Prints the seconds to the first picture, and the frames while the list scrolls."""
    size = (run / rollout_file.FILE).stat().st_size
    with viewer(run) as (url, started_s), chromium.page() as page:
        page.open(url, *WINDOWS[""])
        drawn_s = int(page.wait("document.documentElement.dataset.drawnMs")) / 1000
        frames = page.run(SCROLL)
    print(f"file: {size / 2**20:.0f} MiB")
    print(f"from the command to its address: {started_s:.2f} s")
    print(f"from the address to the first picture: {drawn_s:.2f} s")
    print(f"scrolling through the whole list: frames of {frames['median']:.0f} ms in the median,")
    print(
        f"    {frames['longest']:.0f} ms at most; rows missing in {frames['empty']} of {frames['count']}"
    )


SCROLL = """new Promise((done) => {
  const box = document.getElementById("list"), times = [];
  let last = performance.now(), empty = 0;
  const step = (now) => {
    times.push(now - last);
    last = now;
    if (!document.querySelector(".row")) empty += 1;
    box.scrollTop += box.scrollHeight / 300;
    if (times.length < 300) return requestAnimationFrame(step);
    times.sort((a, b) => a - b);
    done({ median: times[150], longest: times[299], empty, count: 300 });
  };
  requestAnimationFrame(step);
})"""


def take_pictures(run: Path, where: Path, group: str, colour: str) -> None:
    """Writes the pictures of `WINDOWS`, whose names begin with `where`, with few colours."""
    with viewer(run) as (url, _), chromium.page() as page:
        for end, window in WINDOWS.items():
            page.open(f"{url}&{group}&colour={colour}", *window)
            page.wait("document.querySelector('.response .tokens') && true")
            time.sleep(0.5)
            picture = Image.open(io.BytesIO(page.picture())).convert("RGB")
            picture.quantize(COLOURS).save(f"{where}{end}.png", optimize=True)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.view")
    parser.add_argument("--rollouts", type=int, default=10_000, help="(%(default)s)")
    parser.add_argument("--tokens", type=int, default=200, help="of a rollout (%(default)s)")
    parser.add_argument("--run", type=Path, help="a run's folder, in the place of a made one")
    parser.add_argument("--pictures", type=Path, help="pictures of --run, such as docs/view")
    parser.add_argument("--group", default="step=0&index=0", help="on the pictures (%(default)s)")
    parser.add_argument("--colour", default="log-prob", help="(%(default)s)")
    args = parser.parse_args(argv)
    if args.pictures:
        take_pictures(args.run, args.pictures, args.group, args.colour)
    elif args.run:
        measure(args.run)
    else:
        with tempfile.TemporaryDirectory() as folder:
            seconds = write_run(Path(folder), args.rollouts, args.tokens)
            written = args.rollouts * args.tokens
            print(f"writing: {1e6 * seconds / written:.1f} us of a core a token")
            measure(Path(folder))


if __name__ == "__main__":
    main()
