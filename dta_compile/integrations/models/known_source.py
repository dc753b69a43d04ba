"""Tell whether functions that a module here replaces are those that it was written for."""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import textwrap
import types
from collections.abc import Iterable
from typing import Any


def is_known(module: types.ModuleType, names: Iterable[str], known: str) -> bool:
    """Return whether the source of all named functions, without comments, docstrings and layout, has a known hash."""
    try:
        texts = [_text(functools.reduce(getattr, name.split("."), module)) for name in names]
    except (AttributeError, OSError):  # a function, or its source, is missing
        return False
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16] == known


def _text(function: Any) -> str:
    tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function)))).body[0]
    assert isinstance(tree, ast.FunctionDef)
    tree.decorator_list = []
    if ast.get_docstring(tree) is not None:
        del tree.body[0]
    return ast.unparse(tree)
