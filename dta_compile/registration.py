"""Register names of the package: `backend="dta"` with torch.compile, `attn_implementation="dta"` with transformers.

torch finds an installed package through its entry point. A source tree has none on disk, so importing the package
offers the same entry point in memory; torch reads it when it first lists backends. transformers, PEFT and TRL read no
entry points: our modules in `integrations` register with them once they are imported. Nothing here imports any of them.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import os
import sys
import types
from collections.abc import Callable, Iterable
from typing import Any

GROUP, NAME, VALUE = "torch_dynamo_backends", "dta", "dta_compile.backend:dta"
REGISTRY = "torch._dynamo.backends.registry"
# By module of another package, the modules of `integrations` that register with it when they are imported.
STAND_INS = {
    "transformers.modeling_utils": (
        "transformers_attention",
        "transformers_flash_attention",
        "transformers_experts",
        "transformers_outputs",
    ),
    "transformers.models.longcat_flash.modeling_longcat_flash": ("transformers_expert_loops",),
    "transformers.models.step3p7.modeling_step3p7": ("transformers_expert_loops",),
    "peft.tuners.lora.layer": ("peft_experts",),
    "trl.trainer.utils": ("trl_head",),
}


class _SourceTree(importlib.metadata.Distribution):
    """The package as a distribution that exists in memory only."""

    def read_text(self, filename: str) -> str | None:
        """Contents of a metadata file."""
        files = {
            "METADATA": "Metadata-Version: 2.1\nName: dta-compile\nVersion: 0.1.0\n",
            "entry_points.txt": f"[{GROUP}]\n{NAME} = {VALUE}\n",
        }
        return files.get(filename)

    def locate_file(self, path: str | os.PathLike[str]) -> Any:
        """Path that a file of the distribution would have."""
        return os.path.join(os.path.dirname(os.path.dirname(__file__)), path)


class _Finder:
    """A metadata finder at the end of the import path: installed distributions come first and hide this one."""

    def find_spec(self, *args: Any, **kwargs: Any) -> None:
        """Return None: there are no modules to find."""

    def find_distributions(self, context: Any) -> Iterable[importlib.metadata.Distribution]:
        """Return the source tree's distribution, unless the context names another one."""
        return [_SourceTree()] if getattr(context, "name", None) in (None, "dta-compile", "dta_compile") else []


class _AfterLoading:
    """Meta path finder that finds nothing itself, but runs callbacks after the modules they wait for are loaded."""

    def __init__(self) -> None:
        self.waiting: dict[str, list[Callable[[types.ModuleType], None]]] = {}
        self.watching: list[tuple[tuple[str, ...], Callable[[types.ModuleType], None]]] = []
        self.searching = False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Return a watched module's spec, with a loader that also runs the callbacks; None for all other modules."""
        watched = any(name.startswith(starts) for starts, _ in self.watching)
        if self.searching or not (watched or name in self.waiting):
            return None
        self.searching = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self.searching = False
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_call(module: types.ModuleType) -> None:
                load(module)
                for call in self.waiting.pop(name, ()):
                    call(module)
                for starts, watch in self.watching:
                    if name.startswith(starts):
                        watch(module)

            spec.loader.exec_module = load_and_call  # type: ignore[method-assign]
        return spec


def register() -> None:
    """Register all names, also if torch has already listed its backends or transformers is loaded. Idempotent."""
    _register_backend()
    if REGISTRY in sys.modules:
        _take_twice(sys.modules[REGISTRY])
    else:
        when_loaded(REGISTRY, _take_twice)
    for package, modules in STAND_INS.items():
        load = functools.partial(_load, modules)
        if package in sys.modules:
            load()
        else:
            when_loaded(package, load)


def _load(modules: Iterable[str], _: types.ModuleType | None = None) -> None:
    for name in modules:
        importlib.import_module(f"dta_compile.integrations.{name}")


def when_loaded(name: str, call: Callable[[types.ModuleType], None]) -> None:
    """Call a function with a module that is not imported yet, as soon as it is."""
    _after_loading().waiting.setdefault(name, []).append(call)


def when_any_loaded(starts: tuple[str, ...], call: Callable[[types.ModuleType], None]) -> None:
    """Call a function with every module whose name has one of these prefixes, as soon as it is imported."""
    _after_loading().watching.append((starts, call))


def _after_loading() -> Any:
    finder = _on_path(_AfterLoading)
    if finder is None:
        finder = _AfterLoading()
        sys.meta_path.insert(0, finder)
    return finder


def _on_path(kind: type) -> Any | None:
    """Return the installed finder of a class, compared by name: reloading this module makes another class."""
    names = __name__, kind.__name__
    return next((finder for finder in sys.meta_path if (type(finder).__module__, type(finder).__name__) == names), None)


def _register_backend() -> None:
    if _on_path(_Finder) is None:
        if _is_installed():
            return
        sys.meta_path.append(_Finder())
    registry = sys.modules.get(REGISTRY)
    if registry is not None:
        registry._BACKENDS.setdefault(NAME, importlib.metadata.EntryPoint(NAME, VALUE, GROUP))


def _take_twice(registry: Any) -> None:
    """Let threads load the backend at the same time: torch would raise an error for the second registration."""
    register = registry.register_backend
    if hasattr(register, "__wrapped__"):
        return

    @functools.wraps(register)
    def register_backend(compiler_fn: Any = None, name: str | None = None, tags: Iterable[str] = ()) -> Any:
        if name != NAME or compiler_fn is None:
            return register(compiler_fn, name, tags)
        compiler_fn._tags = tuple(tags)
        return registry._COMPILER_FNS.setdefault(NAME, compiler_fn)

    registry.register_backend = register_backend


def _is_installed() -> bool:
    try:
        importlib.metadata.distribution("dta-compile")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
