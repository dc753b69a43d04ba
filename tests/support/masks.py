"""Masks alone: a function that builds one, traced like in a model, and its entries by direct evaluation.

    traced, *_ = trace(lambda ids: make_mask(ids), ids)
    traced.check()          # the derived class allows what the mask allows; or raises the typed error

`check` compares all pairs of all real queries, and every entry of the mask with its term.
"""

from __future__ import annotations

import dataclasses
import io
import pickle
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from dta_compile.capture.dynamo import sizes
from dta_compile.errors import DTAError
from dta_compile.executable.masks import MaskProgram
from dta_compile.passes.axes.layouts import mixer_calls
from dta_compile.passes.axes.token_axis import token_axis
from dta_compile.passes.cuts.dense_graphs import graph_of
from dta_compile.passes.lowering.lower import lower
from dta_compile.passes.masks.entries import leaves_of_masks
from dta_compile.passes.masks.mixers import mixers
from dta_compile.passes.program import Program
from dta_compile.proofs.terms import Evaluation
from dta_compile.runtime.calls.call import Sizes
from dta_compile.runtime.calls.mask_values import number_of_call
from dta_compile.runtime.calls.masks import ReadMasks, read_masks


@dataclasses.dataclass
class Traced:
    """Program whose attention has the mask, and the inputs of one call."""

    program: Program
    args: tuple[Any, ...]
    shape: tuple[int, int]
    made: fx.Node

    @property
    def mask(self) -> MaskProgram:
        return self.program.attention[0].mask

    def pickled(self) -> Traced:
        """Return a copy whose mask was pickled, as for another process."""
        stream = io.BytesIO()
        _PlainPickler(stream).dump(self.program.mixers)
        program = dataclasses.replace(self.program, mixers=pickle.loads(stream.getvalue()))
        return dataclasses.replace(self, program=program)

    def check(self) -> ReadMasks:
        """Compare the derived class with the mask itself."""
        leaves = leaves_of_masks(self.program)
        *values, actual = graph_of(self.program, [], [*leaves, self.made])(*self.args)
        dense = {node.name: value for node, value in zip(leaves, values, strict=True)}
        sizes = Sizes(self.program.input_symbols)
        self._check_term(dense, sizes, actual)
        masks = read_masks(self.program.mixers, dense, lambda expr: sizes.value(expr, self.args), self.shape)
        allowed = actual if actual.dtype is torch.bool else actual == 0
        batch, tokens = self.shape
        allowed = allowed[(None,) * (4 - allowed.dim())].expand(batch, 1, tokens, tokens)[:, 0]
        distance = torch.arange(tokens)[:, None] - torch.arange(tokens)
        starts = torch.zeros(self.shape) if masks.starts is None else torch.from_numpy(masks.starts)
        sequence = starts.cumsum(1)
        expected = (distance >= 0) & torch.from_numpy(masks.valid)[:, None]
        expected = expected & (sequence[:, :, None] == sequence[:, None])
        starts_of = torch.where(starts.bool(), torch.arange(tokens), 0).cummax(1).values
        if masks.limits[0] is not None:
            depths = torch.from_numpy(masks.valid).cumsum(1) - 1
            depths = depths - torch.gather(depths, 1, starts_of).clamp(min=0)
            limit = masks.limits[0]
            kept = torch.isin(depths, torch.tensor(limit.kept, dtype=torch.long))
            expected = expected & ((depths[:, None] >= limit.first(depths)[:, :, None]) | kept[:, None])
        real = torch.from_numpy(masks.valid)[:, :, None]
        assert torch.equal(allowed & real, expected & real), f"{masks.classes[0]}: {self.mask.term}"
        return masks

    def _check_term(self, dense: dict[Any, torch.Tensor], sizes: Sizes, actual: torch.Tensor) -> None:
        batch, tokens = self.shape
        row, query = torch.arange(batch)[:, None, None], torch.arange(tokens)[None, :, None]
        indices = {"row": row, "query": query, "key": torch.arange(tokens)[None, None]}

        def number(expr: Any) -> Any:
            return number_of_call(lambda size: sizes.value(size, self.args), dense, self.mask.items, expr)

        value = Evaluation(dense, number, indices)(self.mask.term)
        actual = actual[(None,) * (4 - actual.dim())][:, 0]
        assert value.dtype == actual.dtype
        assert torch.equal(*torch.broadcast_tensors(value, actual))


class _PlainPickler(pickle.Pickler):
    """Pickler that rejects objects of the passes and of a trace."""

    def reducer_override(self, value: Any) -> Any:
        assert not isinstance(value, (fx.Node, fx.Graph, torch.nn.Module, torch.Tensor, Program, torch.SymInt)), value
        module = value.__module__ if isinstance(value, type) else ""
        assert not module.startswith(("dta_compile.passes", "dta_compile.capture")), value
        return NotImplemented


def trace(make_mask: Any, ids: torch.Tensor, *inputs: Any) -> list[Traced]:
    """Trace attention over `ids` `[B, S]` with the mask that `make_mask(ids, *inputs)` builds; see `calls`."""
    return calls(make_mask, [(ids, *inputs)])


def calls(make_mask: Any, inputs: list[tuple[Any, ...]]) -> list[Traced]:
    """Run several calls of one compiled function, traced as often as Dynamo requires.

    Raises the typed error of a mask that is refused during tracing.
    """
    invocations: list[Traced] = []
    errors: list[DTAError] = []

    def backend(module: Any, _: Any) -> Any:
        sizes.restore_duck_shapes()
        sizes.trace_again_with_symbolic_sizes(module.graph)
        program = Program(module, training=False)
        try:
            lower(program)
            mask = mixer_calls(program.graph)[0].args[3]
            for step in (token_axis, mixers):
                step(program)
        except DTAError as error:
            errors.append(error)

        def run(*args: Any) -> Any:
            invocations.append(Traced(program, args, (0, 0), mask))
            return module.forward(*args)

        return run

    @torch.compile(backend=backend)
    def attend(ids: torch.Tensor, *rest: Any) -> torch.Tensor:
        x = ids.double()[:, None, :, None].expand(-1, 2, -1, 4)
        return F.scaled_dot_product_attention(x, x, x, attn_mask=make_mask(ids, *rest))

    torch._dynamo.reset()
    for ids, *rest in inputs:
        attend(ids, *rest)
        if errors:
            raise errors[0]
        invocations[-1].shape = tuple(ids.shape)  # type: ignore[assignment]
    return invocations
