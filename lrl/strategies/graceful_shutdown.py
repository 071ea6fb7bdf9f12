"""How a run ends that is told to: the hooks of a strategy that set the handlers, look, and leave the right exit status.

The strategy has the first and the last word in a run, so that generators which are still starting can be stopped too.
Lightning's own handler of SIGTERM stays beside ours. It would end the run with exit status 0.
"""

from __future__ import annotations

from typing import Any

from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor

from lrl.runtime.checkpoint_file import CheckpointFile
from lrl.runtime.signals import Signals, exit_status


class GracefulShutdown(Strategy):
    """Mixin for a Lightning strategy: the first SIGINT or SIGTERM ends the run between two optimizer steps.

    Args:
        **kwargs: The base strategy's own.
    """

    def __init__(self, **kwargs: Any) -> None:
        self.signals = Signals()
        super().__init__(**kwargs)

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """`CheckpointFile`, unless the user has set another one."""
        if self._checkpoint_io is None:
            self._checkpoint_io = CheckpointFile()
        return super().checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._checkpoint_io = io

    def setup_environment(self) -> None:
        """The first hook of a run."""
        self.signals.listen()
        super().setup_environment()

    def on_train_start(self) -> None:
        """From the first step on, a signal waits until the trainer looks."""
        super().on_train_start()
        self.signals.raises = False

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Between micro-batches is a place to stop."""
        self.signals.check()
        super().pre_backward(closure_loss)

    def on_exception(self, exception: BaseException) -> None:
        """Give an end that Lightning noticed before us its exit status."""
        self.signals.raises = False
        if isinstance(exception, SIGTERMException) and self.signals.received is not None:
            exception.code = exit_status(self.signals.received)
        super().on_exception(exception)

    def teardown(self) -> None:
        """The last hook. Lightning would put our handlers back after it, as those it found."""
        self.signals.raises = False
        super().teardown()
        if self.lightning_module is not None:
            self.lightning_module.trainer._signal_connector.teardown()
        self.signals.put_back()
