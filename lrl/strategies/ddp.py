"""Data parallel training: every rank has the whole policy and trains its share of a step's
micro-batches.

Gradients are averaged once, after the last micro-batch (`lrl.training.optimizers`). Torch's
DistributedDataParallel is not used: it averages in every backward pass, and would need equally many
on all ranks.
"""

import inspect
from typing import Any

from lightning.pytorch.overrides.distributed import _sync_module_states
from lightning.pytorch.strategies import DDPStrategy
from torch.nn.parallel import DistributedDataParallel

from lrl.strategies.several_ranks import SeveralRanks
from lrl.system.config_errors import fault

WRAPPER_SETTINGS = {
    **dict.fromkeys(
        ("ddp_comm_state", "ddp_comm_hook", "ddp_comm_wrapper", "model_averaging_period")
    ),
    **{
        name: each.default
        for name, each in inspect.signature(DistributedDataParallel).parameters.items()
    },
}
"""Settings that Lightning passes on to torch's wrapper, with their defaults, which the command line
always gives."""


class AsyncDDP(SeveralRanks, DDPStrategy):
    """Several trainer processes, each with the whole policy; see `SeveralRanks`.

    Args:
        **kwargs: See `SeveralRanks`, and Lightning's DDPStrategy without the settings of torch's
            wrapper.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        for name, default in WRAPPER_SETTINGS.items():
            if kwargs.get(name, default) != default:
                fault(
                    f"strategy.{name} is {kwargs[name]}. It is for torch's "
                    "DistributedDataParallel; lrl.AsyncDDP does without that: it averages "
                    "gradients once a step. Leave it out."
                )

    def setup_distributed(self) -> None:
        """Connects to the other ranks; see `SeveralRanks.meeting` for the errors."""
        with self.meeting():
            super().setup_distributed()

    def configure_ddp(self) -> None:
        """Copies rank 0's weights to all ranks."""
        assert self.model is not None, "connected by now"
        _sync_module_states(self.model)
