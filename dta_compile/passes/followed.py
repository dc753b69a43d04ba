"""Which values of a captured graph autograd follows, and writes to their memory that it does not see.

In eager mode the derivative of such a write (under `no_grad`, through `.data` or a detached alias) is that of the
values before it. A functional graph has forgotten those, so the write is refused.
"""

from __future__ import annotations

import torch
from torch import fx

from dta_compile.errors import RefusalError
from dta_compile.passes.program import where

CUTS = ("detach", "_get_data_attr")


class Followed:
    """Told of a graph's nodes in their order.

    Dynamo's recorded values are as they were in the end, and a buffer requires gradients once it was filled with what
    does: that a value requires them does not say that it did when it was made.

    Attributes:
        is_recording: gradient mode is on.
    """

    def __init__(self) -> None:
        self.is_recording = True
        self._nodes: set[fx.Node] = set()  # that autograd follows by now
        self._storages: set[int | None] = set()  # of those
        self._cut_off: set[fx.Node] = set()  # in the memory of others, but nothing to autograd

    def made(self, node: fx.Node) -> None:
        """A node was run."""
        aliased = [other for other in node.all_input_nodes if _storage(other) == _storage(node) is not None]
        is_cut = not self.is_recording or _name(node) in CUTS or not self._cut_off.isdisjoint(aliased)
        if aliased and is_cut:
            self._cut_off.add(node)
        elif requires_grad(node) and (node.op == "placeholder" or self._reads_followed(node)):
            self._follow(node)

    def wrote(self, node: fx.Node, written: fx.Node) -> None:
        """A node wrote to another's value; raises `RefusalError` if autograd follows that and does not see it."""
        if self.is_recording and written not in self._cut_off:
            if requires_grad(written) and self._reads_followed(node):
                self._follow(written)
        elif _storage(written) in self._storages:
            raise RefusalError(
                "the model writes to a value with a gradient behind autograd's back",
                where=where(node),
                expected="writes that autograd records, or new values",
                got="a write in place under torch.no_grad(), or to a detached alias",
                hint="make a new value instead (x = x * 2, not x.mul_(2)); (y - x).detach() + x has the value of y and "
                "the gradient of x",
            )

    def _reads_followed(self, node: fx.Node) -> bool:
        has_values_of_its_own = _name(node).endswith("_like") or _name(node).startswith("new_")
        return not has_values_of_its_own and not self._nodes.isdisjoint(node.all_input_nodes)

    def _follow(self, node: fx.Node) -> None:
        self._nodes.add(node)
        self._storages.add(_storage(node))


def requires_grad(node: fx.Node) -> bool:
    """Whether the value that Dynamo recorded for a node requires gradients."""
    value = node.meta.get("example_value")
    return isinstance(value, torch.Tensor) and value.requires_grad


def _name(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def _storage(node: fx.Node) -> int | None:
    value = node.meta.get("example_value")
    return int(value.untyped_storage()._cdata) if isinstance(value, torch.Tensor) else None
