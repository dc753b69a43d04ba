"""Follow index scores from keys to blocks of keys, and the indices of `topk` to the mask that they are scattered into.

    scores = F.pad(scores, (0, blocks * n - S), value=-inf).view(B, H, S, blocks, n).amax(-1)
    scores = scores.scatter(-1, local, inf)                   or `masked_fill`, `where`: scores that are numbers
    best, index = scores.topk(min(count, blocks), -1)
    index = index.masked_fill(best == -inf, blocks)           blocks without a key are written where none reads
    mask = torch.zeros(B, H, S, blocks + 1, dtype=bool).scatter(-1, index, True)[..., :blocks]

`choices` has the rest: scores of keys, and the mixer that all of this becomes.
"""

from __future__ import annotations

import dataclasses
import math
import operator

import sympy
import torch
from torch import fx

from dta_compile.passes.graphs.arguments import argument, slice_of, where_of
from dta_compile.passes.graphs.nodes import SizeNodes, call, constructed, is_float
from dta_compile.passes.graphs.operators import CASTS, COPIES, RESHAPES, aten
from dta_compile.passes.lowering.attention.factors import Mismatch, number_of
from dta_compile.passes.symbols import expression, sizes
from dta_compile.proofs.mask_class import CERTAIN, FORBIDDEN
from dta_compile.torch_compat.sizes import FloorDiv, Mod, PythonMod

SCATTERS = (aten.scatter.value, aten.scatter.src)
MOST_COLUMNS = 16  # of a scatter into scores


def operand_of_blocks(node: fx.Node) -> fx.Node | None:
    """Return the operand that may be scores, of an operator that makes scores of blocks or replaces some."""
    if node.target is operator.getitem and node.args[0].target is aten.max.dim and node.args[1] == 0:
        return node.args[0].args[0]
    if node.target in (aten.constant_pad_nd.default, aten.amax.default, *SCATTERS):
        return node.args[0]
    return None


class Blocks:
    """Blocks of adjacent keys that scores have become, and scores that were replaced by numbers.

    Attributes:
        size: keys of a block.
        forced: numbers that replace scores, NaN elsewhere; broadcastable to the scores. None: there are none.
    """

    def __init__(self) -> None:
        self.size = 1
        self.forced: fx.Node | None = None
        self._is_open = False  # the scores are padded, or those of blocks still have a dimension of keys
        self._pad = sympy.Integer(0)

    def follow(self, node: fx.Node, source: fx.Node) -> bool:
        """Apply the effect of a node on scores `source`, and return True; False if it is another operator.

        Raises:
            Mismatch: an operator that is not understood.
        """
        before, after = sizes(source), sizes(node)
        if node.target is aten.constant_pad_nd.default:
            self._require_pad(node)
            self._pad, self._is_open = after[-1] - before[-1], True
        elif node.target in RESHAPES and after[:-2] == before[:-1] and isinstance(size := node.args[1][-1], int):
            if self.size > 1 or self.forced is not None or size < 2:
                raise Mismatch("blocks of blocks, of scores that are numbers, or of one key")
            self.size, self._is_open = size, True
            if not _is_below(self._pad, self.size):
                raise Mismatch("more blocks than those of the keys")
        elif self._is_open:
            if not self._is_best(node, source):
                raise Mismatch(f"{node.target} of the scores of a block, and not the best one")
            self._is_open = False
        elif (fill := self._filler(node, source)) is not None:
            self._force(node, *fill)
        elif self.size == 1 and self.forced is None:
            return False
        elif node.target not in CASTS | COPIES or not is_float(node):
            raise Mismatch(f"{node.target} of the scores of blocks")
        return True

    def of_scores(self, rank: int) -> fx.Node | None:
        """Return the numbers for scores of `rank` dimensions, with one of heads if there is one of sequences."""
        forced = self.forced
        if forced is not None and rank == len(sizes(forced)) == 3:
            return call(forced.graph, aten.unsqueeze.default, forced, 1)
        return forced

    @staticmethod
    def _require_pad(node: fx.Node) -> None:
        """Raise `Mismatch` unless hidden keys are appended."""
        widths, value = node.args[1], number_of(argument(node, "value"))
        if len(widths) != 2 or widths[0] != 0 or value is None or value > CERTAIN:
            raise Mismatch("scores that are padded by others than hidden keys")

    @staticmethod
    def _is_best(node: fx.Node, source: fx.Node) -> bool:
        """Return whether a node is the largest score along the last dimension, which it removes."""
        reduction, rank = node.args[0] if node.target is operator.getitem else node, len(sizes(source))
        if reduction.target not in (aten.amax.default, aten.max.dim) or argument(reduction, "keepdim"):
            return False
        return argument(reduction, "dim") in ([-1], [rank - 1], -1, rank - 1)

    def _filler(self, node: fx.Node, source: fx.Node) -> tuple[fx.Node, float] | None:
        """Return condition and number of a fill that does not hide keys; None for other nodes."""
        if node.target in SCATTERS:
            return self._scattered(node)
        if (selected := where_of(node)) is None or source not in selected[1:]:
            return None
        condition, value, other = selected
        number = number_of(value if other is source else other)
        if self.size == 1 and self.forced is None and (number is None or number <= FORBIDDEN):
            return None  # a mask
        if number is None:
            raise Mismatch("scores replaced by numbers that are known only at the call")
        if other is not source:
            condition = call(node.graph, aten.logical_not.default, condition)
        return condition, number

    @staticmethod
    def _scattered(node: fx.Node) -> tuple[fx.Node, float]:
        """Return where a scatter along the last dimension writes a number, and the number."""
        index, rank = node.args[2], len(sizes(node))
        number, columns = number_of(node.args[3]), sizes(index)[-1]
        is_last = node.args[1] % rank == rank - 1
        if number is None or not is_last or not columns.is_Integer or columns > MOST_COLUMNS:
            raise Mismatch("a scatter into scores")
        if sizes(index)[:-1] != sizes(node)[:-1]:
            raise Mismatch("a scatter into the scores of some queries")
        blocks = SizeNodes(node.graph).build(sizes(node)[-1])
        if blocks is None:
            raise Mismatch(f"a scatter into {sizes(node)[-1]} scores")
        with node.meta["val"].fake_mode:
            numbers = call(node.graph, aten.arange.default, blocks, device=node.meta["val"].device, pin_memory=False)
        hits = [
            call(node.graph, aten.eq.Tensor, numbers, call(node.graph, aten.slice.Tensor, index, rank - 1, i, i + 1))
            for i in range(int(columns))
        ]
        condition, *others = hits
        for other in others:
            condition = call(node.graph, aten.logical_or.default, condition, other)
        return condition, number

    def _force(self, node: fx.Node, condition: fx.Node, number: float) -> None:
        value, graph = node.meta["val"], node.graph
        filler, otherwise = (constructed(graph, aten.full.default, [], fill, like=value) for fill in (number, math.nan))
        self.forced = call(graph, aten.where.self, condition, filler, self.forced or otherwise)


def _is_below(pad: sympy.Expr, block: int) -> bool:
    """Return whether padding up to a multiple of `block` is less than a block, for every size that it depends on.

    Made of the size, and of quotients and remainders by `block`, it grows by the same number each `block` sizes: zero.
    """
    symbols, quotients = list(pad.free_symbols), pad.atoms(FloorDiv, Mod, PythonMod)
    if not symbols:
        return bool(0 <= pad < block)
    (size, *others), plain = symbols, pad.subs({part: sympy.Dummy() for part in quotients})
    parts = [plain, *(quotient.args[0] for quotient in quotients)]
    is_linear = all(part.is_polynomial() and sympy.degree(part, size) <= 1 for part in parts)
    if others or not is_linear or any(quotient.args[1] != block for quotient in quotients):
        return False
    pads = [pad.subs(size, number) for number in range(1, 2 * block + 1)]
    return pads[:block] == pads[block:] and all(0 <= number < block for number in pads)


@dataclasses.dataclass(frozen=True)
class Written:
    """A scatter of a number into another one by the indices of `topk` along the last dimension.

    Attributes:
        none: index that takes the place of those of scores of -inf; None: they keep theirs.
        numbers: what is scattered into, and what is scattered.
    """

    scatter: fx.Node
    topk: fx.Node
    none: sympy.Expr | None
    numbers: tuple[float, float]

    @classmethod
    def by(cls, node: fx.Node) -> Written | None:
        """Return what a node scatters, None if it is no such scatter."""
        if node.target not in SCATTERS or not isinstance(node.args[2], fx.Node):
            return None
        (base, dim, index), rank = node.args[:3], len(sizes(node))
        numbers = number_of(base), number_of(node.args[3])
        topk, none = (_indices(index) if dim % max(rank, 1) == rank - 1 else None) or (None, None)
        if topk is None or numbers[0] is None or numbers[1] is None:
            return None
        is_alike = sizes(topk.args[0])[:-1] == sizes(node)[:-1]
        is_largest = argument(topk, "largest") is True and argument(topk, "dim") in (-1, rank - 1)
        return cls(node, topk, none, (numbers[0], numbers[1])) if is_alike and is_largest else None

    def visible(self) -> list[fx.Node]:
        """Return the values in which each entry is that of a score, which may be parts of the scattered one.

        Raises:
            Mismatch: there are other entries.
        """
        scores, own = sizes(self.topk.args[0]), sizes(self.scatter)
        if self.none is None:
            parts = [self.scatter]
        elif (self.none - scores[-1]).is_nonnegative and (own[-1] - self.none).is_positive:
            parts = list(self.scatter.users)
        else:
            raise Mismatch("indices of scores of -inf that are other ones")
        slices = [slice_of(part) for part in parts if part is not self.scatter]
        if any(sizes(part) != scores for part in parts) or any(part is None or part.start != 0 for part in slices):
            raise Mismatch("a mask of more entries than scores")
        return parts


def _indices(node: fx.Node) -> tuple[fx.Node, sympy.Expr | None] | None:
    """Return the `topk` whose indices a node has, and the index that replaces those of scores of -inf, if one does."""
    if node.target in CASTS | COPIES and node.meta["val"].dtype in (torch.int32, torch.int64):
        return _indices(node.args[0])
    if node.target is operator.getitem and node.args[0].target is aten.topk.default and node.args[1] == 1:
        return node.args[0], None
    if (selected := where_of(node)) is None:
        return None
    condition, filler, source = selected
    topk, _ = _indices(source) or (None, None)
    is_size = isinstance(filler, fx.Node) and not isinstance(filler.meta["val"], torch.Tensor)
    number = filler.meta["val"] if is_size else number_of(filler)
    if isinstance(number, float):
        number = int(number) if number.is_integer() else None
    if topk is None or number is None or not _is_none(condition, topk):
        return None
    return topk, expression(number)


def _is_none(condition: fx.Node, topk: fx.Node) -> bool:
    """Return whether a condition is true for scores of -inf alone."""
    if condition.target not in (aten.eq.Scalar, aten.lt.Scalar, aten.eq.Tensor, aten.lt.Tensor):
        return False
    compared, number = condition.args[0], number_of(condition.args[1])
    is_equality = condition.target in (aten.eq.Scalar, aten.eq.Tensor)
    if compared.target is operator.getitem and compared.args == (topk, 0):
        return is_equality and number == -math.inf
    source, index = _indices(compared) or (None, None)  # a negative index is that of such a score
    if source is not topk or index is None or number is None or not index.is_Integer:
        return False
    none = int(index)
    return (none == number and number < 0) if is_equality else (none < number <= 0)
