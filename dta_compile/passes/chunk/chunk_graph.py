"""chunk_graph: rewrite the token region as a graph of one chunk.

Its inputs are, in order, the region's parameters; constants; the trunk's inputs `[c, *features]` of the chunk's `c`
tokens; `head_rows` `[h]`, the chunk token of each head row; and the head's inputs `[h, *features]`. Its outputs are the
frontier values `[h, *features]`. The batch size is 1; `c` and `h` are symbolic.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from dta_compile.errors import RefusalError
from dta_compile.executable.layouts import Axis, Flat, InputKind, Layout
from dta_compile.ops.mixer import has_several_results
from dta_compile.passes.contracts import contract
from dta_compile.passes.graphs.arguments import dim_of, operand_dims
from dta_compile.passes.graphs.nodes import erase_unused, is_uniform
from dta_compile.passes.graphs.operators import OF_TWO_TENSORS, RESHAPES, SQUEEZES, TAKE_A_SHAPE, aten
from dta_compile.passes.graphs.source_lines import inherit_line, where
from dta_compile.passes.graphs.subgraph import add_call, copied, graph_module
from dta_compile.passes.program import ChunkInput, Program, has_tensor
from dta_compile.passes.symbols import free_symbols, make_constant, new_size, sizes, symbolic
from dta_compile.torch_compat.sizes import ShapeEnv


@contract(
    reads=[
        *("inputs", "placeholders", "batch", "tokens", "input_layouts", "mixers", "mixer_nodes"),
        *("region", "frontier", "trunk", "trunk_inputs", "head_inputs"),
    ],
    fills=["chunk", "region_parameters"],
    rewrites=["module", "values", "constant_inputs"],
)
def chunk_graph(program: Program) -> None:
    """Fill `program.chunk`, `.region_parameters`, and add sizes used as numbers to `.constant_inputs`."""
    builder = _Builder(program)
    program.chunk = graph_module(program.module, builder.build())


class _Builder:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.graph = fx.Graph(owning_module=program.module)  # which knows whether a user's function has side effects
        self.copies: dict[fx.Node, fx.Node] = {}  # parameters, constants and region nodes
        self.placed: dict[tuple[fx.Node, Layout, bool], fx.Node] = {}  # chunk inputs, for trunk (False) and head (True)
        self.gathered: dict[fx.Node, fx.Node] = {}  # trunk values at head rows
        self.layers = dict(zip(program.mixer_nodes, program.mixers, strict=True))

    def build(self) -> fx.Graph:
        program = self.program
        region = [node for node in program.graph.nodes if node in program.region]
        self._add_sizes_used_as_numbers(region)
        program.region_parameters = self._parameters(region)
        for spec in program.region_parameters:
            self.copies[program.placeholders[spec.index]] = self.graph.placeholder(f"parameter_{spec.index}")
        for node in program.constant_inputs:
            self.copies[node] = self.graph.placeholder(f"constant_{node.name}")
        trunk = [self.graph.placeholder(f"trunk_{item.name}") for item in program.trunk_inputs]
        self.head_rows = self.graph.placeholder("head_rows")
        head = [self.graph.placeholder(f"head_{item.name}") for item in program.head_inputs]
        self.num_tokens = self._call(aten.sym_size.int, (trunk[0], 0))
        self.num_head_rows = self._call(aten.sym_size.int, (self.head_rows, 0))
        for items, placeholders, is_head in ((program.trunk_inputs, trunk, False), (program.head_inputs, head, True)):
            for item, placeholder in zip(items, placeholders, strict=True):
                self.placed[item.node, item.layout, is_head] = self._place(placeholder, item)
        for node in region:
            self._copy(node)
        outputs = [self._rows_first(self._read(value.node, True), value.layout) for value in program.frontier]
        self.graph.output(tuple(outputs))
        erase_unused(self.graph)
        return self.graph

    def _parameters(self, region: list[fx.Node]) -> list[Any]:
        used = {arg for node in region for arg in node.all_input_nodes}
        return [
            spec
            for spec, node in zip(self.program.inputs, self.program.placeholders, strict=True)
            if spec.kind is InputKind.PARAMETER and node in used
        ]

    def _call(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> fx.Node:
        return add_call(self.graph, target, args, kwargs)

    def _place(self, value: fx.Node, item: ChunkInput) -> fx.Node:
        """Rearrange `[rows, *features]` to the layout that the region expects, with a batch axis of size one."""
        dims = item.layout.dims
        rows, features = item.layout.row_dim, iter(range(1, len(dims)))
        order = [0 if i == rows else next(features) for i, axis in enumerate(dims) if i == rows or axis is None]
        if order != sorted(order):
            value = self._call(aten.permute.default, (value, order))
        if item.layout.batch_dim not in (None, rows):
            value = self._call(aten.unsqueeze.default, (value, item.layout.batch_dim))
        return value

    def _rows_first(self, value: fx.Node, layout: Layout) -> fx.Node:
        """Reverse `_place`: rearrange a region value to `[rows, *features]`."""
        if layout.batch_dim is not None:
            value = self._call(aten.squeeze.dim, (value, layout.batch_dim))
        dims = [axis for axis in layout.dims if axis is not Axis.BATCH]
        token = next(i for i, axis in enumerate(dims) if axis is not None)
        order = [token, *(i for i in range(len(dims)) if i != token)]
        if order != sorted(order):
            value = self._call(aten.permute.default, (value, order))
        return value

    def _read(self, node: fx.Node, in_head: bool, reader: fx.Node | None = None) -> Any:
        """Return an argument as its reader sees it: a placed input, a trunk value at head rows, or its copy."""
        copy, own = self._rows(node, in_head, reader), self._layout(node, reader)
        if not isinstance(own, Layout) or not own.labelled or own.token_dim is not None:
            return copy
        result = self.program.values.get(reader)
        if not isinstance(result, Layout) or result.token_dim is None:
            return copy
        return self._beside_tokens(copy, own, result)

    def _beside_tokens(self, value: fx.Node, layout: Layout, result: Layout) -> fx.Node:
        """Move the rows of a value without token axis to where `result` has its tokens: `[rows, ..., 1]`."""
        for _ in range(len(result.dims) - len(layout.dims)):
            value = self._call(aten.unsqueeze.default, (value, 0))
        return self._call(aten.transpose.int, (value, result.batch_dim, result.token_dim))

    def _layout(self, node: fx.Node, reader: fx.Node | None) -> Any:
        return self.program.input_layouts.get((reader, node), self.program.values.get(node))

    def _rows(self, node: fx.Node, in_head: bool, reader: fx.Node | None) -> fx.Node:
        program = self.program
        if node in program.region:
            copy = self.copies[node]
            value = program.values[node]
            per_token = isinstance(value, Layout) and value.labelled
            if not in_head or node not in program.trunk or not per_token:
                return copy
            if node not in self.gathered:
                self.gathered[node] = self._at_head_rows(copy, program.layout(node), node.meta["val"].shape)
            return self.gathered[node]
        layout = self._layout(node, reader)
        if isinstance(layout, Layout) and reader is not None:
            if (node, layout, in_head) in self.placed:
                return self.placed[node, layout, in_head]
            if is_uniform(node) and layout.labelled:
                shape = self._chunk_shape(layout, node.meta["val"].shape, in_head)
                return self._call(node.target, (shape, node.args[1]), node.kwargs)
        if node not in self.copies and (number := _number(node)) is not None:
            return number
        if node not in self.copies:
            raise RefusalError(
                "the token region uses a value that depends on the number of sequences or tokens",
                where=where(reader or node),
                expected="values per token, and constants",
                got=f"{node.name} = {node.target}",
            )
        return self.copies[node]

    def _at_head_rows(self, value: fx.Node, layout: Layout, shape: Sequence[Any]) -> fx.Node:
        dim = layout.row_dim
        assert dim is not None
        axis, rows = layout.dims[dim], self.head_rows
        if not isinstance(axis, Flat):
            return self._call(aten.index_select.default, (value, dim, rows))
        whole = self._chunk_shape(layout, shape, False)
        known: dict[Any, Any] = {Axis.BATCH: 1, Axis.TOKEN: self.num_tokens}
        split = [*whole[:dim], *(known.get(factor, factor) for factor in axis.factors), *whole[dim + 1 :]]
        value = self._call(aten.reshape.default, (value, split))
        tokens = dim + axis.factors.index(Axis.TOKEN)
        value = self._call(aten.index_select.default, (value, tokens, rows))
        return self._call(aten.reshape.default, (value, self._chunk_shape(layout, shape, True)))

    def _copy(self, node: fx.Node) -> None:
        in_head = node not in self.program.trunk
        if node in self.layers:
            self.copies[node] = self._mixed(node)
        elif node.target in TAKE_A_SHAPE and self._is_per_token(node):
            source, layout = self._read(node.args[0], in_head, node), self.program.layout(node)
            # Rows of an input lie otherwise in memory than in the batch, so that a view cannot flatten all of them.
            target = aten.reshape.default if layout.has_flat and node.target in RESHAPES else node.target
            shape = self._chunk_shape(layout, node.meta["val"].shape, in_head)
            self.copies[node] = self._call(target, (source, shape))
        elif node.target in SQUEEZES and self._is_per_token(node):
            self.copies[node] = self._squeeze(node, self._read(node.args[0], in_head, node))
        elif self._is_token_window(node):
            self.copies[node] = self._read(node.args[0], in_head, node)
        else:
            self.copies[node] = copied(self.graph, node, lambda arg: self._read(arg, in_head, node))
        inherit_line(self.copies[node], node)

    def _squeeze(self, node: fx.Node, source: fx.Node) -> fx.Node:
        """Squeeze the dimensions of size one in the whole batch alone: in a chunk the batch axis has it, too."""
        dims = sorted(set(range(len(sizes(node.args[0])))).difference(operand_dims(node) or ()))
        return self._call(aten.squeeze.dims, (source, dims))

    def _mixed(self, node: fx.Node) -> fx.Node:
        layer = self.layers[node]
        operands = [self._read(arg, False, node) for arg in layer.mixer.operands_of(node.args)]
        arguments = layer.mixer.chunk_arguments(operands, node.args)
        results = self._call(layer.mixer.chunk, (layer.index, *arguments))
        several = has_several_results(layer.mixer.chunk)
        return self._call(operator.getitem, (results, 0)) if several else results

    def _is_per_token(self, node: fx.Node) -> bool:
        value = self.program.values[node]
        return isinstance(value, Layout) and value.labelled

    def _is_token_window(self, node: fx.Node) -> bool:
        """Return whether a node slices the token axis: chunks compute all tokens, and frames say which are read."""
        if node.target is not aten.slice.Tensor or not self._is_per_token(node):
            return False
        return self.program.layout(node).dims[dim_of(node)] is not None

    def _chunk_shape(self, layout: Layout, shape: Sequence[Any], in_head: bool) -> list[Any]:
        """Return the sizes of a value in a chunk, given those over the whole batch."""
        rows = self.num_head_rows if in_head else self.num_tokens

        def size_of(dim: int) -> Any:
            axis = layout.dims[dim]
            if not isinstance(axis, Flat):
                return rows if dim == layout.row_dim else 1 if axis is Axis.BATCH else int(shape[dim])
            if not axis.is_over_tokens:
                return axis.features
            return self._call(operator.mul, (rows, axis.features))

        return list(map(size_of, range(len(shape))))

    def _add_sizes_used_as_numbers(self, region: list[fx.Node]) -> None:
        """Hand over sizes of the batch used as numbers (`x / S`) as scalar tensors of the prologue."""
        for node in region:
            if node.target in TAKE_A_SHAPE or node.target is aten.slice.Tensor:
                continue
            for arg in node.all_input_nodes:
                if has_tensor(arg) or (node.target not in OF_TWO_TENSORS and self._fix_argument(arg)):
                    continue
                if node.target not in OF_TWO_TENSORS:
                    raise RefusalError(
                        "an operator in the token region takes the number of sequences or tokens as an argument",
                        where=where(node),
                        got=f"{node.target}",
                        hint="compute it outside the model, or multiply by it instead",
                    )
                # A number makes no tensor wider. One of no dimensions does if the others have none either.
                dtype = node.meta["val"].dtype
                if dtype.is_floating_point and dtype.itemsize < 4 and node.meta["val"].dim():
                    dtype = torch.float64  # all digits, as eager mode takes them
                with self.program.graph.inserting_after(arg):
                    scalar = self.program.graph.call_function(aten.scalar_tensor.default, (arg,), {"dtype": dtype})
                scalar.meta["val"] = torch.empty((), dtype=dtype, device="meta")
                node.replace_input_with(arg, scalar)
                self.program.values = {**self.program.values, scalar: Layout(())}
                self.program.constant_inputs = [*self.program.constant_inputs, scalar]

    def _fix_argument(self, node: fx.Node) -> bool:
        """Make a number given to the function a constant, under a guard; False: it counts rows or tokens."""
        value, program = node.meta["val"], self.program
        counting = free_symbols(size for size in (program.batch, program.tokens) if size is not None)
        if isinstance(value, (torch.SymInt, torch.SymFloat)):
            if symbolic(value).free_symbols & counting:
                return False
            make_constant(value)
        return True


def _number(node: fx.Node) -> int | float | None:
    """Return the number that a node has in every call; None if it differs, or is none."""
    value = node.meta.get("val")
    if isinstance(value, (torch.SymInt, torch.SymFloat)) and symbolic(value).is_number:
        return int(value) if isinstance(value, torch.SymInt) else float(value)
    return value if isinstance(value, (int, float)) else None


def free_sizes(shape_env: ShapeEnv) -> tuple[Any, Any]:
    """Return symbolic numbers of chunk tokens and of head rows."""
    return new_size(shape_env, "__dta_tokens", 61), new_size(shape_env, "__dta_head_rows", 53)


def fake_inputs(program: Program, tokens: Any, head_rows: Any) -> list[torch.Tensor]:
    """Return fake inputs of `program.chunk`, in order, one for those alike; needs a `FakeTensorMode`."""
    strided = functools.cache(torch.empty_strided)

    def whole(node: fx.Node, requires_grad: bool = False) -> torch.Tensor:
        value = node.meta["val"]
        shape, stride = (tuple(map(int, sizes)) for sizes in (value.shape, value.stride()))
        device = chunk_device(program) if value.is_meta else value.device
        return strided(shape, stride, dtype=value.dtype, device=device, requires_grad=requires_grad)

    def rows(item: ChunkInput, count: Any) -> torch.Tensor:
        value = item.node.meta["val"]
        return torch.empty((count, *_feature_sizes(item)), dtype=value.dtype, device=value.device)

    parameters = [
        whole(program.placeholders[spec.index], spec.requires_grad and program.training)
        for spec in program.region_parameters
    ]
    constants = [whole(node) for node in program.constant_inputs]
    index = torch.empty((head_rows,), dtype=torch.int64, device=chunk_device(program))
    trunk = [rows(item, tokens) for item in program.trunk_inputs]
    head = [rows(item, head_rows) for item in program.head_inputs]
    return [*parameters, *constants, *trunk, index, *head]


def _feature_sizes(item: ChunkInput) -> tuple[int, ...]:
    """Return the sizes of a chunk input's feature dimensions."""
    shape = item.node.meta["val"].shape
    return tuple(int(size) for size, axis in zip(shape, item.layout.dims, strict=True) if axis is None)


def chunk_device(program: Program) -> torch.device:
    """Return the device that the chunk graph runs on."""
    return program.mixer_nodes[0].meta["val"].device
