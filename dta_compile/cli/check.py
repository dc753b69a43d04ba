"""The command `dta check`: what sharing a trainer's batching leaves of a dump of rollouts, and which settings keep it.

The batches of transformers' `Trainer`, TRL's `SFTTrainer` (also packed), `DPOTrainer` and `GRPOTrainer`, and verl's
actor are made as these make them, from the names and defaults of their own settings. Random orders are drawn with a
fixed seed, and verl's divisions by length are approximated (longest first, to whoever has least).
"""

from __future__ import annotations

import argparse
import bisect
import dataclasses
import heapq
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from dta_compile.cli.arguments import add_source, read_options, read_source, refuse_unused, visible, whole, write
from dta_compile.cli.estimate_command import verdict
from dta_compile.data import Recorded
from dta_compile.data.file_formats import optional
from dta_compile.data.tokenizer import from_json
from dta_compile.errors import OptionError
from dta_compile.estimate.devices import DEVICES, device_named
from dta_compile.estimate.predict import OPTIMIZERS, SHARDS, Ranks, estimate, model_shape, tree_of
from dta_compile.files import read_text
from dta_compile.options import Options
from dta_compile.plan import balance
from dta_compile.rollouts import PrefixSampler

MOST_BYTES = 2**24  # of a file of settings
MOST_RANKS = 2**16
GAIN = 1.02  # settings that save less are not worth a word
AS_JSON = {"True": "true", "False": "false", "None": "null"}  # as Python and Hydra write them
Step = list[list[list[int]]]  # rows of each micro-batch of each rank
OF_TRANSFORMERS = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}
OF_LOADERS = {**OF_TRANSFORMERS, "train_sampling_strategy": "random", "group_rows": False, "max_length": None}
GROUPING = "callbacks=[DTACallback(group_rows=True)]"
PACKED_LENGTH = 1024  # TRL's `max_length`
# By trainer, settings that tell it from others, and its defaults.
TRAINERS: dict[str, tuple[set[str], dict[str, Any]]] = {
    "verl": (
        {"ppo_mini_batch_size", "rollout.n", "n_gpus_per_node", "balance_batch"},
        {"actor.ppo_mini_batch_size": 256, "rollout.n": 1, "data.train_batch_size": 1024, "actor.strategy": "fsdp"}
        | {"actor.use_dynamic_bsz": False, "actor.ppo_micro_batch_size_per_gpu": 1, "trainer.balance_batch": True}
        | {"actor.ppo_max_token_len_per_gpu": 16384, "actor.shuffle": False}
        | {"trainer.n_gpus_per_node": 1, "trainer.nnodes": 1},
    ),
    "grpo": (
        {"num_generations", "steps_per_generation", "generation_batch_size"},
        {**OF_TRANSFORMERS, "steps_per_generation": None, "generation_batch_size": None},
    ),
    "dpo": ({"precompute_ref_log_probs", "f_divergence_type", "ld_alpha", "discopop_tau", "use_weighting"}, OF_LOADERS),
    "trainer": (set(), {**OF_LOADERS, "packing": False}),
}
CHOICES = {"train_sampling_strategy": ("random", "sequential"), "actor.strategy": ("fsdp", "fsdp2", "dta")}


class Settings:
    """Settings of a trainer by dotted name; those that are not given, or refer to others, have its defaults."""

    def __init__(self, given: Mapping[str, Any], trainer: str | None) -> None:
        self.given = {name: value for name, value in given.items() if value is not None and "${" not in str(value)}
        tells = (name for name, (keys, _) in TRAINERS.items() if any(map(self._names, keys)) or not keys)
        self.trainer = trainer or next(tells)

    def _names(self, name: str) -> list[str]:
        return [given for given in self.given if _is(given, name)]

    def require_known(self, names: Sequence[str], enough: int) -> None:
        """Raise unless so many of these names are of settings that divide batches."""
        keys, defaults = TRAINERS[self.trainer]
        unknown = [given for given in names if not any(_is(given, name) for name in (*keys, *defaults))]
        if len(names) - len(unknown) < enough:
            raise OptionError(
                f"no setting of {self.trainer} that divides batches",
                expected=", ".join(sorted({*keys, *defaults})),
                got=", ".join(unknown[:5]),
                hint="name the trainer, whose defaults are then used: --trainer " + ", ".join(TRAINERS),
            )

    def __getitem__(self, name: str) -> Any:
        default, names = TRAINERS[self.trainer][1][name], self._names(name)
        value = self.given[names[-1]] if names else default
        if name in CHOICES:
            is_right, expected = value in CHOICES[name], ", ".join(CHOICES[name])
        elif isinstance(default, bool):
            is_right, expected = isinstance(value, bool), "true or false"
        else:
            is_right, expected = value is default or (type(value) is int and value >= 1), "1 or more"
        if not is_right:
            raise OptionError("bad setting of a trainer", where=name, expected=expected, got=repr(value))
        return value

    def steps_per_generation(self, ranks: int) -> int:
        """Return the micro-batches of a rank that GRPO generates at once."""
        of_ranks = self["per_device_train_batch_size"] * ranks
        accumulated: int = self["gradient_accumulation_steps"]
        return self["steps_per_generation"] or (self["generation_batch_size"] or 0) // of_ranks or accumulated

    def changed(self, changes: Mapping[str, Any]) -> Settings:
        """Return the settings with some of them changed."""
        dropped = {given for name in changes for given in self._names(name)}
        kept = {name: value for name, value in self.given.items() if name not in dropped}
        return Settings({**kept, **changes}, self.trainer)


def _is(given: str, name: str) -> bool:
    return f".{given}".endswith(f".{name}") or f".{name}".endswith(f".{given}")


def steps_of(settings: Settings, sequences: Sequence[Recorded], ranks: int) -> list[Step]:
    """Divide a dump into optimiser steps, ranks and micro-batches as a trainer does."""
    if settings.trainer == "verl":
        return _steps_of_verl(settings, sequences, ranks)
    if settings.trainer != "grpo":
        return _steps_of_loader(settings, sequences, ranks)
    rows, random = list(range(len(sequences))), np.random.default_rng(0)
    size, accumulated = settings["per_device_train_batch_size"], settings["gradient_accumulation_steps"]
    generated = _cut(rows, size * settings.steps_per_generation(ranks))  # by a rank, then shuffled
    of_ranks = _cut([_cut(_cut(random.permutation(part).tolist(), size), accumulated) for part in generated], ranks)
    return [step for parts in of_ranks for step in _by_step(parts)]


def _steps_of_loader(settings: Settings, sequences: Sequence[Recorded], ranks: int) -> list[Step]:
    size, accumulated = settings["per_device_train_batch_size"], settings["gradient_accumulation_steps"]
    items = _cut(range(len(sequences)), 2 if settings.trainer == "dpo" else 1)  # rows that are never apart
    if settings.trainer == "trainer" and settings["packing"]:
        items = _packed(list(map(len, sequences)), settings["max_length"] or PACKED_LENGTH)
    order: Iterable[int] = range(len(items))
    if settings["group_rows"]:
        firsts = [sequences[item[0]].tokens for item in items]
        order = PrefixSampler(firsts, size * accumulated * ranks, size, ranks)
    elif settings["train_sampling_strategy"] != "sequential":
        order = np.random.default_rng(0).permutation(len(items)).tolist()
    batches = [[row for item in batch for row in items[item]] for batch in _cut(list(order), size)]
    steps = _cut(batches, ranks * accumulated)
    return [[step[rank::ranks] for rank in range(min(ranks, len(step)))] for step in steps]


def _packed(lengths: Sequence[int], most: int) -> list[list[int]]:
    """Fill rows of `most` tokens with sequences, longest first, each where least room is left (best fit decreasing)."""
    filled: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # ascending, with the number of the row
    for row in sorted((row for row in range(len(lengths)) if lengths[row]), key=lambda row: -lengths[row]):
        place = bisect.bisect_left(rooms, (lengths[row], 0))
        room, number = rooms.pop(place) if place < len(rooms) else (most, len(filled))
        if number == len(filled):
            filled.append([])
        filled[number].append(row)
        bisect.insort(rooms, (room - lengths[row], number))
    return filled


def _as_cut(settings: Settings, sequences: Sequence[Recorded]) -> Sequence[Recorded]:
    """Return the sequences as TRL cuts them before it makes batches."""
    if settings.trainer not in ("dpo", "trainer"):
        return sequences
    if settings.trainer == "dpo" and len(sequences) % 2:
        expected = "rows in pairs, a chosen one and the rejected one after it"
        raise OptionError("a row without the other one of its pair", expected=expected, got=f"{len(sequences)} rows")
    is_packed = settings.trainer == "trainer" and settings["packing"]
    most = settings["max_length"] or (PACKED_LENGTH if is_packed else None)
    if most is None or max(map(len, sequences)) <= most:
        return sequences
    return [
        dataclasses.replace(
            one,
            tokens=one.tokens[:most],
            routes=None if one.routes is None else one.routes[:most],
            # What is left of an image that is cut is still not what another image has there.
            images=[(start, min(stop, most), image) for start, stop, image in one.images if start < most],
        )
        for one in sequences
    ]


def _steps_of_verl(settings: Settings, sequences: Sequence[Recorded], ranks: int) -> list[Step]:
    lengths, random, answers = list(map(len, sequences)), np.random.default_rng(0), settings["rollout.n"]
    size, steps = -(-settings["actor.ppo_mini_batch_size"] * answers // ranks), []
    for batch in _cut(range(len(sequences)), settings["data.train_batch_size"] * answers):
        share = -(-len(batch) // ranks)
        of_ranks = _lightest(batch, lengths, ranks, share) if settings["trainer.balance_batch"] else _cut(batch, share)
        if settings["actor.shuffle"]:
            of_ranks = [random.permutation(part).tolist() for part in of_ranks]
        steps += _by_step([_cut(part, size) for part in of_ranks])
    if settings["actor.strategy"] == "dta":
        return [[[part] for part in _dealt(step, sequences)] for step in steps]
    if settings["actor.use_dynamic_bsz"]:
        return [[_dynamic(part, lengths, settings["actor.ppo_max_token_len_per_gpu"]) for part in s] for s in steps]
    return [[_cut(part, settings["actor.ppo_micro_batch_size_per_gpu"]) for part in step] for step in steps]


def _dealt(parts: list[list[int]], sequences: Sequence[Recorded]) -> list[list[int]]:
    rows = [row for part in parts for row in part]
    return [[rows[i] for i in group] for group in balance([sequences[row].tokens for row in rows], len(parts))]


def _dynamic(rows: list[int], lengths: Sequence[int], most: int) -> list[list[int]]:
    count = -(-sum(lengths[row] for row in rows) // most)
    return _lightest(rows, lengths, min(max(count, 1), len(rows)), len(rows))


def _lightest(rows: Sequence[int], lengths: Sequence[int], count: int, most: int) -> list[list[int]]:
    """Divide rows into groups of similar lengths in all, of at most `most` rows each."""
    groups: list[list[int]] = [[] for _ in range(count)]
    unfilled = [(0, number) for number in range(count)]  # a heap of lengths in all
    for row in sorted(rows, key=lambda row: -lengths[row]):
        load, number = heapq.heappop(unfilled)
        groups[number].append(row)
        if len(groups[number]) < most:
            heapq.heappush(unfilled, (load + lengths[row], number))
    return [sorted(group) for group in groups if group]


def _cut(rows: Sequence[Any], size: int) -> list[Any]:
    return [list(rows[first : first + size]) for first in range(0, len(rows), size)]


def _by_step(of_ranks: list[list[Any]]) -> list[list[Any]]:
    return [[part[i] for part in of_ranks if i < len(part)] for i in range(max(map(len, of_ranks)))]


def improvements(settings: Settings, sequences: Sequence[Recorded], ranks: int) -> Iterator[tuple[str, Settings]]:
    """Yield settings after the given ones, each with one more change that joins what the batching divides."""
    if settings.trainer == "verl":
        for name, value in (("actor.strategy", "dta"), ("actor.shuffle", False)):
            if settings[name] != value:
                settings = settings.changed({name: value})
                yield f"{name}={value}", settings
        return
    rows, accumulated = settings["per_device_train_batch_size"], settings["gradient_accumulation_steps"]
    is_grpo = settings.trainer == "grpo"
    updates = max(settings.steps_per_generation(ranks) // accumulated, 1) if is_grpo else 1
    if accumulated > 1:
        joined = {"per_device_train_batch_size": rows * accumulated, "gradient_accumulation_steps": 1}
        settings = settings.changed({**joined, "steps_per_generation": updates} if is_grpo else joined)
        yield "args=DTACallback.whole_steps(args)", settings
    if not is_grpo and not settings["group_rows"]:
        changes: dict[str, Any] = {}
        if settings["train_sampling_strategy"] != "random":
            changes["train_sampling_strategy"] = "random"
        if settings.trainer == "trainer" and settings["packing"]:  # padding costs nothing over a tree
            packed = len(_packed(list(map(len, sequences)), settings["max_length"] or PACKED_LENGTH))
            per_row = len(sequences) / packed
            changes["packing"] = False
            changes["per_device_train_batch_size"] = round(settings["per_device_train_batch_size"] * per_row)
        title = ", ".join([*(f"{name}={value}" for name, value in changes.items()), GROUPING])
        yield title, settings.changed({**changes, "group_rows": True})
    if updates > 1:
        joined = {"per_device_train_batch_size": rows * accumulated * updates, "steps_per_generation": 1}
        yield f"one update a generation ({json.dumps(joined)})", settings.changed(joined)


class Variant(NamedTuple):
    """Settings in words, and what becomes of a dump by them.

    Attributes:
        calls: micro-batches of a rank and step, on average.
        tokens: tokens that are run, of all ranks.
        fullest: tokens that the rank with most of them runs, summed over steps.
    """

    title: str
    steps: list[Step]
    calls: float
    tokens: int
    fullest: int

    @classmethod
    def of(cls, title: str, settings: Settings, sequences: Sequence[Recorded], ranks: int) -> Variant:
        steps = steps_of(settings, sequences, ranks)
        trees = [[[tree_of([sequences[row] for row in call]).num_rows for call in part] for part in s] for s in steps]
        sizes = [list(map(sum, step)) for step in trees]
        calls = sum(len(part) for step in trees for part in step) / sum(map(len, trees))
        return cls(title, steps, calls, sum(map(sum, sizes)), sum(map(max, sizes)))


def add_check(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `dta check`."""
    parser.set_defaults(run=_run, parser=parser)
    parser.description = (
        "What a trainer's batching leaves of the sharing in FILE, what to set so that more is left, and (with --config)"
        " what a step then takes."
    )
    parser.epilog = (
        "Example: dta check rollouts.npz actor.ppo_mini_batch_size=64 rollout.n=8 trainer.n_gpus_per_node=8; "
        "dta check rollouts.npz grpo_config.yaml --ranks 4 --config config.json"
    )
    add_source(parser)
    text = "by the trainer's own names: KEY=VALUE, or a YAML or JSON file of its arguments"
    parser.add_argument("settings", metavar="SETTING", nargs="*", help=text)
    parser.add_argument("--trainer", choices=TRAINERS, help="default: told by the settings")
    parser.add_argument("--ranks", type=whole(1, MOST_RANKS), help="that train (default: verl's GPUs, or 1)")
    parser.add_argument("--config", help="config.json of the model, for time and memory of a step")
    parser.add_argument("--device", default="h100", help=f"for --config: {', '.join(DEVICES)} (default: %(default)s)")
    parser.add_argument("--shard", choices=SHARDS, default=SHARDS[0], help="for --config (default: %(default)s)")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="none", help="for --config: in the memory too")
    parser.add_argument("--json", metavar="OUT", help="write it as JSON to OUT (- for stdout) and print nothing")


def _run(arguments: argparse.Namespace) -> int:
    refuse_unused(arguments, dict.fromkeys(("device", "shard", "optimizer"), "config"), {})
    settings = Settings(_given(arguments.settings), arguments.trainer)
    words = [_name(word) for word in arguments.settings if "=" in word]
    settings.require_known(words, len(words))
    if settings.given and arguments.trainer is None:
        settings.require_known(list(settings.given), 1)
    sequences = read_source(arguments.file, read_options(arguments)).sequences
    if not any(map(len, sequences)):
        raise OptionError("no sequences to check", where=arguments.file)
    sequences = list(_as_cut(settings, sequences))
    gpus = settings["trainer.n_gpus_per_node"] * settings["trainer.nnodes"] if settings.trainer == "verl" else 1
    ranks = arguments.ranks or gpus
    if ranks > MOST_RANKS:
        raise OptionError("bad setting of a trainer", where="GPUs", expected=f"at most {MOST_RANKS}", got=str(ranks))
    variants = [Variant.of("as set", settings, sequences, ranks)]
    for title, changed in improvements(settings, sequences, ranks):
        better = Variant.of(f"set {title}", changed, sequences, ranks)
        if variants[-1].tokens > GAIN * better.tokens:
            variants.append(better)
    tokens, together = sum(map(len, sequences)), tree_of(sequences).num_rows
    if arguments.json:
        rows = [{**x._asdict(), "steps": len(x.steps), "compression": tokens / x.tokens} for x in variants]
        figures = {"trainer": settings.trainer, "ranks": ranks, "tokens": tokens, "together": together}
        write(arguments.json, json.dumps({**figures, "variants": rows}, indent=1) + "\n")
        return 0
    size = f"{len(sequences):,} sequences, {tokens:,} tokens, {together:,} in one tree (C {tokens / together:.2f})"
    print(f"{settings.trainer} on {ranks} rank{'s' * (ranks > 1)}: {size}")
    for variant in variants:
        size = f"{len(variant.steps):,} steps of {variant.calls:.1f} calls a rank, {variant.tokens:,} tokens to run"
        share = f"C {tokens / variant.tokens:.2f}"
        print(f"{visible(variant.title)}: {share}, {size}, {variant.fullest:,} on the fullest rank")
    if len(variants) > 1:
        print(f"together {variants[0].fullest / variants[-1].fullest:.2f}x fewer tokens on the fullest rank")
    else:
        print("nothing that can be set joins more of it")
    if arguments.config:
        print(_cost(variants[-1], sequences, Ranks(ranks, arguments.shard, arguments.optimizer), arguments))
    return 0


def _cost(variant: Variant, sequences: Sequence[Recorded], ranks: Ranks, arguments: argparse.Namespace) -> str:
    """Say what the largest step of a variant takes."""
    of_steps = [[sequences[row] for part in step for call in part for row in call] for step in variant.steps]
    rows, device = max(of_steps, key=lambda rows: sum(map(len, rows))), device_named(arguments.device)
    result = estimate(rows, model_shape(arguments.config), device, Options(), ranks=ranks)
    return f"then the largest step, {len(rows):,} rows: {verdict(result, device)}"


def _given(words: Sequence[str]) -> dict[str, Any]:
    given: dict[str, Any] = {}
    for word in words:
        _, separator, value = word.partition("=")
        given |= {_name(word): from_json(AS_JSON.get(value, value))} if separator else _flat(_parsed(word))
    return given


def _name(word: str) -> str:
    return word.partition("=")[0].lstrip("+")  # Hydra adds what has no default by a plus sign


def _parsed(path: str) -> dict[str, Any]:
    yaml = optional("yaml", "reading settings", "pyyaml")  # JSON is YAML
    try:
        settings = yaml.safe_load(read_text(path, MOST_BYTES))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise OptionError("settings that cannot be read", where=path, got=str(error)[:200]) from error
    if not isinstance(settings, dict):
        expected = "names and values"
        raise OptionError("settings that cannot be read", where=path, expected=expected, got=type(settings).__name__)
    return settings


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """Return the entries of nested settings by dotted name."""
    if not isinstance(value, dict):
        return {prefix.removeprefix("."): value}
    return {name: entry for key in value for name, entry in _flat(value[key], f"{prefix}.{key}").items()}
