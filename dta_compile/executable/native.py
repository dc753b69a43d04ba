"""native: functions in C++ of our own, which are compiled as pieces are and which mixers call where they are there."""

from __future__ import annotations

import dataclasses
import functools

from dta_compile.executable.layers import AttentionLayer, MixerLayer
from dta_compile.executable.source import CppSource
from dta_compile.ops.tree_attention import kernel


@dataclasses.dataclass(frozen=True)
class TreeAttention:
    """Attention of a chunk in one call; any two are the same."""

    @property
    def source(self) -> CppSource:
        """What is compiled."""
        return _source()

    @staticmethod
    def takes(layer: MixerLayer, device: str) -> bool:
        """Whether a layer on this type of device can be computed by it."""
        return (
            isinstance(layer, AttentionLayer)
            and device == "cpu"
            and layer.dtype in kernel.DTYPES
            and layer.key_dim == layer.states[1].shape[3]
            and not layer.softcap
            and kernel.can_be_built()
        )


@functools.cache
def _source() -> CppSource:
    return CppSource(kernel.source())
