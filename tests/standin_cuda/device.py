"""The stand-in device: its tensors, CUDA's rules about devices, and the log of what the host does.

Every operation on a `CudaTensor` comes to `_Operation`, which checks it as CUDA would, logs it, and
computes it on the CPU.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import torch
from torch import Tensor
from torch.utils._python_dispatch import return_and_correct_aliasing

GPU = torch.device("cuda", 0)
ROOT = Path(__file__).parents[2]
OWN = (f"{ROOT}/lrl/", f"{ROOT}/callbacks/")

WAITS = {
    "_local_scalar_dense": "item",
    "nonzero": "nonzero",
    "masked_select": "masked_select",
    "_unique2": "unique",
    "unique_consecutive": "unique",
    "unique_dim": "unique",
    "is_nonzero": "bool",
    "equal": "equal",
    "bincount": "bincount",
}
"""Operations whose result, or its size, the host reads."""
INDEXING = ("index", "_unsafe_index")
INDEX_PUTS = ("index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put")
"""They take indices of the CPU, too, and copy them."""
NO_CPU_NUMBERS = (
    *("cat", "stack", "gather", "scatter", "index_add", "index_select"),
    *("mm", "addmm", "bmm", "linear", "embedding"),
)
"""Elementwise operations take a tensor of the CPU without dimensions as a number; these do not."""

FACTORIES = ("empty.memory_format", "empty_strided", "arange", "arange.start", "linspace")
"""Operators that make a tensor; all others begin with an empty one."""


_waits: Counter[str] = Counter()
"""Times the host waited for the device, by kind and line of lrl. It also waits for the end of a
copy from pageable memory, and of one that does not say `non_blocking`."""


def _answers(value: Any) -> Any:
    return lambda *_, **__: value


CALLS: dict[str, Any] = {
    "is_available": _answers(True),
    "_lazy_init": _answers(None),
    "device_count": _answers(1),
    "set_device": _answers(None),
    "empty_cache": _answers(None),
    "get_device_capability": _answers((9, 0)),
    "get_device_name": _answers("stand-in"),
    "is_bf16_supported": _answers(True),
    "is_current_stream_capturing": _answers(False),
    "manual_seed_all": _answers(None),
    "get_rng_state": lambda *_: torch.zeros(16, dtype=torch.uint8),
    "get_rng_state_all": _answers([]),
    "set_rng_state": _answers(None),
    "set_rng_state_all": _answers(None),
}
"""By name. What draws without a generator of its own uses the CPU's, so its numbers are the
CPU's."""


class CudaTensor(Tensor):
    """A tensor that says it is on cuda:0."""

    inner: Tensor
    """Has its numbers, on the CPU."""
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: Tensor) -> "CudaTensor":
        made = Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            layout=inner.layout,
            device=GPU,
        )
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _Operation(func, args, kwargs or {}).run()

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], *_: Any) -> "CudaTensor":
        return CudaTensor(inner["inner"])

    def __repr__(self) -> str:  # type: ignore[override]
        return f"CudaTensor({self.inner!r})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Saves its numbers, for the CPU, to which a checkpoint is loaded."""
        _waits[f"saved {_line()}"] += 1
        return self.detach().inner.__reduce_ex__(protocol)

    def numpy(self, **_: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first.")

    def tolist(self) -> Any:
        _waits[f"tolist {_line()}"] += 1
        return self.detach().inner.tolist()

    @property
    def data(self) -> Tensor:
        """The tensor without its history; setting it also replaces the numbers."""
        return torch._C.TensorBase.data.__get__(self)

    @data.setter
    def data(self, value: Tensor) -> None:
        torch._C.TensorBase.data.__set__(self, value)
        self.inner = _inner(value)


@contextmanager
def standin_cuda() -> Iterator[Counter[str]]:
    """Gives torch one GPU in the block; yields the waits."""
    _waits.clear()

    def synchronize(*_: Any) -> None:
        _waits[f"synchronize {_line()}"] += 1

    calls = CALLS | {"synchronize": synchronize}
    kernels = torch.library.Library("aten", "IMPL", "CUDA")
    for name in FACTORIES:
        packet, _, overload = name.partition(".")
        make = getattr(getattr(torch.ops.aten, packet), overload or "default")
        kernels.impl(name, partial(_made, make))
    # torch.tensor(..., device="cuda") then copies from the CPU.
    torch._C._set_only_lift_cpu_tensors(True)
    try:
        with (
            mock.patch.multiple(torch.cuda, **calls),
            # Lightning ends by moving the module to the CPU. torch exchanges the tensors of a
            # subclass for that, and refuses it for weights that a graph has known.
            mock.patch.object(L.LightningModule, "cpu", lambda module: module),
        ):
            yield _waits
    finally:
        torch._C._set_only_lift_cpu_tensors(False)
        kernels._destroy()


def _made(make: Any, *args: Any, **kwargs: Any) -> CudaTensor:
    _check_generator(kwargs.get("generator"))
    return CudaTensor(make(*args, **kwargs | {"device": torch.device("cpu"), "pin_memory": False}))


def _check_generator(generator: torch.Generator | None) -> None:
    if generator is not None and generator.device.type != "cuda":
        raise RuntimeError("Expected a 'cuda' device type for generator but found 'cpu'")


class _Operation:
    """One call of an operator of ATen."""

    def __init__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.func = func
        self.args = args
        self.kwargs = kwargs
        self.name: str = func.overloadpacket.__name__

    @cached_property
    def on_gpu(self) -> list[CudaTensor]:
        return [tensor for tensor in self._tensors if isinstance(tensor, CudaTensor)]

    @cached_property
    def on_cpu(self) -> list[Tensor]:
        others = [tensor for tensor in self._tensors if not isinstance(tensor, CudaTensor)]
        return [tensor for tensor in others if tensor.device.type == "cpu"]

    @cached_property
    def target(self) -> str | None:
        """The kind of device that it was asked for, if any."""
        device = self.kwargs.get("device")
        return None if device is None else torch.device(device).type

    @cached_property
    def result_on_gpu(self) -> bool:
        return self.target == "cuda" or (self.target is None and bool(self.on_gpu))

    @cached_property
    def _tensors(self) -> list[Tensor]:
        arguments = [*self.args, *self.kwargs.values()]
        lists = [one if isinstance(one, list | tuple) else [one] for one in arguments]
        return [one for ones in lists for one in ones if isinstance(one, Tensor)]

    def run(self) -> Any:
        if self.name == "_to_copy":
            return self._copy_to()
        if self.name == "copy_":
            return self._copy_into()
        if self.on_gpu:
            self._check_devices()
            self._log_waits()
        if self.result_on_gpu:
            _check_generator(self.kwargs.get("generator"))
        found = self._computed()
        if not self.result_on_gpu or self.name == "_local_scalar_dense":
            return found
        wrapped = _each(_wrapped, found)
        if not _returns_an_argument(self.func) or self.name in ("set_", "resize_"):
            return wrapped
        return return_and_correct_aliasing(self.func, self.args, self.kwargs, wrapped)

    def _copy_to(self) -> Tensor:
        source = self.args[0]
        kwargs = self._plain(self.kwargs) | {"non_blocking": False}
        copy = self.func(_inner(source), **kwargs)
        was_on_gpu = isinstance(source, CudaTensor)
        if was_on_gpu and self.target == "cpu":
            _waits[f"copy to the CPU {_line()}"] += 1
        elif not was_on_gpu and self.result_on_gpu:
            self._log_copy(source, self.kwargs.get("non_blocking", False))
        return CudaTensor(copy) if self.result_on_gpu and copy.device.type == "cpu" else copy

    def _copy_into(self) -> Tensor:
        target, source, *more = self.args
        _inner(target).copy_(_inner(source))
        non_blocking = bool(more and more[0]) or self.kwargs.get("non_blocking", False)
        if isinstance(source, CudaTensor) and not isinstance(target, CudaTensor):
            if not (non_blocking and target.is_pinned()):
                _waits[f"copy to the CPU {_line()}"] += 1
        elif isinstance(target, CudaTensor) and not isinstance(source, CudaTensor):
            self._log_copy(source, non_blocking)
        return target

    def _log_copy(self, source: Tensor, non_blocking: bool) -> None:
        if not (source.is_pinned() and non_blocking):
            _waits[f"copy to the GPU {_line()}"] += 1

    def _check_devices(self) -> None:
        """Raises RuntimeError where CUDA does for tensors on two devices."""
        mixed = [tensor for tensor in self.on_cpu if tensor.dim()]
        if self.name in INDEXING + INDEX_PUTS:
            indices = [index for index in self.args[1] if index is not None]
            on_gpu = isinstance(self.args[0], CudaTensor)
            mixed = [one for one in mixed if not on_gpu or all(one is not i for i in indices)]
        if self.name in NO_CPU_NUMBERS:
            mixed = self.on_cpu
        if mixed and self.name != "set_":
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, "
                f"cuda:0 and cpu! (when checking arguments in {self.name})"
            )

    def _log_waits(self) -> None:
        kind = WAITS.get(self.name)
        if self.name in INDEXING + INDEX_PUTS:
            indices = [index for index in self.args[1] if index is not None]
            masks = [index for index in indices if index.dtype in (torch.bool, torch.uint8)]
            if any(not isinstance(index, CudaTensor) for index in indices):
                kind = "index from the CPU"
            # One number behind one mask becomes masked_fill, which asks for no size.
            filled = self.name in INDEX_PUTS and len(indices) == 1 and self.args[2].numel() == 1
            if masks and not filled:
                kind = "mask as index"
        if self.name == "repeat_interleave" and self.kwargs.get("output_size") is None:
            kind = "repeat_interleave"
        if kind is not None:
            _waits[f"{kind} {_line()}"] += 1

    def _computed(self) -> Any:
        """Returns its result on the CPU."""
        generator = self.kwargs.get("generator")
        kwargs = self._plain(self.kwargs)
        args = _each(_inner, self.args)
        if generator is None or generator.device.type == "cpu":
            return self.func(*args, **kwargs)
        twin = torch.Generator()
        twin.set_state(generator.get_state())
        found = self.func(*args, **kwargs | {"generator": twin})
        generator.set_state(twin.get_state())
        return found

    def _plain(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        found = {name: _each(_inner, value) for name, value in kwargs.items()}
        if self.target == "cuda":
            found["device"] = torch.device("cpu")
        if "pin_memory" in found:
            found["pin_memory"] = False
        return found


@cache
def _returns_an_argument(func: Any) -> bool:
    """Whether a result is an argument, changed in place, or a view of one."""
    return any(value.alias_info is not None for value in func._schema.returns)


def _each(change: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)([_each(change, one) for one in value])
    return change(value)


def _inner(leaf: Any) -> Any:
    return leaf.inner if isinstance(leaf, CudaTensor) else leaf


def _wrapped(leaf: Any) -> Any:
    plain = isinstance(leaf, Tensor) and not isinstance(leaf, CudaTensor)
    return CudaTensor(leaf) if plain else leaf


def _line() -> str:
    """Returns the innermost line of lrl, else the innermost one outside of torch and this file."""
    frame = sys._getframe(1)
    elsewhere = ""
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(OWN):
            return f"{Path(file).relative_to(ROOT)}:{frame.f_lineno}"
        if not elsewhere and "/torch/" not in file and file != __file__:
            elsewhere = f"{Path(file).name}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return elsewhere
