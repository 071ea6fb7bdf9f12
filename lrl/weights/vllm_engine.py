"""The base of the transports over vLLM's own trainer engines: the policy as vLLM's `WeightSource`.

Importing vLLM takes about nine seconds, so it happens in `connect`, while the generators start anyway.
"""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from lrl.weights.control import Control, Weights
from lrl.weights.transport import Transport


def source_of(weights: Weights) -> Any:
    """Returns the policy as vLLM sees it: names, dtypes and shapes first, then the tensors in the same order."""
    from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

    class PolicyWeights(WeightSource):
        def metadata(self) -> list[ParamMeta]:
            return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in weights()]

        def __iter__(self) -> Iterator[tuple[str, Tensor]]:
            return ((name, tensor.detach()) for name, tensor in weights())

    return PolicyWeights()


class VllmTransport(Transport):
    """A transport whose trainer's end is vLLM's engine, which drives the control plane by itself."""

    collective = True
    attempts = (False,)  # once a collective is broken, only new communicators help: the generators are replaced

    def __init__(self) -> None:
        self._engine: Any = None

    def init_info(self, control: Control) -> Any:
        """Returns vLLM's `TrainerInitInfo` for this backend."""
        raise TypeError(f"{type(self).__name__} must return the init info of its engine.")

    def client(self, control: Control) -> Any:
        """Returns the object that the engine calls: the control plane, unless the payload must be changed."""
        return control

    def connect(self, control: Control, weights: Weights, name: str) -> None:
        """See `Transport.connect`."""
        from vllm.distributed.weight_transfer import WeightTransferTrainerFactory

        self._engine = WeightTransferTrainerFactory.trainer_init(
            self.init_info(control), client=self.client(control), source=source_of(weights)
        )

    def send(self, control: Control) -> None:
        """See `Transport.send`."""
        self._engine.send_weights()

    def close(self) -> None:
        """Tears down the engine's communicators."""
        if self._engine is not None:
            self._engine.shutdown()
            self._engine = None
