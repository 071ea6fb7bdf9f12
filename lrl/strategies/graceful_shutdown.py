"""Strategy hooks for a graceful shutdown at SIGINT and SIGTERM: they are the first and the last of a
run, so a signal also stops generators that are still starting."""

from typing import Any

from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor

from lrl.checkpoints.checkpoint_file import CheckpointFile
from lrl.system.signals import Signals, requeue


class GracefulShutdown(Strategy):
    """Mixin for a Lightning strategy: the first SIGINT or SIGTERM ends the run between two
    optimizer steps.

    Args:
        **kwargs: The base strategy's own.
    """

    def __init__(self, **kwargs: Any) -> None:
        self.signals = Signals()
        super().__init__(**kwargs)

    @property
    def attached_trainer(self) -> Any:
        """None until the other ranks have started."""
        return None if self.lightning_module is None else self.lightning_module._trainer

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """`usual_checkpoint_io`, unless the user has set another one."""
        # Made late: Lightning refuses a plugin of the user beside one that a strategy already has.
        if self._checkpoint_io is None:
            self._checkpoint_io = self.usual_checkpoint_io()
        return super().checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._checkpoint_io = io

    def usual_checkpoint_io(self) -> CheckpointIO:
        return CheckpointFile()

    def setup_environment(self) -> None:
        """Installs the signal handlers and checks the run, before ranks meet."""
        self.signals.listen(self.attached_trainer)
        self.check_run()
        super().setup_environment()

    def check_run(self) -> None:
        """Checks the run before anything starts."""

    def on_train_start(self) -> None:
        """Defers signals from the first step on, until the trainer checks for them."""
        super().on_train_start()
        self.signals.raises = False

    def pre_backward(self, closure_loss: Tensor) -> None:
        self.signals.check()
        super().pre_backward(closure_loss)

    def on_exception(self, exception: BaseException) -> None:
        """Sets the exit status, for Lightning's own SIGTERM handler would exit with 0."""
        self.signals.raises = False
        if isinstance(exception, SIGTERMException) and self.signals.received is not None:
            exception.code = 128 + self.signals.received
        super().on_exception(exception)

    def teardown(self) -> None:
        self.signals.raises = False
        super().teardown()
        # Else Lightning would install ours again, as those it found.
        trainer = self.attached_trainer
        if trainer is not None:
            trainer._signal_connector.teardown()
        self.signals.put_back()
        if self.signals.asks_for_requeue and trainer.interrupted:
            requeue()
