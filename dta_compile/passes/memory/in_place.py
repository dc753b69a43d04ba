"""in_place: write results over an argument that has no later use, instead of into new memory.

New memory is slow on a CPU, where every page is mapped and zeroed when it is first touched, and adds to the peak on
every device.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from dta_compile.passes.contracts import contract
from dta_compile.passes.graphs.operators import COMMUTATIVE, IN_PLACE_VARIANTS
from dta_compile.passes.graphs.storage import Storage, last_uses, owner, same_memory_format, storages
from dta_compile.passes.program import Program, has_tensor, writes_in_place


@contract(rewrites=["stages"], may_be_skipped=True)
def in_place(program: Program) -> None:
    """Replace operators of the executable graphs of `program.stages` by their in-place variants where that is safe."""
    for module in program.stages.modules:
        _write_over_dying(module.graph)
        module.recompile()


def _write_over_dying(graph: fx.Graph) -> None:
    last_use = last_uses(graph.nodes)
    for node in graph.nodes:
        if node.target in IN_PLACE_VARIANTS and not node.kwargs:
            for args in (node.args, node.args[::-1]) if node.target in COMMUTATIVE else (node.args,):
                if _may_overwrite(node, args[0], args[1:], last_use):
                    node.target, node.args = IN_PLACE_VARIANTS[node.target], args
                    # From here on the result has the argument's storage.
                    last_use |= dict.fromkeys(storages(args[0]), last_use.pop((node, 0)))
                    break


def _may_overwrite(node: fx.Node, value: Any, others: tuple[Any, ...], last_use: dict[Storage, fx.Node]) -> bool:
    if not isinstance(value, fx.Node) or not has_tensor(value):
        return False
    source = owner(value)
    if source.op != "call_function" or writes_in_place(source) or last_use[storages(value)[0]] is not node:
        return False
    if any(isinstance(other, fx.Node) and has_tensor(other) and owner(other) is source for other in others):
        return False
    return same_memory_format(value.meta["val"], node.meta["val"]) and not _overlaps(value)


def _overlaps(value: fx.Node) -> bool:
    """Return whether several entries may share memory, like in an expanded tensor."""
    tensor = value.meta["val"]
    return any(
        isinstance(stride, int) and stride == 0 and not (isinstance(size, int) and size == 1)
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
