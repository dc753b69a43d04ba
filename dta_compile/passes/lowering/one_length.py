"""Introduce a symbolic number of tokens into a graph that was traced for a constant one.

Python code that depends on the number of tokens (`for i in range(T)`, a table for exactly this length) makes it a
constant of the trace, and Dynamo's guards admit only calls of that length to such a graph. All passes tell tokens from
features by a symbol. So `lower` interprets the graph with a symbol `s` of hint T for the size of the inputs, and
rewrites the arguments of its calls (T = 12):

    an entry of a shape, `x.view(4, 12, 8)`, that has to be the number of tokens   becomes   s
    the end of a slice of an axis of `s` entries, `x[:, :11]`                      becomes   s - 1
    an axis of T entries that is combined with one of `s`, `x + table`, or         becomes   its first `s` entries
    expanded to it, `table.expand(ids.shape)`

None of these changes a value if `s` is T, so the new graph computes the same as the captured one, whichever arguments
were chosen. Choosing one that does not count tokens (a feature axis as wide) can only end in a refusal, since the
passes prove their rewrites for every `s`.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import sympy
import torch
from torch import fx

from dta_compile.errors import RefusalError
from dta_compile.passes.graphs.source_lines import where
from dta_compile.passes.program import ASSIGNED
from dta_compile.passes.symbols import expression, hint, new_size
from dta_compile.torch_compat.operators import OpOverloadPacket
from dta_compile.torch_compat.sizes import ShapeEnv
from dta_compile.torch_compat.tensors import pytree

RESHAPES = ("view", "reshape")
EXPANSIONS = ("expand", "broadcast_to")
INDEXING = ("getitem", "setitem")
JOINS = ("cat", "concat", "concatenate", "stack")
MOST_CHOICES = 6
# Python's operators that torch names otherwise.
OPERATORS = {"truediv": "div", "and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor", "floordiv": "div"}


@contextlib.contextmanager
def symbol_of_length(env: ShapeEnv, length: int) -> Iterator[torch.SymInt]:
    """Yield a new SymInt with hint `length`; assumptions about it hold inside the block, and leave no guards."""
    size = new_size(env, "number_of_tokens", length)
    try:
        yield size
    finally:
        int(size)  # specialises the symbol to the number that Dynamo's own guards check


class OneLength:
    """Rewriter of inputs and calls of a captured graph, with `size` for the constant where it counts tokens."""

    def __init__(self, size: torch.SymInt) -> None:
        self.size, self.number = size, int(hint(size))
        self.symbol = expression(size)

    def inputs(self, values: Sequence[Any]) -> list[Any]:
        """Return the traced inputs, with `size` for the sizes that the trace specialised to the constant."""
        counting = {size.node._expr for value in values for size in self._counting(value)}
        return [self._input(value, counting) for value in values]

    def _counting(self, value: Any) -> Iterator[torch.SymInt]:
        """Yield sizes that count tokens; not the first one of an input `[B, S, ...]`, which may be as large."""
        shape = value.shape if isinstance(value, torch.Tensor) else ()
        yield from filter(self._was_symbolic, shape[1:] if len(shape) > 1 else shape)

    def _was_symbolic(self, size: Any) -> bool:
        return isinstance(size, torch.SymInt) and expression(size) == self.number

    def _input(self, value: Any, counting: set[sympy.Expr]) -> Any:
        def size(own: Any) -> Any:
            return self.size if self._was_symbolic(own) and own.node._expr in counting else own

        if not isinstance(value, torch.Tensor):
            return size(value)
        shape = tuple(map(size, value.shape))
        if all(new is old for new, old in zip(shape, value.shape, strict=True)):
            return value
        with value.fake_mode:  # type: ignore[attr-defined]
            tensor = torch.empty_strided(shape, _strides(value, shape), dtype=value.dtype, device=value.device)
        return tensor.requires_grad_(value.requires_grad)

    def rewritten(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Return the rewritten arguments of a call of the captured graph."""
        name = _name(target)
        is_arithmetic = getattr(target, "__module__", "") == "_operator"
        is_constructor = not is_arithmetic and not any(
            isinstance(arg, torch.Tensor) for arg in pytree.tree_leaves((args, kwargs))
        )
        args, kwargs = self._numbers((args, kwargs), everywhere=is_constructor or name.startswith("new_"))
        if name in RESHAPES:
            return self._reshaped(args, kwargs)
        if name in EXPANSIONS:
            return self._expanded(args, kwargs)
        if name in INDEXING and isinstance(args[0], torch.Tensor):
            value = args[0] if name == "setitem" else self._selected(args[0], args[1])
            args = (value, self._indexed(value, args[1]), *args[2:])
        elif name == "narrow":
            return self._narrowed(args, kwargs)
        elif name == "scaled_dot_product_attention":
            return self._with_mask(args, kwargs)
        elif name in JOINS or _is_pointwise(name):
            return self._aligned(args, kwargs)
        elif is_arithmetic and any(isinstance(arg, torch.SymInt) for arg in args):
            args = tuple(self.size if type(arg) is int and arg == self.number else arg for arg in args)  # B * 12
        return args, kwargs

    def _numbers(self, arguments: Any, everywhere: bool = False) -> Any:
        """Replace arguments such as `s - 11` by numbers if these are nearer to 0: they count from the front.

        `everywhere`: replace all of them, for a function that makes a tensor, which may be written to entry by entry.
        """

        def number(size: torch.SymInt) -> Any:
            offset = expression(size) - self.symbol
            is_near = offset.is_Integer and (everywhere or 2 * offset < -self.number)
            return hint(size) if is_near else size

        return pytree.tree_map_only(torch.SymInt, number, arguments)

    def _reshaped(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        numel = sympy.Mul(*map(expression, args[0].shape))
        entries, structure = pytree.tree_flatten((args[1:], kwargs))
        if not all(isinstance(entry, (int, torch.SymInt)) for entry in entries):
            return args, kwargs  # a view as another dtype
        if self.symbol not in numel.free_symbols:
            return pytree.tree_map_only(
                torch.SymInt, lambda size: hint(size) if self._counts(size) else size, (args, kwargs)
            )
        shape, kwargs = pytree.tree_unflatten(self._shape(args[0].shape, numel, entries), structure)
        return (args[0], *shape), kwargs

    def _shape(self, old: Sequence[Any], numel: sympy.Expr, entries: list[Any]) -> list[Any]:
        """Return a shape of `numel` entries, with multiples of `size` for some of its numbers."""
        starts = {sympy.Mul(*map(expression, old[:dim])) for dim in range(len(old))}
        multiples = [
            i for i, entry in enumerate(entries) if type(entry) is int and entry > 0 and entry % self.number == 0
        ]
        best, most = entries, -1
        for count in range(min(len(multiples), MOST_CHOICES) + 1):
            for chosen in itertools.combinations(multiples, count):
                shape = [n // self.number * self.size if i in chosen else n for i, n in enumerate(entries)]
                sizes = _with_rest(list(map(expression, shape)), numel)
                if sizes is not None:
                    # Prefer axes that start where an old one does, as the second in [B, S, D] to [B, S, H, -1].
                    score = sum(2 if sympy.Mul(*sizes[:i]) in starts else 1 for i in chosen)
                    best, most = (shape, score) if score > most else (best, most)
        return best

    def _expanded(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        entries, structure = pytree.tree_flatten((args[1:], kwargs))
        old = [None] * (len(entries) - args[0].dim()) + list(args[0].shape)
        shape = [
            self.size
            if type(entry) is int and entry == self.number and size is not None and self._counts(size)
            else entry
            for entry, size in zip(entries, old, strict=True)
        ]
        rewritten, kwargs = pytree.tree_unflatten(shape, structure)
        return (self._cut(args[0], shape), *rewritten), kwargs

    def _counts(self, size: Any) -> bool:
        return self.symbol in expression(size).free_symbols

    def _selected(self, table: torch.Tensor, index: Any) -> torch.Tensor:
        """Cut a table along the axes of which a slice takes as many entries as it has, `[:n]` or `[-n:]`."""
        items = list(index) if isinstance(index, tuple) else [index]
        wanted: list[Any] = []
        for item in items:
            skipped = table.dim() - sum(map(_axes_of, items)) if item is Ellipsis else _axes_of(item)
            wanted += [self.size if self._takes_all(item) else None] * skipped
        return self._cut(table, [*wanted, *[None] * (table.dim() - len(wanted))])

    def _takes_all(self, item: Any) -> bool:
        if not isinstance(item, slice):
            return False
        start, stop = (0 if bound is None else expression(bound) for bound in (item.start, item.stop))
        return (start, stop) in ((0, self.symbol), (-self.symbol, 0))

    def _indexed(self, value: torch.Tensor, index: Any) -> Any:
        items = list(index) if isinstance(index, tuple) else [index]
        shape = list(value.shape)
        counts = [_axes_of(item) for item in items]
        dim, rewritten = 0, []
        for item, axes in zip(items, counts, strict=True):
            if isinstance(item, slice):
                item = slice(*self._numbers((item.start, item.stop, item.step)))
                if dim < len(shape) and self._counts(shape[dim]):
                    item = self._slice(item, shape[dim])
            elif axes == 1 and dim < len(shape) and self._counts(shape[dim]):
                item = self._from_end(item, shape[dim])
            rewritten.append(item)
            dim += len(shape) - sum(counts) if item is Ellipsis else axes
        return tuple(rewritten) if isinstance(index, tuple) else rewritten[0]

    def _from_end(self, index: Any, size: Any) -> Any:
        """Count the index of a token of the second half from the end, where it exists for any number of tokens."""
        return index - hint(size) if type(index) is int and hint(size) // 2 < index < hint(size) else index

    def _slice(self, part: slice, size: Any) -> slice:
        """End a slice of most tokens relative to `size`, and count a slice within the second half from the end."""
        start, stop, length = part.start or 0, part.stop, hint(size)
        if type(start) is not int or type(stop) is not int or not 0 <= start < stop <= length:
            return part
        if stop - start > length // 2:
            return slice(part.start, size - (length - stop), part.step)
        if start > length // 2:
            return slice(start - length, stop - length if stop < length else None, part.step)
        return part

    def _narrowed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        if len(args) < 4 or not isinstance(args[2], int) or not self._counts(args[0].shape[args[1]]):
            return args, kwargs
        value, dim, start, length = args[:4]
        part = self._slice(slice(start, start + length), value.shape[dim])
        return (value, dim, part.start, length if part.start < 0 else part.stop - start), kwargs

    def _with_mask(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        query, key = args[:2] if len(args) > 1 else (kwargs["query"], kwargs["key"])
        mask = args[3] if len(args) > 3 else kwargs.get("attn_mask")
        if not isinstance(mask, torch.Tensor):
            return args, kwargs
        mask = self._cut(mask, (query.shape[-2], key.shape[-2]))
        return ((*args[:3], mask, *args[4:]), kwargs) if len(args) > 3 else (args, {**kwargs, "attn_mask": mask})

    def _aligned(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Cut tensors that are combined entry by entry, along the axes where any of them has the symbol."""
        leaves, structure = pytree.tree_flatten((args, kwargs))
        shapes = [leaf.shape for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if len(shapes) < 2:
            return args, kwargs
        longest = itertools.zip_longest(*(reversed(shape) for shape in shapes), fillvalue=1)
        wanted = [next((size for size in sizes if self._counts(size)), None) for sizes in longest][::-1]
        return pytree.tree_unflatten(
            [self._cut(leaf, wanted) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], structure
        )

    def _cut(self, value: torch.Tensor, wanted: Sequence[Any]) -> torch.Tensor:
        """Cut a tensor to sizes with the symbol, aligned at the last axis, where its own size is the same number."""
        for back, size in enumerate(reversed(wanted), 1):
            if back > value.dim() or size is None or not self._counts(size):
                continue
            own = value.shape[-back]
            if isinstance(own, int) and own > 1 and own == hint(size):
                # Not a slice, whose strides are numbers: comparing them with the symbol would specialise it.
                value = value.index_select(value.dim() - back, torch.arange(size, device=value.device))
        return value

    def check(self, node: fx.Node) -> None:
        """Raise `RefusalError` if a node has specialised the symbol to a constant."""
        if expression(self.size).free_symbols:
            return
        is_mapped = any("vmap" in str(other.target) for other in node.graph.nodes)
        raise RefusalError(
            "the token size is a constant of this graph, and it is not clear here which sizes count tokens",
            where=where(node),
            expected=f"sizes of {self.number} that count tokens, or such that do not",
            got=f"{node.target} combines both"
            + (", inside of torch.func.vmap, which makes sizes constants" * is_mapped),
            hint="write the mapped axis out: operators take a batch as it is"
            if is_mapped
            else "let Python not depend on the number of tokens (all tokens at once instead of a loop over slices of "
            "so many; a recurrence by dta_compile.linear_recurrence or its like), pass dynamic=True to torch.compile "
            "if a tensor of so many tokens comes from outside of the arguments, or pad to a length that no feature "
            "size of the model is equal to",
        )


def _name(target: Any) -> str:
    """Return torch's name of a function, operator or method, without marks of in-place variants."""
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    plain = name.strip("_")
    if getattr(target, "__module__", "") == "_operator" and plain.startswith("i") and plain[1:] in ASSIGNED:
        plain = plain[1:]
    return OPERATORS.get(plain, plain)


def _is_pointwise(name: str) -> bool:
    packet = getattr(torch.ops.aten, name, None) if name.isidentifier() else None
    overloads = packet.overloads() if isinstance(packet, OpOverloadPacket) else []
    return any(torch.Tag.pointwise in getattr(packet, overload).tags for overload in overloads)


def _with_rest(sizes: list[sympy.Expr], numel: sympy.Expr) -> list[sympy.Expr] | None:
    """Return a shape with its -1 worked out; None unless it has `numel` entries for every number of tokens."""
    unknown = [i for i, size in enumerate(sizes) if size == -1]
    rest = sympy.cancel(numel / sympy.Mul(*(size for size in sizes if size != -1)))
    if not unknown:
        return sizes if rest == 1 else None
    if rest.as_numer_denom()[1] != 1:
        return None
    return [rest if i in unknown else size for i, size in enumerate(sizes)]


def _axes_of(item: Any) -> int:
    """Return how many axes an item of an index applies to."""
    if item is None or item is Ellipsis or isinstance(item, bool):
        return 0
    return item.dim() if isinstance(item, torch.Tensor) and item.dtype is torch.bool else 1


def _strides(value: torch.Tensor, shape: Iterable[Any]) -> list[Any]:
    """Return the strides of a tensor of another shape with the same memory layout."""
    sizes, strides = tuple(shape), list(value.stride())
    order = sorted(range(value.dim()), key=lambda dim: (hint(strides[dim]), hint(value.shape[dim])))
    step: Any = 1
    number = 1
    for dim in order:
        if hint(strides[dim]) == number:  # contiguous up to here
            strides[dim] = step
            step, number = step * sizes[dim], number * hint(sizes[dim])
    return strides
