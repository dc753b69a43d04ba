"""Symbolic sizes, and the functions of sympy that torch writes them with."""

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
