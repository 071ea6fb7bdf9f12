"""A buffer that one process exports and another opens: the two processes of the rows `ipc`.

The handle is pickled, as vLLM's transfer does (`lrl.weights.ipc`). A CPU's is one of shared memory.
"""

from __future__ import annotations

import pickle
import time
from functools import partial
from multiprocessing import current_process
from multiprocessing.reduction import ForkingPickler

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from benchmarks.gpu.row_processes import Part
from lrl.weights.buckets import WORD_BYTES
from lrl.weights.ipc import new_buffer

EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
MARK = -1
AUTHKEY = b"of this row"
"""A CPU's handle passes through a socket, at which both must show the same."""


def export(part: Part) -> None:
    _export(part, part.numbers())


def export_with_segments_off(part: Part) -> None:
    torch.empty(4 * part.size, dtype=torch.uint8, device=part.device)
    numbers = part.numbers()
    buffer = new_buffer(part.size // WORD_BYTES).view(numbers.dtype)
    buffer.copy_(numbers)
    later = torch.empty(part.size, dtype=torch.uint8, device=part.device)
    part.keep(later_buffer_expandable=_is_expandable(later))
    _export(part, buffer)


def _export(part: Part, buffer: Tensor) -> None:
    current_process().authkey = AUTHKEY
    part.synchronise()
    if part.device.type == "cuda":
        part.keep(buffer_expandable=_is_expandable(buffer))
    started = time.perf_counter()
    handle = bytes(ForkingPickler.dumps(reduce_tensor(buffer)))
    part.keep(export_s=time.perf_counter() - started, handle_bytes=len(handle))
    part.give("handle", handle)
    part.take("mark")
    part.synchronise()
    part.confirm(sees_the_others_writes=buffer[0].item() == MARK)


def _is_expandable(buffer: Tensor) -> bool:
    place = buffer.data_ptr()
    return any(
        one["is_expandable"] and one["address"] <= place < one["address"] + one["total_size"]
        for one in torch.cuda.memory_snapshot()
    )


def open_handle(part: Part) -> None:
    current_process().authkey = AUTHKEY
    own = part.numbers()
    handle = part.take("handle")
    started = time.perf_counter()
    rebuild, made_of = pickle.loads(handle)
    buffer = rebuild(*made_of)
    part.synchronise()
    part.keep(open_s=time.perf_counter() - started)
    part.confirm(same_numbers=torch.equal(buffer, own))
    target = torch.empty_like(own)
    for name, source in (("copy_gb_s", buffer), ("own_copy_gb_s", own)):
        seconds = part.repeated(partial(target.copy_, source))
        part.keep(**{name: part.size / seconds / 1e9})
    buffer[0] = MARK
    part.synchronise()
    part.give("mark")
