"""Symbolic sizes, and the functions of sympy that torch writes them with."""

import sympy

from dta_compile.torch_compat import needed_for

with needed_for("symbolic batch and token sizes"):
    from torch.fx.experimental import _config as config
    from torch.fx.experimental.sym_node import SymNode
    from torch.fx.experimental.symbolic_shapes import (
        DimDynamic,
        GuardOnDataDependentSymNode,
        ShapeEnv,
        free_unbacked_symbols,
        statically_known_true,
    )
    from torch.utils._sympy.functions import FloorDiv, Min, Mod, PythonMod
    from torch.utils._sympy.printers import PythonPrinter
    from torch.utils._sympy.symbol import SymT, symbol_is_type

    replace_symbol = ShapeEnv._set_replacement


def unite_symbols(env: ShapeEnv) -> None:
    """Give sizes one symbol that a guard on sums makes equal: from `a + c == b + c`, the environment draws no `a == b`.

    Other tensors are concatenated for the mask than for the ids; their tokens are the same all the same.
    """
    for guard in env.guards:
        if not isinstance(guard.expr, sympy.Eq) or not all(isinstance(side, sympy.Expr) for side in guard.expr.args):
            continue
        difference = env.replace(guard.expr.lhs - guard.expr.rhs)
        symbols = sorted(difference.free_symbols, key=str)
        if len(symbols) != 2 or not all(symbol_is_type(symbol, SymT.SIZE) for symbol in symbols):
            continue
        one, other = symbols
        if difference in (one - other, other - one):
            replace_symbol(env, other, one, "a guard on sums of sizes")
