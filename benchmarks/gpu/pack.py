"""Packs what the image of a GPU machine without a network lacks, into pieces small enough to be
carried there one by one: `python -m benchmarks.gpu.pack`. There `unpack.py` puts them together.

The image has Python 3.12, torch 2.11 for CUDA 13 with NVIDIA's libraries, Lightning and
transformers 5.17. The sets name what it lacks of `requirements/cuda.txt` and what runs there need.
vLLM's other requirements are left out: NVIDIA's compilers, flashinfer, tilelang, ray, numba and the
like are imported where a feature asks for them, and serving a Llama does not. NCCL is carried, since
torch 2.14 does not load with that of torch 2.11.

The wheels become one tree, compressed again with xz. In its libraries, zeros take the place of what
a Hopper never loads: kernels of other GPUs and debug information. Offsets stay, and the loader does
not look there. So 1,417 MB of wheels become 362 MB (`--preset 1`). `--whole` leaves all as it is.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import lzma
import re
import struct
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import IO

PINS = Path(__file__).parents[2] / "requirements" / "cuda.txt"
BASE = """
antlr4-python3-runtime datasets dill docstring-parser gguf jsonargparse latex2sympy2-extended
math-verify multiprocess omegaconf typeshed-client
"""
"""What lrl needs without vLLM."""
VLLM = """
torch triton torchvision nvidia-nccl-cu13 transformers tokenizers vllm
annotated-types apache-tvm-ffi blake3 cachetools cbor2 compressed-tensors fastapi httpcore2
httptools httpx2 ijson jiter jmespath jsonschema jsonschema-specifications lark llguidance loguru
mistral-common model-hosting-container-standards msgspec openai orjson oss-harmony
partial-json-parser prometheus-fastapi-instrumentator pybase64 pycountry pydantic pydantic-core
pydantic-extra-types python-multipart pyzmq referencing rpds-py setproctitle sniffio starlette
truststore typing-inspection uvicorn watchfiles xgrammar
"""
SETS = {"base": BASE.split(), "vllm": (BASE + VLLM).split()}
LEFT_OUT = """
*.data/scripts/* mistral_common/data/* pycountry/locales/* torch/bin/protoc* triton/_C/libproton*
triton/backends/amd/include/* triton/backends/amd/lib/* triton/backends/nvidia/bin/nvdisasm
triton/backends/nvidia/bin/ptxas-blackwell triton/backends/nvidia/lib/cupti*
triton/instrumentation/* triton/plugins/* vllm/third_party/fmha_sm100/cutlass/* vllm/vllm-rs
vllm/vllm_flash_attn/_vllm_fa2_C*
"""
"""Files that a generator on a Hopper does not open: it has FlashAttention 3."""
PLATFORMS = ["1", "2010", "2014", *(f"_2_{minor}" for minor in range(5, 36))]
HOPPER, PTX, FATBIN = 90, 1, 0xBA55ED50
CHUNK = 2**24
"""Bytes that are compressed by themselves, so that all cores unpack."""
CORES = 2


def requirements(names: Sequence[str]) -> list[str]:
    """Returns each name with its pin, where it has one."""
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)", PINS.read_text(), re.MULTILINE))
    return [f"{name}=={pins[name]}" if name in pins else name for name in names]


def download(names: Sequence[str], folder: Path) -> list[Path]:
    """Has pip bring the wheels that are not in `folder`, and returns the paths of all."""
    target = ["--only-binary=:all:", "--python-version=3.12", "--implementation=cp"]
    target += [f"--platform=manylinux{name}_x86_64" for name in PLATFORMS]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", *target]
    subprocess.run([*command, f"--dest={folder}", *requirements(names)], check=True)
    wheels = []
    for requirement in requirements(names):
        name, _, version = requirement.partition("==")
        found = [*folder.glob(f"{name.replace('-', '_')}-{version or '*'}-*.whl")]
        if len(found) != 1:
            raise SystemExit(f"{len(found)} wheels of {requirement} in {folder}: empty it")
        wheels += found
    return wheels


def sections(library: bytes | bytearray) -> Iterator[tuple[str, bool, int, int]]:
    """Yields the sections of a 64-bit ELF file that have bytes in it: name, whether it is loaded,
    begin and end."""
    (table,) = struct.unpack_from("<Q", library, 40)
    size, number, of_names = struct.unpack_from("<HHH", library, 58)
    heads = [struct.unpack_from("<IIQQQQ", library, table + size * i) for i in range(number)]
    for name_at, kind, flags, _, begin, length in heads:
        name_at += heads[of_names][4]
        name = bytes(library[name_at : library.index(b"\0", name_at)]).decode()
        if kind != 8:  # SHT_NOBITS
            yield name, bool(flags & 2), begin, begin + length


def foreign_kernels(library: bytes | bytearray, at: int, end: int) -> Iterator[tuple[int, int]]:
    """Yields begin and end of each kernel in a section that a Hopper cannot run."""
    while at + 16 <= end:
        magic, _, head, size = struct.unpack_from("<IHHQ", library, at)
        if magic != FATBIN:
            at += 8  # padding
            continue
        entry, at = at + head, at + head + size
        while entry < at:
            kind, _, head, size = struct.unpack_from("<HHIQ", library, entry)
            (made_for,) = struct.unpack_from("<I", library, entry + 28)
            if made_for != HOPPER and not (kind == PTX and made_for < HOPPER):
                yield entry + head, entry + head + size
            entry += head + size


def blank(library: bytearray) -> None:
    """Writes zeros over what a Hopper does not load of an ELF library."""
    for name, loaded, begin, end in list(sections(library)):
        if name in (".nv_fatbin", "__nv_relfatbin"):
            for kernel_begin, kernel_end in foreign_kernels(library, begin, end):
                library[kernel_begin:kernel_end] = bytes(kernel_end - kernel_begin)
        elif not loaded and name != ".shstrtab":
            library[begin:end] = bytes(end - begin)


def write_tree(wheels: Sequence[Path], whole: bool, out: IO[bytes]) -> None:
    """Writes the files of the wheels as they lie when installed, as one tar archive."""
    with tarfile.open(fileobj=out, mode="w") as tree:
        for wheel in map(zipfile.ZipFile, wheels):
            for member in wheel.infolist():
                left_out = any(fnmatch(member.filename, name) for name in LEFT_OUT.split())
                if left_out or member.is_dir():
                    continue
                data = bytearray(wheel.read(member))
                if not whole and ".so" in member.filename and data[:5] == b"\x7fELF\x02":
                    blank(data)
                name = re.sub(r"^[^/]+\.data/(pure|plat)lib/", "", member.filename)
                file = tarfile.TarInfo(name)
                file.size, file.mode = len(data), member.external_attr >> 16 & 0o777 or 0o644
                tree.addfile(file, io.BytesIO(data))


def compressed(path: str, preset: int, at: int) -> bytes:
    with open(path, "rb") as file:
        file.seek(at)
        return lzma.compress(file.read(CHUNK), preset=preset)


def pack(
    name: str, wheels: Sequence[Path], out: Path, piece_bytes: int, preset: int, whole: bool
) -> list[Path]:
    """Writes the pieces `name.1.xz` and so on, and their list `name.json`; returns the pieces."""
    with tempfile.NamedTemporaryFile(dir=out) as tree, ThreadPoolExecutor(CORES) as pool:
        write_tree(wheels, whole, tree)
        tree.flush()
        compress = partial(compressed, tree.name, preset)
        streams = list(pool.map(compress, range(0, tree.tell(), CHUNK)))
    for old in out.glob(f"{name}.*"):
        old.unlink()
    packed = b"".join(streams)
    sums: dict[str, str] = {}
    for at in range(0, len(packed), piece_bytes):
        piece = packed[at : at + piece_bytes]
        file = out / f"{name}.{len(sums) + 1}.xz"
        file.write_bytes(piece)
        sums[file.name] = hashlib.sha256(piece).hexdigest()
    listing = {"pieces": sums, "streams": [len(stream) for stream in streams]}
    (out / f"{name}.json").write_text(json.dumps(listing))
    return [out / file for file in sums]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.pack", description=__doc__)
    parser.add_argument("--set", choices=SETS, default="base", help="(%(default)s)")
    parser.add_argument("--also", action="append", default=[], help="one more package")
    parser.add_argument("--out", type=Path, default=Path("carried"), help="(%(default)s)")
    parser.add_argument("--wheels", type=Path, default=Path("build/wheels"), help="(%(default)s)")
    parser.add_argument(
        "--piece-mb",
        type=float,
        default=55,
        help="of 67 MB that a call takes, the repository is 8 and may grow (%(default)s)",
    )
    parser.add_argument("--preset", type=int, default=6, help="of xz, 0 is fastest (%(default)s)")
    parser.add_argument("--whole", action="store_true", help="blank nothing in libraries")
    args = parser.parse_args()
    for folder in (args.out, args.wheels):
        folder.mkdir(parents=True, exist_ok=True)
    wheels = download([*SETS[args.set], *args.also], args.wheels)
    piece_bytes = int(args.piece_mb * 10**6)
    pieces = pack(args.set, wheels, args.out, piece_bytes, args.preset, args.whole)
    for number, piece in enumerate(pieces, 1):
        size = piece.stat().st_size / 10**6
        print(f"call {number} of {len(pieces)}: {args.out / args.set}.json {piece} ({size:.1f} MB)")


if __name__ == "__main__":
    main()
