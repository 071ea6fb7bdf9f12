"""Data parallel training: every rank has the whole policy and trains its share of a step's
micro-batches.

Gradients are averaged once, after the last micro-batch (`lrl.training.optimizers`). Torch's
DistributedDataParallel is not used: it averages in every backward pass, and would need equally many
on all ranks.
"""

from lightning.pytorch.overrides.distributed import _sync_module_states
from lightning.pytorch.strategies import DDPStrategy

from lrl.strategies.several_ranks import SeveralRanks


class AsyncDDP(SeveralRanks, DDPStrategy):
    """Several trainer processes, each with the whole policy; see `SeveralRanks`.

    Settings that Lightning's DDPStrategy passes on to torch's wrapper have no effect.
    """

    def setup_distributed(self) -> None:
        """Connects to the other ranks; see `SeveralRanks.meeting` for the errors."""
        with self.meeting():
            super().setup_distributed()

    def configure_ddp(self) -> None:
        """Copies rank 0's weights to all ranks."""
        assert self.model is not None, "connected by now"
        _sync_module_states(self.model)
