"""Every private touch of inductor: from a graph of ATen operators to code generated for it, C++ or Triton.

One compilation serves all sizes: they are traced as symbols, without a guard that anything else would have to check.
What inductor assumes about them nevertheless (two or more, products within 32 bits) is `Code.serves`. What was
compiled lies in inductor's own folder, $TORCHINDUCTOR_CACHE_DIR; where to find it there, a `Compiled`, is kept with it.

Intermediate values stay in float32 where ATen rounds each of them to bfloat16 (`emulate_precision_casts` is off): that
is as fast and nearer to the exact result. Supported torch: 2.11 to 2.15.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import hashlib
import math
import os
import pathlib
import pickle
import platform
import re
import shutil
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import sympy
import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch._guards import TracingContext, tracing
from torch._prims_common import clone_preserve_strides
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._sympy.printers import PythonPrinter

from dta_compile.codegen import wrapper
from dta_compile.executable.code import AnySource, CppSource, Input, Source, size_symbols
from dta_compile.executable.pieces import AnyCode, Code, Run
from dta_compile.files import require_own

TYPICAL_SIZES = (2039, 1021)  # what the code is tuned for; primes, so that none of their divisors is taken for granted
ALIGNMENT = 16  # bytes; of what Triton's kernels assume to be aligned
_PATCHING = threading.Lock()  # one thread at a time changes a class of inductor, and changes it back


@dataclasses.dataclass(frozen=True)
class Compiled:
    """Generated code as it lies on disk.

    Attributes:
        serves, strides: of `Code`, as text of functions.
        text: what defines `call`; None: all of the module that `kernels` names.
        kernels: by name, the module that has it and its file.
        constants: by name, tensors that it reads.
        aligned: which of its inputs must lie at multiples of `ALIGNMENT`.
    """

    serves: str
    strides: str
    text: str | None
    kernels: tuple[tuple[str, str, str], ...]
    constants: dict[str, torch.Tensor]
    aligned: tuple[int, ...]


class CompiledLibrary(NamedTuple):
    """Functions in C++ as they lie on disk, compiled."""

    path: str


AnyCompiled = Compiled | CompiledLibrary


def generate(source: AnySource, threads: int | None = None) -> AnyCompiled:
    """Code for a function, for so many threads of a CPU; None: as many as torch has here.

    Raises whatever inductor raises: no compiler, an operator that it cannot lower.
    """
    from dta_compile.passes.symbols import expression  # the passes import what is generated for them

    if isinstance(source, CppSource):
        from torch._inductor.codecache import CppCodeCache

        # Inductor writes its vectors out, and so tells compilers to make none of loops.
        return CompiledLibrary(CppCodeCache.load(source.text, extra_flags=("-ftree-loop-vectorize",))._name)
    # Not with this module: importing it takes a second, and only some programs need it.
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.utils import BoxedBool

    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    with _disable_current_modes(), torch._C._DisableAutocast(), torch.no_grad(), _default(source.default_dtype):
        sizes = [_size(env, index) for index in range(source.sizes)]
        known = dict(zip(size_symbols(source.sizes), map(expression, sizes), strict=True))
        with mode, enable_python_dispatcher():
            fakes = [_like(env, value, known) for value in source.inputs]
            module = _decomposed(source, [*sizes, *fakes])
        # Sizes are asserted of every input at every call, and a piece has seen to them; patterns are of products and
        # attention, which are no part of pieces, and of copies, see `_write_views`.
        changes: dict[str, Any] = {"size_asserts": False, "pattern_matcher": False}
        # Fusing reductions over rows with those over columns would be decided by the typical sizes, and hold for those
        # on their side of a threshold only.
        if hasattr(config.triton, "mix_order_reduction"):
            changes["triton.mix_order_reduction"] = False
        # C++ is made for a number of threads, which is no part of the cache's key in all versions unless it is set.
        if "cpu" in source.devices:
            changes["cpp.threads"] = threads or torch.get_num_threads()
        # What an earlier release of ours left in inductor's cache was made by other choices.
        caching: Any = torch.compiler.config
        tag = f"{caching.cache_key_tag} dta_compile {generator()} {source.default_dtype}"
        with (
            tracing(TracingContext(mode)),
            caching.patch(cache_key_tag=tag),
            config.patch(changes),
            _sums_for_any_size(env),
        ):
            run = compile_fx_inner(module, [*sizes, *fakes], cudagraphs=BoxedBool(False), is_inference=True)
    own = list(map(expression, sizes))
    if not all(isinstance(symbol, sympy.Symbol) for symbol in own) or len(set(own)) < len(own):
        raise ValueError(f"it works for one number of tokens or head rows only: {own}")
    conditions = [sympy.Ge(symbol, 2, evaluate=False) for symbol in own] + [guard.expr for guard in env.guards]
    strides = [[expression(stride) for stride in fake.stride()] for fake in fakes]
    return _compiled(
        run,
        _function(own, " and ".join(f"({_printed(condition)})" for condition in conditions) or "True"),
        _function(own, _tuple(_tuple(map(_printed, each)) for each in strides)),
        source.devices,
    )


@contextlib.contextmanager
def _default(dtype: torch.dtype) -> Iterator[None]:
    """The default dtype of another process; here it is the same, unless another thread is changing it."""
    before = torch.get_default_dtype()
    if before is not dtype:
        torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        if before is not dtype:
            torch.set_default_dtype(before)


@contextlib.contextmanager
def _sums_for_any_size(env: ShapeEnv) -> Iterator[None]:
    """C++ that adds numbers in parts, for precision, whenever their number is symbolic: the choice needs no guard.

    Inductor does so for more than 4,096 and adds fewer directly, and its code serves one of the two.
    """
    from torch._inductor.codegen.cpp import CppKernel
    from torch._inductor.virtualized import V

    with _PATCHING:
        decide = getattr(CppKernel, "need_use_acc_helper", None)
        if decide is None:  # a torch that has another way
            yield
            return

        def decide_once(kernel: Any, reduction_type: str, dtype: torch.dtype, *others: Any, **options: Any) -> bool:
            ours = V.graph.sizevars.shape_env is env  # or somebody else's, in another thread
            if ours and reduction_type == "sum" and dtype == torch.float:
                return any(size.free_symbols for size in kernel.call_ranges[kernel.reduction_depth :])
            return bool(decide(kernel, reduction_type, dtype, *others, **options))

        CppKernel.need_use_acc_helper = decide_once  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            CppKernel.need_use_acc_helper = decide  # type: ignore[method-assign]


def _compiled(run: Any, serves: str, strides: str, devices: set[str]) -> Compiled:
    """Where the code that inductor has just loaded lies."""
    from torch._inductor.codecache import PyCodeCache

    module = next(one for one in reversed(PyCodeCache.modules) if getattr(one, "key", None) == run.cache_key)
    aligned = tuple(run.inputs_to_check)
    if devices != {"cpu"}:  # Triton's kernels are found by what the module says of them
        if run.constants:
            raise ValueError(f"it reads constants: {', '.join(run.constants)}")
        return Compiled(serves, strides, None, (("call", run.cache_key, str(module.__file__)),), {}, aligned)
    text = pathlib.Path(str(module.__file__)).read_text()
    names = wrapper.kernels(text, "cpp_pybinding")
    text, free = wrapper.needed(text, "call", names)
    found = {name: getattr(module, name) for name in free}
    constants = {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}
    homes = {name: found[name].__self__.__spec__ for name in free if name not in constants}
    places = tuple((name, home.name, home.origin) for name, home in homes.items())
    return Compiled(serves, strides, text, places, constants, aligned)


def load(compiled: AnyCompiled) -> AnyCode:
    """The code, in this process; raises `OSError` or `ImportError` where its files are gone, `ValueError` where others
    may have written them."""
    for path in [compiled.path] if isinstance(compiled, CompiledLibrary) else [one[-1] for one in compiled.kernels]:
        require_own(pathlib.Path(path))
        require_own(pathlib.Path(path).parent)
    if isinstance(compiled, CompiledLibrary):
        return ctypes.CDLL(compiled.path)
    if compiled.text is None:
        from torch._inductor.codecache import PyCodeCache

        ((_, key, path),) = compiled.kernels
        call = PyCodeCache.load_by_key_path(key, path).call
    else:
        names = {**compiled.constants, **{name: _kernel(*place) for name, *place in compiled.kernels}}
        exec(compiled.text, names)
        call = names["call"]
    run = _with_aligned(call, compiled.aligned) if compiled.aligned else call
    known = {"math": math, "torch": torch}
    return Code(run, eval(compiled.serves, known), eval(compiled.strides, known))


def _kernel(module: str, path: str) -> Any:
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    if not os.path.exists(path):
        raise FileNotFoundError(path)
    key, _, name = module.rpartition(".")
    return getattr(CppPythonBindingsCodeCache._load_library_inner(path, key), name)


def _with_aligned(run: Run, positions: Sequence[int]) -> Run:
    """`run` on copies of those tensors at `positions` that lie elsewhere than its kernels assume."""

    def aligned(arguments: list[Any]) -> Sequence[torch.Tensor]:
        for position in positions:
            if arguments[position].data_ptr() % ALIGNMENT:
                arguments[position] = clone_preserve_strides(arguments[position])
        return run(arguments)

    return aligned


def folder() -> pathlib.Path:
    """Where inductor keeps what it compiles."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return pathlib.Path(cache_dir())


def settings() -> dict[str, Any]:
    """What another process has to be told of inductor's settings here; how many processes compile is its own affair."""
    from torch._inductor import config

    found = config.get_config_copy().items()
    return {name: value for name, value in found if name != "compile_threads" and _can_be_sent(value)}


def apply(chosen: dict[str, Any]) -> None:
    """Take over the settings of another process."""
    from torch._inductor import config

    here = config.get_config_copy()
    config.load_config(pickle.dumps({name: x for name, x in chosen.items() if name in here and here[name] != x}))


@functools.cache
def generator() -> str:
    """A hash of what makes code of a source, and of what reads it again."""
    files = (pathlib.Path(str(file)) for file in (__file__, wrapper.__file__))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def environment(devices: Iterable[str]) -> tuple[Any, ...]:
    """What code on these types of devices depends on besides its source."""
    from torch._inductor import config

    found: list[Any] = [torch.__version__, sys.implementation.cache_tag, config.get_hash()]
    if "cpu" in devices:
        found += [torch.get_num_threads(), platform.machine(), _cpu_flags()]
    if "cuda" in devices:
        found += [
            torch.version.cuda,
            torch.version.hip,
            torch.cuda.get_device_name(),
            torch.cuda.get_device_capability(),
        ]
    return tuple(found)


def is_cached() -> bool:
    """Whether inductor may use what earlier processes left on disk."""
    from torch._inductor import config

    return config.fx_graph_cache and not config.force_disable_caches


def why_no_compiler(devices: Iterable[str]) -> str | None:
    """What is missing where inductor would look for a C++ compiler; None: nothing, or these devices need none."""
    from torch._inductor import config

    if "cpu" not in devices:
        return None
    chosen = config.cpp.cxx
    asked = [name for name in (chosen if isinstance(chosen, (tuple, list)) else [chosen]) if name]
    if any(map(shutil.which, asked)) or os.environ.get("TORCH_INDUCTOR_INSTALL_GXX"):
        return None
    return (
        f"No working C++ compiler ({', '.join(asked) or 'none is named'}): install one, as by `apt install g++` or"
        " `conda install cxx-compiler`, or name it in $CXX"
    )


def _can_be_sent(value: Any) -> bool:
    try:
        pickle.dumps(value)
    except (pickle.PicklingError, TypeError, AttributeError):
        return False
    return True


def _cpu_flags() -> str:
    """What instructions the CPU has: code is generated for all of them."""
    try:
        found = re.search(r"^(flags|Features)\s*:(.*)$", pathlib.Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[2] if found else f"{platform.processor()} {torch.backends.cpu.get_cpu_capability()}"


def _size(env: ShapeEnv, index: int) -> Any:
    hint = TYPICAL_SIZES[index]
    source = ConstantSource(f"__dta_size_{index}")
    symbol = env.create_symbol(hint, source=source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None)
    return env.create_symintnode(symbol, hint=hint)


def _like(env: ShapeEnv, value: Input, known: dict[sympy.Symbol, sympy.Expr]) -> torch.Tensor:
    """A fake tensor with the shape and strides of `value` in other symbols."""

    def renamed(size: int | sympy.Expr) -> Any:
        if isinstance(size, int):
            return size
        found = size.subs(known)
        hints = {symbol: TYPICAL_SIZES[index] for index, symbol in enumerate(known.values())}
        return env.create_symintnode(found, hint=int(found.subs(hints)))

    shape, strides = map(renamed, value.shape), map(renamed, value.strides)
    return torch.empty_strided(tuple(shape), tuple(strides), dtype=value.dtype, device=value.device)


def _decomposed(source: Source, arguments: list[Any]) -> fx.GraphModule:
    """In operators that inductor has kernels for; results keep their strides, which later operators rely on."""
    from torch._inductor.decomposition import select_decomp_table

    module = make_fx(source.function(), decomposition_table=select_decomp_table())(*arguments)
    module.graph.eliminate_dead_code()
    output = next(iter(reversed(module.graph.nodes)))
    _write_views(output)
    module.recompile()
    output.meta["user_visible_output_idxs"] = list(range(len(output.args[0])))
    return module


def _write_views(output: fx.Node) -> None:
    """Results that are views of values which nothing keeps are written as such: a copy of one is no pass over memory,
    but says in which shape; views made by the wrapper take the host as long as allocating does."""
    from dta_compile.passes.graphs.nodes import call, is_pointwise
    from dta_compile.passes.graphs.operators import KEEP_ORDER_IN_PLACE

    for value in output.all_input_nodes:
        if value.target in KEEP_ORDER_IN_PLACE and is_pointwise(value.args[0]):
            with output.graph.inserting_before(output):
                copy = call(output.graph, torch.ops.aten.clone.default, value)
            output.replace_input_with(value, copy)


def _printed(expression: sympy.Basic) -> str:
    return PythonPrinter().doprint(expression)


def _tuple(parts: Iterable[str]) -> str:
    return f"({''.join(f'{part}, ' for part in parts)})"


def _function(symbols: Sequence[sympy.Symbol], result: str) -> str:
    return f"lambda {', '.join(map(str, symbols))}: {result}"
