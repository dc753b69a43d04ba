"""Packages that only some readers need."""

from __future__ import annotations

import importlib
from typing import Any

from dta_compile.errors import MissingPackageError

__all__ = ["optional"]


def optional(module: str, purpose: str, install: str = "") -> Any:
    """A module of a package that `purpose` needs ("reading parquet files").

    Raises:
        MissingPackageError: it is not installed; says which package to install.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = install or module.split(".")[0]
        raise MissingPackageError(
            f"{purpose} needs the package {package}", got=str(error), hint=f"pip install {package}"
        ) from error
