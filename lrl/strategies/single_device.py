"""One trainer process on one device."""

import torch
from lightning.pytorch.strategies import SingleDeviceStrategy

from lrl.errors import ConfigError
from lrl.strategies.generator_devices import GeneratorDevices


class AsyncSingleDevice(GeneratorDevices, SingleDeviceStrategy):
    """One trainer process on one device, and the rest of the job's devices for generators; see
    `GeneratorDevices`."""

    @property
    def root_device(self) -> torch.device:
        """The trainer's device."""
        return self.parallel_devices[0] if self.parallel_devices else torch.device("cpu")

    def usual_generator_devices(self, devices: int) -> int:
        """Returns all but the trainer's: a single device is shared."""
        return devices - 1

    @GeneratorDevices.parallel_devices.setter  # type: ignore[attr-defined]
    def parallel_devices(self, devices: list[torch.device] | None) -> None:
        """Refuses a second trainer device: this strategy would leave it idle."""
        GeneratorDevices.parallel_devices.fset(self, devices)  # type: ignore[attr-defined]
        if self._parallel_devices and len(self._parallel_devices) > 1:
            raise ConfigError(
                f"AsyncSingleDevice trains on one device, but trainer.devices {len(devices or [])} "
                f"minus strategy.generator_devices {self.num_generator_devices} leaves "
                f"{len(self._parallel_devices)}. Raise generator_devices, lower devices, or train "
                "on all of them with lrl.AsyncDDP."
            )
