"""Puts together on a GPU machine what `pack.py` packed: `python benchmarks/gpu/unpack.py`.

The target is a folder for PYTHONPATH, before the packages of the machine's image. torch looks for
NVIDIA's libraries beside itself, so those of the image are linked there. lrl comes as a clone and
is not installed: it is linked, too, and its entry points are written, by which vLLM finds lrl's
plugin. The command `lrl` is `python -m lrl.cli.main`. `--check` has vLLM serve a tiny model once.

Python 3.12 alone is needed; `--check` needs what a run needs.
"""

from __future__ import annotations

import argparse
import compileall
import hashlib
import importlib.util
import io
import json
import lzma
import os
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import entry_points, version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SAMPLER = "VLLM_USE_FLASHINFER_SAMPLER"
"""vLLM starts without flashinfer only where this is 0."""


def joined(listing: Path) -> bytes:
    """Returns the archive that the pieces of one set hold; raises ValueError naming the pieces that
    are missing or damaged."""
    content = json.loads(listing.read_text())
    files = [listing.with_name(name) for name in content["pieces"]]
    pieces = [file.read_bytes() if file.exists() else b"" for file in files]
    faults = [
        f"{file} is {'damaged' if file.exists() else 'missing'}"
        for file, piece, checksum in zip(files, pieces, content["pieces"].values(), strict=True)
        if hashlib.sha256(piece).hexdigest() != checksum
    ]
    if faults:
        raise ValueError(f"{'; '.join(faults)}: carry it (again)")
    packed = io.BytesIO(b"".join(pieces))
    with ThreadPoolExecutor() as pool:
        return b"".join(pool.map(lzma.decompress, map(packed.read, content["streams"])))


def unpack(carried: Path, target: Path) -> None:
    """Unpacks every set whose list is in `carried`."""
    listings = sorted(carried.glob("*.json"))
    if not listings:
        raise ValueError(f"{carried} has no list of pieces: carry NAME.json, too")
    for listing in listings:
        with tarfile.open(fileobj=io.BytesIO(joined(listing))) as tree:
            tree.extractall(target, filter="tar")


def link(path: Path, to: Path) -> None:
    """Makes `path` a link, unless something is there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        path.symlink_to(to)


def link_image(target: Path) -> None:
    """Links those packages of NVIDIA that this Python has and the target lacks."""
    spec = importlib.util.find_spec("nvidia")
    for folder in spec.submodule_search_locations or () if spec else ():
        for package in Path(folder).iterdir():
            link(target / "nvidia" / package.name, package.resolve())


def link_clone(target: Path) -> None:
    """Links lrl, and writes its entry points as an installation would."""
    link(target / "lrl", ROOT / "lrl")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    name, release = project["name"], project["version"]
    info = target / f"{name}-{release}.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {release}\n")
    with (info / "entry_points.txt").open("w") as file:
        for group, entries in project["entry-points"].items():
            file.write(f"[{group}]\n")
            file.writelines(f"{entry} = {place}\n" for entry, place in entries.items())


def environment(target: Path) -> dict[str, str]:
    own = {"PYTHONPATH": f"{target.resolve()}:{os.environ.get('PYTHONPATH', '')}".rstrip(":")}
    return own if importlib.util.find_spec("flashinfer") else {**own, SAMPLER: "0"}


def serve_once() -> None:
    """Has vLLM answer one prompt with a tiny model of random weights, and prints what ran."""
    started = time.monotonic()
    import transformers
    from vllm import LLM, SamplingParams

    for package in ("torch", "transformers"):
        print(package, version(package), flush=True)
    plugins = entry_points(group="vllm.general_plugins", name="lrl")
    assert [plugin.load() for plugin in plugins], "vLLM does not find lrl's plugin"
    config = transformers.LlamaConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=512,
        max_position_embeddings=128,
    )
    with tempfile.TemporaryDirectory() as model:
        transformers.LlamaForCausalLM(config).bfloat16().save_pretrained(model)
        engine = LLM(
            model,
            skip_tokenizer_init=True,
            enforce_eager=True,
            kv_cache_memory_bytes=2**26,
            gpu_memory_utilization=0.1,
        )
    sampling = SamplingParams(max_tokens=8, ignore_eos=True, detokenize=False)
    (answer,) = engine.generate({"prompt_token_ids": [1, 2, 3]}, sampling, use_tqdm=False)
    assert len(answer.outputs[0].token_ids) == 8, answer
    print(f"vLLM answered after {time.monotonic() - started:.0f} s", flush=True)


def check(target: Path, seconds: int) -> None:
    """Runs `serve_once` in processes of its own; `timeout` ends them all at the limit."""
    program = "from benchmarks.gpu.unpack import serve_once; serve_once()"
    command = ["timeout", "--signal=KILL", str(seconds), sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **environment(target)})
    if done.returncode:
        raise ValueError(f"vLLM did not answer in {seconds} s: exit status {done.returncode}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("carried", type=Path, nargs="?", default=Path("carried"))
    parser.add_argument("target", type=Path, nargs="?", default=Path("carried/site"))
    parser.add_argument("--check", type=int, metavar="SECONDS", help="have vLLM answer once")
    args = parser.parse_args()
    try:
        unpack(args.carried, args.target)
        compileall.compile_dir(args.target, quiet=2, workers=0)  # by all cores, before each process
        link_image(args.target)
        link_clone(args.target)
        if args.check:
            check(args.target, args.check)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    print("export", *(f"{name}={value}" for name, value in environment(args.target).items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
