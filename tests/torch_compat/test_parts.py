"""A torch that lacks a private part: a typed error that names it, or the reason why something is left out."""

from __future__ import annotations

import ast
import importlib
import pathlib
import runpy
import sys
import types
from typing import Any

import pytest

from dta_compile import torch_compat
from dta_compile.errors import MissingTorchPartError
from dta_compile.torch_compat import regions, wrap_once

FILES = sorted(path for path in pathlib.Path(torch_compat.__file__).parent.glob("*.py") if path.stem != "__init__")


def parts(path: pathlib.Path) -> list[tuple[str, str]]:
    """Module and name of each part of torch that a file imports."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            found += [(str(node.module), alias.name) for alias in node.names]
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_each_part_in_turn(path, monkeypatch):
    if path.stem == "regions" and regions.WHY_NONE:
        pytest.skip(regions.WHY_NONE)
    for module, name in parts(path):
        owner: Any = importlib.import_module(module)
        with monkeypatch.context() as patch:
            if hasattr(owner, "__path__") and isinstance(getattr(owner, name), types.ModuleType):
                patch.setitem(sys.modules, f"{module}.{name}", None)
            else:
                patch.delitem(sys.modules, f"{module}.{name}", raising=False)
            patch.delattr(owner, name)
            if path.stem == "regions":
                assert name in runpy.run_path(str(path))["WHY_NONE"]
            else:
                with pytest.raises(MissingTorchPartError, match=name):
                    runpy.run_path(str(path))


def test_guards_and_variables_that_are_read_by_name(monkeypatch):
    from torch._dynamo import eval_frame
    from torch._dynamo.guards import GuardBuilder

    by_stem = {path.stem: str(path) for path in FILES}
    with monkeypatch.context() as patch:
        patch.delattr(GuardBuilder, "DUPLICATE_INPUT")
        assert regions.WHY_NONE or "DUPLICATE_INPUT" in runpy.run_path(by_stem["regions"])["WHY_NONE"]
    monkeypatch.setattr(eval_frame._TorchDynamoContext, "__call__", lambda self, fn: fn)
    with pytest.raises(MissingTorchPartError, match="cleanups"):
        runpy.run_path(by_stem["frames"])


def test_all_that_is_missing_is_in_one_error(monkeypatch):
    def missing(name: str) -> None:
        with torch_compat.needed_for(f"the use of {name}"):
            raise ImportError(f"cannot import {name}")

    monkeypatch.setattr(torch_compat.importlib, "import_module", missing)
    with pytest.raises(MissingTorchPartError) as caught:
        torch_compat._probe()
    assert all(f"import dta_compile.torch_compat.{name}" in caught.value.got for name in torch_compat.MODULES)


def test_wrappers_are_put_around_once():
    class Owner:
        def method(self) -> int:
            return 1

    def one_more(method: Any) -> Any:
        return lambda self: method(self) + 1

    def twice(method: Any) -> Any:
        return lambda self: method(self) * 2

    for wrapper in (one_more, twice, one_more):
        wrap_once(Owner, "method", wrapper)
    assert Owner().method() == 4
    assert Owner.method.__name__ == "method"
    with pytest.raises(MissingTorchPartError, match="Owner has no other"):
        wrap_once(Owner, "other", twice)
