"""Code cache: generated code on disk, looked up by its source without calling inductor.

Inductor's own cache look-up must trace and lower a function to know its key, which takes seconds for a model.
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
    """Return the cache keys (file names) of these sources, for code that runs in this process."""
    around = functools.cache(environment)  # once per set of device types
    texts = (f"{generator()} {source!r} {around(frozenset(source.devices))!r}" for source in sources)
    return [hashlib.sha256(text.encode()).hexdigest()[:32] for text in texts]


def path() -> pathlib.Path:
    """Return the cache folder, inside inductor's; raise `ValueError` if other users could write to either."""
    return own_folder(folder() / "dta")


def find(key: str) -> AnyCode | None:
    """Load the code with this key; None if there is none or it cannot be loaded."""
    try:
        return load(pickle.loads(read_own(path() / key)))
    except FileNotFoundError:
        return None
    except Exception as error:  # from another release, incomplete, or a file is missing: the code is generated again
        logger.info("dta: generated code that was kept is not used: %s: %s", type(error).__name__, error)
        return None


def store(key: str, compiled: AnyCompiled) -> None:
    """Store code for other processes; raise `OSError` or `ValueError` if that fails."""
    write_whole(path() / key, pickle.dumps(compiled))
