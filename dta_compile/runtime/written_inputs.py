"""Write to the inputs that a call mutates, such as counters of tokens per expert, which trainers balance experts by.

The values are computed by the epilogue like other outputs, over the whole batch: a shared token counts once per row.
The engine calls `write` after the call. Until then the inputs keep their values, which chunks may read again in the
backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dta_compile.errors import RuntimeContractError
from dta_compile.executable.executable import Executable
from dta_compile.integrations import checkpoint_flags
from dta_compile.runtime.calls.planned_call import Run
from dta_compile.runtime.dependence import Dependence


def write(args: Sequence[Any], run: Run, values: Sequence[torch.Tensor]) -> None:
    """Copy `values` to the inputs that a finished call mutates.

    Raises:
        RuntimeContractError: eager mode would write other values, because of padding, gradient checkpointing or memory
            that inputs share.
    """
    executable = run.call.executable
    _require_memory_of_their_own(executable, args)
    if run.call.plan.schedule.mode != "score" and checkpoint_flags.is_hidden():
        raise RuntimeContractError(
            f"the model writes to {_names(executable)} where gradient checkpointing computes it again, and once more",
            expected="a model that is computed once, or writes outside of its layers",
            got="gradient_checkpointing=True",
            hint="switch gradient checkpointing off: the plan says what is kept and what is computed again",
        )
    _require_real_tokens(run, values)
    with torch.no_grad():
        for item, value in zip(executable.written, values, strict=True):
            args[item.input].copy_(value)


def _names(executable: Executable) -> str:
    return ", ".join(item.name for item in executable.written)


def _require_memory_of_their_own(executable: Executable, args: Sequence[Any]) -> None:
    tensors = {i: arg.untyped_storage()._cdata for i, arg in enumerate(args) if isinstance(arg, torch.Tensor)}
    for item in executable.written:
        shared = [i for i, storage in tensors.items() if i != item.input and storage == tensors[item.input]]
        if shared:
            raise RuntimeContractError(
                f"the model writes to {item.name}, which has memory in common with {executable.inputs[shared[0]].name}",
                expected="tensors that are written to with memory of their own",
                got="views of one tensor",
                hint="hold one of them, and index it where it is used",
            )


def _require_real_tokens(run: Run, values: Sequence[torch.Tensor]) -> None:
    """Raise `RuntimeContractError` unless `values` provably do not depend on padding, which is not computed."""
    executable, layout = run.call.executable, run.call.alone.layout
    read = {i for item in executable.written for i in item.frontier}
    padding = {i: mask for i in read if (mask := layout.padding(i)) is not None}
    if not padding:
        return
    frontier, dependence = [value.detach() for value in run.frontier], Dependence()
    for i, mask in padding.items():
        dependence.mark(frontier[i], mask)
    if executable.rest is None:
        with torch.no_grad(), dependence:
            values = run.outputs_of(frontier)[-len(values) :]
    for item, value in zip(executable.written, values, strict=True):
        if executable.rest is not None or bool(dependence.of(value).any()):
            raise RuntimeContractError(
                f"what the model writes to {item.name} may depend on padding, which the prefix tree does not compute",
                expected="real tokens, masked before they are counted",
                got="operators that let padding through, as far as their rules tell",
                hint="select the real tokens by the attention mask first, or train on packed rows",
            )
