"""The only use of inductor's private API: generate C++ or Triton code for a graph of ATen operators.

One compilation serves all sizes: they are traced as SymInts, and the guards of their `ShapeEnv` (sizes of at least two,
products within 32 bits) become `Code.serves`. Compiled files stay in inductor's own folder, $TORCHINDUCTOR_CACHE_DIR;
the code cache stores a `Compiled` there, which says where they are.

Intermediate values stay in float32 where ATen rounds each of them to bfloat16 (`emulate_precision_casts` is off), which
costs nothing and is more accurate. Supported torch: 2.11 to 2.15.
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

from dta_compile.attributes import attribute_set
from dta_compile.codegen import wrapper
from dta_compile.executable.code import AnySource, CppSource, Input, Source, size_symbols
from dta_compile.executable.pieces import AnyCode, Code, Run
from dta_compile.files import require_own
from dta_compile.torch_compat.sizes import PythonPrinter, ShapeEnv
from dta_compile.torch_compat.tensors import (
    DisableAutocast,
    FakeTensorMode,
    clone_preserve_strides,
    enable_python_dispatcher,
    without_modes,
)
from dta_compile.torch_compat.tracing import TracingContext, make_fx
from dta_compile.torch_compat.tracing import in_context as tracing

TYPICAL_SIZES = (2039, 1021)  # size hints; primes, so that inductor cannot rely on a divisor
ALIGNMENT = 16  # bytes that Triton's kernels assume inputs to be aligned to
_PATCHING = threading.Lock()  # one thread at a time patches a class of inductor and restores it


@dataclasses.dataclass(frozen=True)
class Compiled:
    """Generated code in the form in which it is cached on disk.

    Attributes:
        serves, strides: the functions of `Code`, as text.
        text: the statements that define `call`; None if `kernels` names a module that is loaded whole.
        kernels: (name, module, file) of each kernel.
        constants: tensors that the code reads, by name.
        aligned: positions of the inputs that must be aligned to `ALIGNMENT`.
    """

    serves: str
    strides: str
    text: str | None
    kernels: tuple[tuple[str, str, str], ...]
    constants: dict[str, torch.Tensor]
    aligned: tuple[int, ...]


class CompiledLibrary(NamedTuple):
    """Path of a compiled C++ library."""

    path: str


AnyCompiled = Compiled | CompiledLibrary


def generate(source: AnySource, threads: int | None = None) -> AnyCompiled:
    """Generate code for a source, for `threads` threads of a CPU (None: torch's number of threads).

    Raises whatever inductor raises, for instance if there is no compiler or it cannot lower an operator.
    """
    from dta_compile.passes.symbols import expression, new_size  # imported here, since the passes import this module

    if isinstance(source, CppSource):
        from dta_compile.torch_compat.compiler import CppCodeCache

        # Inductor vectorises explicitly and turns the compiler's loop vectoriser off.
        return CompiledLibrary(CppCodeCache.load(source.text, extra_flags=("-ftree-loop-vectorize",))._name)
    # Imported here, since that takes a second and only some programs need it.
    from dta_compile.torch_compat.compiler import BoxedBool, compile_fx_inner
    from dta_compile.torch_compat.inductor import config

    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    with without_modes(), DisableAutocast(), torch.no_grad(), contextlib.ExitStack() as stack:
        if (default := torch.get_default_dtype()) is not source.default_dtype:  # in a worker, or changed by a thread
            stack.callback(torch.set_default_dtype, default)
            torch.set_default_dtype(source.default_dtype)
        sizes = [new_size(env, f"__dta_size_{i}", TYPICAL_SIZES[i]) for i in range(source.sizes)]
        known = dict(zip(size_symbols(source.sizes), map(expression, sizes), strict=True))
        with mode, enable_python_dispatcher():
            fakes = [_like(env, value, known) for value in source.inputs]
            module = _decomposed(source, [*sizes, *fakes])
        # Size assertions are redundant, since a piece checks its inputs. The pattern matcher covers matrix products and
        # attention, which pieces do not contain, and copies, which `_write_views` relies on.
        changes: dict[str, Any] = {"size_asserts": False, "pattern_matcher": False}
        # Fusing reductions over rows with those over columns is decided by the size hints, and guarded by a threshold.
        if hasattr(config.triton, "mix_order_reduction"):
            changes["triton.mix_order_reduction"] = False
        # C++ code is specialised to a number of threads, which some versions put into the cache key only if it is set.
        if "cpu" in source.devices:
            changes["cpp.threads"] = threads or torch.get_num_threads()
        # Entries that earlier releases of ours left in inductor's cache were generated with other settings.
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
def _sums_for_any_size(env: ShapeEnv) -> Iterator[None]:
    """Make C++ reductions use partial sums whenever their length is symbolic, so that the choice needs no guard.

    Inductor uses partial sums, which are more precise, above 4,096 elements, and guards on that threshold.
    """
    from dta_compile.torch_compat.compiler import CppKernel, V

    with _PATCHING:
        decide = getattr(CppKernel, "need_use_acc_helper", None)
        if decide is None:  # a torch that sums without partial sums, and so without the guard
            yield
            return

        def decide_once(kernel: Any, reduction_type: str, dtype: torch.dtype, *others: Any, **options: Any) -> bool:
            ours = V.graph.sizevars.shape_env is env  # another thread may compile at the same time
            if ours and reduction_type == "sum" and dtype == torch.float:
                return any(size.free_symbols for size in kernel.call_ranges[kernel.reduction_depth :])
            return bool(decide(kernel, reduction_type, dtype, *others, **options))

        with attribute_set(CppKernel, "need_use_acc_helper", decide_once):
            yield


def _compiled(run: Any, serves: str, strides: str, devices: set[str]) -> Compiled:
    """Locate the files of the code that inductor has just loaded."""
    from dta_compile.torch_compat.compiler import PyCodeCache

    module = next(known for known in reversed(PyCodeCache.modules) if getattr(known, "key", None) == run.cache_key)
    aligned = tuple(run.inputs_to_check)
    if devices != {"cpu"}:  # the whole module is needed to load Triton's kernels
        if run.constants:
            raise ValueError(f"it reads constants: {', '.join(run.constants)}")
        return Compiled(serves, strides, None, (("call", run.cache_key, str(module.__file__)),), {}, aligned)
    text = pathlib.Path(str(module.__file__)).read_text()
    names = wrapper.kernels(text, "cpp_pybinding")
    text, free = wrapper.needed(text, "call", names)
    free_values = {name: getattr(module, name) for name in free}
    constants = {name: value for name, value in free_values.items() if isinstance(value, torch.Tensor)}
    homes = {name: free_values[name].__self__.__spec__ for name in free if name not in constants}
    kernels = tuple((name, home.name, home.origin) for name, home in homes.items())
    return Compiled(serves, strides, text, kernels, constants, aligned)


def load(compiled: AnyCompiled) -> AnyCode:
    """Load code into this process.

    Raises `OSError` or `ImportError` if its files are gone, `ValueError` if other users may have written them.
    """
    for path in [compiled.path] if isinstance(compiled, CompiledLibrary) else [file for *_, file in compiled.kernels]:
        require_own(pathlib.Path(path))
        require_own(pathlib.Path(path).parent)
    if isinstance(compiled, CompiledLibrary):
        return ctypes.CDLL(compiled.path)
    if compiled.text is None:
        from dta_compile.torch_compat.compiler import PyCodeCache

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
    from dta_compile.torch_compat.compiler import CppPythonBindingsCodeCache

    if not os.path.exists(path):
        raise FileNotFoundError(path)
    key, _, name = module.rpartition(".")
    return getattr(CppPythonBindingsCodeCache._load_library_inner(path, key), name)


def _with_aligned(run: Run, positions: Sequence[int]) -> Run:
    """Wrap `run` so that misaligned tensors at `positions` are copied first."""

    def aligned(arguments: list[Any]) -> Sequence[torch.Tensor]:
        for position in positions:
            if arguments[position].data_ptr() % ALIGNMENT:
                arguments[position] = clone_preserve_strides(arguments[position])
        return run(arguments)

    return aligned


def folder() -> pathlib.Path:
    """Return inductor's cache folder."""
    from dta_compile.torch_compat.inductor import cache_dir

    return pathlib.Path(cache_dir())


def settings() -> dict[str, Any]:
    """Return inductor's settings for another process, without the number of compile processes."""
    from dta_compile.torch_compat.inductor import config

    items = config.get_config_copy().items()
    return {name: value for name, value in items if name != "compile_threads" and _can_be_sent(value)}


def apply(chosen: dict[str, Any]) -> None:
    """Apply inductor's settings of another process."""
    from dta_compile.torch_compat.inductor import config

    here = config.get_config_copy()
    config.load_config(pickle.dumps({name: x for name, x in chosen.items() if name in here and here[name] != x}))


@functools.cache
def generator() -> str:
    """Return a hash of the modules that generate and load code."""
    files = (pathlib.Path(str(file)) for file in (__file__, wrapper.__file__))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def environment(devices: Iterable[str]) -> tuple[Any, ...]:
    """Return everything that code for these device types depends on besides its source."""
    from dta_compile.torch_compat.inductor import config

    parts: list[Any] = [torch.__version__, sys.implementation.cache_tag, config.get_hash()]
    if "cpu" in devices:
        parts += [torch.get_num_threads(), platform.machine(), _cpu_flags()]
    if "cuda" in devices:
        parts += [torch.version.cuda, torch.version.hip]
        parts += [torch.cuda.get_device_name(), torch.cuda.get_device_capability()]
    return tuple(parts)


def is_cached() -> bool:
    """Return whether inductor's settings allow code that earlier processes left on disk."""
    from dta_compile.torch_compat.inductor import config

    return config.fx_graph_cache and not config.force_disable_caches


def why_no_compiler(devices: Iterable[str]) -> str | None:
    """Return why there is no C++ compiler for these device types; None if there is one or they need none."""
    from dta_compile.torch_compat.inductor import config

    if "cpu" not in devices:
        return None
    chosen = config.cpp.cxx
    names = [name for name in (chosen if isinstance(chosen, (tuple, list)) else [chosen]) if name]
    if any(map(shutil.which, names)) or os.environ.get("TORCH_INDUCTOR_INSTALL_GXX"):
        return None
    return (
        f"No working C++ compiler ({', '.join(names) or 'none is named'}): install one, as by `apt install g++` or"
        " `conda install cxx-compiler`, or name it in $CXX"
    )


def _can_be_sent(value: Any) -> bool:
    try:
        pickle.dumps(value)
    except (pickle.PicklingError, TypeError, AttributeError):
        return False
    return True


def _cpu_flags() -> str:
    """Return the CPU's instruction set extensions: generated code uses all of them."""
    try:
        match = re.search(r"^(flags|Features)\s*:(.*)$", pathlib.Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        match = None
    return match[2] if match else f"{platform.processor()} {torch.backends.cpu.get_cpu_capability()}"


def _like(env: ShapeEnv, value: Input, known: dict[sympy.Symbol, sympy.Expr]) -> torch.Tensor:
    """Return a fake tensor with the shape and strides of `value`, its symbols replaced by `known`."""

    def renamed(size: int | sympy.Expr) -> Any:
        if isinstance(size, int):
            return size
        renamed_size = size.subs(known)
        hints = {symbol: TYPICAL_SIZES[index] for index, symbol in enumerate(known.values())}
        return env.create_symintnode(renamed_size, hint=int(renamed_size.subs(hints)))

    shape, strides = map(renamed, value.shape), map(renamed, value.strides)
    return torch.empty_strided(tuple(shape), tuple(strides), dtype=value.dtype, device=value.device)


def _decomposed(source: Source, arguments: list[Any]) -> fx.GraphModule:
    """Trace a source with inductor's decompositions; results keep their strides, which later operators rely on."""
    from dta_compile.torch_compat.compiler import select_decomp_table

    module = make_fx(source.function(), decomposition_table=select_decomp_table())(*arguments)
    module.graph.eliminate_dead_code()
    output = next(iter(reversed(module.graph.nodes)))
    _write_views(output)
    module.recompile()
    output.meta["user_visible_output_idxs"] = list(range(len(output.args[0])))
    return module


def _write_views(output: fx.Node) -> None:
    """Copy outputs that are views of temporaries.

    Inductor fuses the copy into the kernel that writes the value; a view in the wrapper costs as much host time as an
    allocation.
    """
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
