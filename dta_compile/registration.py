"""Register names of the package: `backend="dta"` with torch.compile, `attn_implementation="dta"` with transformers.

torch finds an installed package through its entry point. A source tree has none on disk, so importing the package
offers the same entry point to torch's registry of backends. transformers, PEFT and TRL read no
entry points: our modules in `integrations` register with them once they are imported. Nothing here imports any of them.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import sys
import types
from collections.abc import Callable, Iterable
from typing import Any

from dta_compile.attributes import attribute_set

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
    "transformers.models.deepseek_v4.modeling_deepseek_v4": ("models.deepseek_v4",),
    "transformers.models.longcat_flash.modeling_longcat_flash": ("models.expert_loops",),
    "transformers.models.qwen4_exp.modeling_qwen4_exp": ("models.qwen4_exp",),
    "transformers.models.step3p7.modeling_step3p7": ("models.expert_loops",),
    "peft.tuners.lora.layer": ("peft_experts",),
    "trl.trainer.utils": ("trl_head",),
}


class _AfterLoading:
    """Meta path finder that finds nothing itself, but runs callbacks after the modules they wait for are loaded."""

    def __init__(self) -> None:
        self.calls: list[tuple[Callable[[str], bool], Callable[[types.ModuleType], None]]] = []
        self.searching = False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Return a watched module's spec, with a loader that also runs the callbacks; None for all other modules."""
        if self.searching or not any(waits_for(name) for waits_for, _ in self.calls):
            return None
        with attribute_set(self, "searching", True):
            spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_call(module: types.ModuleType) -> None:
                load(module)
                for waits_for, call in self.calls:
                    if waits_for(name):
                        call(module)

            spec.loader.exec_module = load_and_call  # type: ignore[method-assign]
        return spec


def register() -> None:
    """Register all names, also if torch has already listed its backends or transformers is loaded. Idempotent."""
    calls: dict[str, Callable[[types.ModuleType], None]] = {REGISTRY: _offer_backend}
    calls |= {name: functools.partial(_load, modules) for name, modules in STAND_INS.items()}
    for name, call in calls.items():
        when_loaded(name, call)


def _load(modules: Iterable[str], _: types.ModuleType) -> None:
    for name in modules:
        importlib.import_module(f"dta_compile.integrations.{name}")


def when_loaded(name: str, call: Callable[[types.ModuleType], None]) -> None:
    """Call a function with a module, now or as soon as it is imported."""
    if name in sys.modules:
        call(sys.modules[name])
    else:
        _after_loading().calls.append((name.__eq__, call))


def when_any_loaded(starts: tuple[str, ...], call: Callable[[types.ModuleType], None]) -> None:
    """Call a function with every module whose name has one of these prefixes, as soon as it is imported."""
    _after_loading().calls.append((lambda name: name.startswith(starts), call))


def _after_loading() -> Any:
    """Return the finder on the path, compared by the name of its class: reloading this module makes another class."""
    kind = str(_AfterLoading)
    finder = next((finder for finder in sys.meta_path if str(type(finder)) == kind), None)
    if finder is None:
        finder = _AfterLoading()
        sys.meta_path.insert(0, finder)
    return finder


def _offer_backend(registry: Any) -> None:
    """Offer the entry point to torch, and let threads load the backend at the same time, which would be an error."""
    registry._BACKENDS.setdefault(NAME, importlib.metadata.EntryPoint(NAME, VALUE, GROUP))
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
