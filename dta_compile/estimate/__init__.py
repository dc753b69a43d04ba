"""What a step will take before there is a model or a GPU: tokens, memory by budget, time, and against what."""

from dta_compile.estimate.devices import DEVICES, Device, device_named
from dta_compile.estimate.predict import (
    OPTIMIZERS,
    SHARDS,
    Estimate,
    ModelShape,
    Prediction,
    Ranks,
    estimate,
    model_shape,
)

__all__ = [
    "DEVICES",
    "OPTIMIZERS",
    "SHARDS",
    "Device",
    "Estimate",
    "ModelShape",
    "Prediction",
    "Ranks",
    "device_named",
    "estimate",
    "model_shape",
]
