"""kept: generated code on disk, found by what it was generated from without asking inductor.

Inductor's own look-up traces and lowers a function before it knows its name there, which takes seconds for a model.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import pathlib
import pickle
from collections.abc import Iterable

from dta_compile.codegen.inductor import AnyCompiled, environment, folder, generator, load
from dta_compile.executable.code import AnySource
from dta_compile.executable.pieces import AnyCode
from dta_compile.files import own_folder, read_own, write_whole

logger = logging.getLogger("dta_compile")


def keys(sources: Iterable[AnySource]) -> list[str]:
    """The names of files for the code of these sources, generated in this process or for it."""
    around = functools.cache(environment)  # the same for all
    texts = (f"{generator()} {one!r} {around(frozenset(one.devices))!r}" for one in sources)
    return [hashlib.sha256(text.encode()).hexdigest()[:32] for text in texts]


def place() -> pathlib.Path:
    """The folder for code, in inductor's; raises `ValueError` where others could put code there or into inductor's."""
    return own_folder(folder() / "dta")


def find(key: str) -> AnyCode | None:
    """The code that is kept under a name, loaded; None: there is none, or its files are gone."""
    try:
        return load(pickle.loads(read_own(place() / key)))
    except FileNotFoundError:
        return None
    except Exception as error:  # of another release, half of a file, or what it names: generated again
        logger.info("dta: generated code that was kept is not used: %s: %s", type(error).__name__, error)
        return None


def keep(key: str, compiled: AnyCompiled) -> None:
    """Keep code for other processes; raises `OSError` or `ValueError`."""
    write_whole(place() / key, pickle.dumps(compiled))
