"""Options of `torch.compile(..., backend="dta", options={...})`: parse and check them once, for all that follows."""

from __future__ import annotations

import dataclasses
import decimal
import difflib
import operator
import os
import pathlib
import re
from collections.abc import Iterable, Mapping
from typing import Any

from dta_compile.errors import OptionError

CHOICES: dict[str, tuple[str, ...]] = {
    "strategy": ("auto", "packed", "dfs", "vanilla", "dense", "one_tree"),
    "order": ("backward_dfs", "lexicographic", "random"),
    "sweep": ("auto", "chunks", "stages"),
    "verify": ("auto", "off", "first", "always"),
    "attention": ("auto", "cpu", "cudnn", "triton", "reference"),
    "fallback": ("raise", "dense"),
    "codegen": ("auto", "eager", "inductor"),
}
# Choices that fit a tree over ranks: all of them have to do alike at every call.
OVER_RANKS: dict[str, tuple[str, ...]] = {
    "strategy": ("auto", "one_tree"),
    "sweep": ("auto", "stages"),
    "verify": ("auto", "off"),
    "fallback": ("raise",),
}
# Former choices, and the hint that names a replacement.
REPLACED = dict.fromkeys(("flash_attn", "varlen"), "attention='auto' takes Triton's kernels on a GPU, which are faster")
CHUNK_TOKENS = 2048
MOST_CHUNK_TOKENS, MOST_BYTES = 2**40, 2**62  # beyond any machine; products still fit in 64 bits
# Bytes by decimal or binary unit, as in "8GB" and "1.5 GiB".
UNITS = {"": 1, "B": 1}
UNITS |= {f"{k}{unit}": base**i for unit, base in (("B", 1000), ("IB", 1024)) for i, k in enumerate("KMGT", 1)}
SKIPPABLE_PASSES = ("head_rows", "lm_head", "codegen", "host_calls", "in_place")


@dataclasses.dataclass(frozen=True)
class Options:
    """Options for planning and running compiled calls.

    Attributes:
        chunk_size: maximum number of tokens of one chunk op; None: 2048 as in the paper (section 3.2), or 4096,
            8192 or 16384 if the cost model says that the step gets 3% faster (a GPU waits less for its host) and the
            activations of such a chunk are at most 0.4 of the default budget; up to 65,536 in a sweep of stages, where
            these are the activations of one layer. They may also be a quarter of the hidden states between layers, and
            where those of 2048 tokens are more, chunks of a small tree have down to 256, a quarter of it at least. A
            `memory_budget` above 0 allows the doubled sizes that fit into its peak.
        strategy: "packed" (chunks filled with whole subtrees and siblings), "dfs" (Algorithms 1 and 3), "vanilla"
            (Algorithm 2), "dense" (no sharing, same runtime), "one_tree" (one tree over the ranks of `mesh`, by
            default all, each of which computes an equal share of its tokens), or "auto": the cheapest of them by the
            cost model.
        order: leaf order of the depth-first walk: "backward_dfs" (Algorithm 1), "lexicographic" or "random".
        sweep: loop order: "chunks" (each chunk of the tree through all layers, depth first: memory for the activations
            of one chunk) or "stages" (each layer over all chunks: memory for the weights, gradient sums, keys and
            values of one layer, and for the hidden states of all tokens between layers), or "auto": by memory and
            cost; with FSDP2 around layers, stages.
        verify: compare outputs and gradients with those of the captured program run densely: "auto" (a few rows and
            columns of the first call, in at most a tenth of its time, and again of the first call with code generated
            in the background), "off", "first" (the whole first call), or "always".
        memory_budget: bytes of activations that may be kept from the forward pass to the backward pass, as a number or
            like "8GB" or "1.5GiB"; None: the default share of the free memory; 0: nothing beyond the minimum of a sweep
            of stages (with sweep="chunks", the paper's depth-bounded memory).
        groups: least number of groups of subtrees that a sweep of stages goes through one after another, which divides
            the hidden states between layers and takes up to one more forward; None: one, or as many as memory demands.
        stride: keep the hidden states of every so many-th layer alone, in a sweep of stages, and compute those in
            between again, which takes up to one more forward; 1: keep all. None: by memory; with
            FSDP2 around layers and a `memory_budget`, also by how much the peak falls for the time that it takes. A
            stride k gathers a layer 3 - 2 / k times a step.
        mesh: ranks that call the model together, each with rows of its own: a process group or a one-dimensional
            `DeviceMesh`. Their rows may then run as one prefix tree, in a sweep of stages: no token is computed on two
            ranks. Parameter gradients of a rank are those of the tokens that it computed, so only their sum (or mean)
            over the ranks has a meaning, as DDP and FSDP2 take it. None: a tree of its own on each rank.
        fallback: how a refused program behaves: "raise" its typed error, or run "dense" with a warning.
        attention: implementation of attention: "cpu" (torch's flash kernels for CPUs), "cudnn" (cuDNN's kernels for
            long prefixes, our own for the rest), "triton" (our own kernels), "reference" (plain math), or "auto": the
            first of them that supports the model.
        cuda_graphs: on a GPU, record small chunks once per size and replay them.
        codegen: implementation of the operators between matrix products and attention: "eager" (ATen, one by one),
            "inductor" (code generated once for all batches, before the first call runs), or "auto": inductor on CUDA,
            and on CPUs unless the first batch is small. "auto" never waits: calls run on ATen while another process
            generates the code; calls that begin after that run the generated code.
        cache_dir: folder (a string or path) for the calibration that "auto" uses and for analysed programs, which save
            other processes the passes; "off": no cache is read or written. None: $DTA_CACHE_DIR, else
            $XDG_CACHE_HOME/dta_compile, else ~/.cache/dta_compile.
        skip_passes: names of compiler passes to leave out, to find the one at fault when results are wrong; only
            optional passes: "head_rows", "lm_head", "codegen", "host_calls", "in_place".
    """

    chunk_size: int | None = None
    strategy: str = "auto"
    order: str = "backward_dfs"
    sweep: str = "auto"
    verify: str = "auto"
    memory_budget: int | None = None
    groups: int | None = None
    stride: int | None = None
    mesh: Any = None
    fallback: str = "raise"
    attention: str = "auto"
    cuda_graphs: bool = True
    codegen: str = "auto"
    cache_dir: str | None = None
    skip_passes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.chunk_size is not None:
            self._set("chunk_size", _integer("chunk_size", self.chunk_size, 1, MOST_CHUNK_TOKENS))
        if self.memory_budget is not None:
            self._set("memory_budget", _bytes("memory_budget", self.memory_budget))
        if self.groups is not None:
            self._set("groups", _integer("groups", self.groups, 1, MOST_CHUNK_TOKENS))
        if self.stride is not None:
            self._set("stride", _integer("stride", self.stride, 1, MOST_CHUNK_TOKENS))
        for key, choices in CHOICES.items():
            _check_choice(key, getattr(self, key), choices)
        self._check_mesh()
        self._set("cuda_graphs", _bool("cuda_graphs", self.cuda_graphs))
        if self.cache_dir is not None:
            self._set("cache_dir", _path("cache_dir", self.cache_dir))
        self._set("skip_passes", _names("skip_passes", self.skip_passes, SKIPPABLE_PASSES))

    def _set(self, key: str, value: object) -> None:
        object.__setattr__(self, key, value)

    @property
    def is_over_ranks(self) -> bool:
        """Whether calls may run one tree over several ranks."""
        return self.mesh is not None or self.strategy == "one_tree"

    def _check_mesh(self) -> None:
        """Raise `OptionError` unless the other options fit one tree over ranks."""
        if not self.is_over_ranks:
            return
        for key, choices in OVER_RANKS.items():
            if (value := getattr(self, key)) not in choices:
                raise OptionError(
                    f"option {key!r} does not fit one tree over ranks",
                    expected=", ".join(map(repr, choices)),
                    got=repr(value),
                )
        for key in ("groups", "stride"):
            if (value := getattr(self, key)) is not None:
                what = "one tree over ranks keeps the hidden states of all its tokens between all layers"
                raise OptionError(what, expected=f"{key}=None", got=repr(value))

    @property
    def chunk_tokens(self) -> int:
        """`chunk_size`, or the default for callers that know of no device."""
        return CHUNK_TOKENS if self.chunk_size is None else self.chunk_size

    @property
    def cache_folder(self) -> pathlib.Path | None:
        """Folder for calibrations and programs (see `cache_dir`); None: no cache."""
        named = self.cache_dir or os.environ.get("DTA_CACHE_DIR")
        if named:
            return None if named == "off" else pathlib.Path(os.path.expanduser(named))
        base = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
        return base / "dta_compile" if base.is_absolute() else None

    @classmethod
    def parse(cls, mapping: Mapping[str, Any] | None) -> Options:
        """Parse a user's dictionary; raise `OptionError` with the bad key and the nearest known one."""
        known = [field.name for field in dataclasses.fields(cls)]
        for key in mapping or {}:
            if key not in known:
                raise OptionError(
                    f"unknown option {key!r}", expected=", ".join(known), got=repr(key), hint=_suggest(str(key), known)
                )
        return cls(**dict(mapping or {}))


def as_integer(value: object) -> int | None:
    """Convert an integer of any kind (numpy, 0-dim array or tensor) to `int`; None for booleans and anything else."""
    if _is_bool(value):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def _is_bool(value: object) -> bool:
    return isinstance(value, bool) or "bool" in str(getattr(value, "dtype", ""))


def _integer(key: str, value: object, least: int, most: int) -> int:
    number = as_integer(value)
    if number is None or not least <= number <= most:
        expected = f"an integer >= {least}" + (f" and <= {most}" if number is not None and number > most else "")
        raise OptionError(f"bad value for option {key!r}", expected=expected, got=repr(value)[:80])
    return number


def as_bytes(text: str) -> int | None:
    """Parse a size such as "8GB", "1.5 GiB" or "4096" to bytes; None for any other text."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip()[:80], re.IGNORECASE | re.ASCII)
    unit = match and UNITS.get(match[2].upper())
    return int(decimal.Decimal(match[1]) * unit) if match and unit else None


def _bytes(key: str, value: object) -> int:
    size = as_bytes(value) if isinstance(value, str) else as_integer(value)
    if size is None or not 0 <= size <= MOST_BYTES:
        expected = f'bytes from 0 to {MOST_BYTES}, as an integer or like "8GB" or "1.5GiB"'
        raise OptionError(f"bad value for option {key!r}", expected=expected, got=repr(value)[:80])
    return size


def _bool(key: str, value: object) -> bool:
    if not _is_bool(value) or getattr(value, "shape", ()) != ():
        raise OptionError(f"bad value for option {key!r}", expected="True or False", got=repr(value))
    return bool(value)


def _path(key: str, value: object) -> str:
    path = os.fspath(value) if isinstance(value, (str, os.PathLike)) else None
    if not isinstance(path, str) or not path or "\0" in path:
        raise OptionError(f"bad value for option {key!r}", expected='a path, "off" or None', got=repr(value))
    return path


def _names(key: str, value: object, known: tuple[str, ...]) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise OptionError(f"bad value for option {key!r}", expected="a list of names", got=repr(value))
    names = tuple(value)
    for name in names:
        _check_choice(key, name, known)
    return names


def _check_choice(key: str, value: object, choices: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in choices:
        raise OptionError(
            f"bad value for option {key!r}",
            expected=", ".join(map(repr, choices)),
            got=repr(value),
            hint=REPLACED.get(str(value)) or _suggest(str(value), list(choices)),
        )


def _suggest(word: str, known: list[str]) -> str:
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.8)  # a typo, not another word of like letters
    near = near or [name for name in known if sorted(name) == sorted(word)]
    return f"did you mean {near[0]!r}?" if near else ""
