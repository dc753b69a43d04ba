"""Predict time and memory of a training step from a model configuration, without the model or a GPU."""

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
