"""Makes `backend="dta"` known to torch.compile when the package is used from a source tree that is not installed.

An installed package is found through its entry point. A source tree has none on disk, so importing the package offers
the same entry point in memory; torch reads it when it first looks for backends, and nothing here imports torch.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
from collections.abc import Iterable
from typing import Any

GROUP, NAME, VALUE = "torch_dynamo_backends", "dta", "dta_compile.backend:dta"


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
        """Where a file of the distribution would be."""
        return os.path.join(os.path.dirname(os.path.dirname(__file__)), path)


class _Finder:
    """A metadata finder at the end of the import path: installed distributions come first and hide this one."""

    def find_spec(self, *args: Any, **kwargs: Any) -> None:
        """Finds no modules."""

    def find_distributions(self, context: Any) -> Iterable[importlib.metadata.Distribution]:
        """The source tree's distribution, unless another one is asked for by name."""
        return [_SourceTree()] if getattr(context, "name", None) in (None, "dta-compile", "dta_compile") else []


def register() -> None:
    """Idempotent; also serves a torch that has already looked for its backends."""
    if not any(type(finder).__name__ == "_Finder" and type(finder).__module__ == __name__ for finder in sys.meta_path):
        if _is_installed():
            return
        sys.meta_path.append(_Finder())
    registry = sys.modules.get("torch._dynamo.backends.registry")
    if registry is not None:
        registry._BACKENDS.setdefault(NAME, importlib.metadata.EntryPoint(NAME, VALUE, GROUP))


def _is_installed() -> bool:
    try:
        importlib.metadata.distribution("dta-compile")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
