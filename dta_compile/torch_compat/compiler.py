"""Inductor's compiler and the loaders of its code."""

from dta_compile.torch_compat import needed_for

with needed_for("generated code"):
    from torch._inductor.codecache import CppCodeCache, CppPythonBindingsCodeCache, PyCodeCache
    from torch._inductor.codegen.cpp import CppKernel
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.utils import BoxedBool
    from torch._inductor.virtualized import V
