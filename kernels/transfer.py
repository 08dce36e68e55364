"""Arrays of the host on a device."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch


def on_device(array: npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """Moved there without waiting for what the device does: a copy from memory that is not pinned would."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
