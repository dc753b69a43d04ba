"""Many damaged files and options for the command line: `make fuzz-data N=5000 SEED=7`. N and SEED decide what is drawn.

Every case is refused by a typed error or gives what its file means after the change, by a second and slow reading here.
Tracebacks, cases of more than `SECONDS`, control characters on the terminal and halves of outputs are findings too.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import copy
import io
import itertools
import json
import math
import os
import pathlib
import random
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from dta_compile.cli import main as dta
from dta_compile.cli.check import TRAINERS
from dta_compile.cli.command import UNFORESEEN
from dta_compile.data import ReadOptions, read
from dta_compile.errors import DTAError, ScheduleError
from dta_compile.plan import Schedule, plan
from dta_compile.runtime.measure.calibration import Calibration

SECONDS = 5.0  # for a case
MEMORY = 8 * 2**30  # bytes of addresses, for the command alone
MANY = 1_000_000  # cases between two seeds
BAD = ("wrong", "crashed", "hung")
LIMIT = 2**63
DEEP = "a value in which lists are nested without end"  # cannot be dumped, and so is put into the text
NESTED = "[" * 100_000 + "]" * 100_000

VALUES: tuple[Any, ...] = (
    *(None, True, False, "", "x", "1", "\x1b[31mred\x07", "\ud800", "\0", DEEP),
    *(-1, 0, 1, 2, 7, 1.0, 1.5, -0.5, 2**31, 2**31 - 1, 2**32 + 1, 2**62, 2**63 - 1, 2**63, 2**64, 10**22, 10**400),
    *(math.inf, -math.inf, math.nan, 1e308, 5e-324, [], [[]], {}, [1], [[0, 1]], ["a"], [None], {"a": 1}, [2**70]),
)
OPTIONS = ("--chunk-size", "--memory-budget", "--bytes-per-token", "--kv-bytes-per-token", "--rows")
WORDS = (
    "--strategy",
    "--order",
    "--mode",
    "--arrange",
    "--turns",
    "--loss",
    "--compare",
    "--split",
    "--template-value",
)
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "vocab_size": 500,
    "head_dim": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
TALK = [{"role": "user", "content": "How many?"}, {"role": "assistant", "content": "Seven."}]


class Hung(BaseException):
    """The time of a case is over."""


class Case:
    """What is drawn for a number: a command, and what its file means.

    Attributes:
        draw: decides everything.
        folder: for its files.
        meant: the sequences, each a list of `(token, route)` and of booleans of those trained on; None: to be refused.
    """

    def __init__(self, number: int, folder: pathlib.Path) -> None:
        self.draw, self.folder = random.Random(number), folder
        self.words: list[str] = []
        self.meant: list[tuple[list[Any], list[bool]]] | None = []
        self.knows = False  # whether `meant` says it
        self.note = ""
        self.draw.choices(list(KINDS), list(KINDS.values()))[0](self)

    def value(self) -> Any:
        """A value that is seldom right."""
        return copy.deepcopy(self.draw.choice(VALUES))

    def path(self, name: str, content: bytes | str) -> str:
        """A file."""
        path = self.folder / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass"))
        return str(path)


def changed(case: Case, value: Any) -> Any:
    """JSON with one thing in it changed, removed or added."""
    if isinstance(value, (list, dict)) and value and case.draw.random() < 0.8:
        key = case.draw.choice(list(value) if isinstance(value, dict) else range(len(value)))
        found = copy.copy(value)
        if case.draw.random() < 0.15:
            del found[key]
        else:
            found[key] = changed(case, value[key])
        return found
    new = case.value()
    case.note = f"{str(value)[:60]} became {str(new)[:60]}"
    return new


def dumped(value: Any) -> str:
    """JSON text."""
    return json.dumps(value).replace(json.dumps(DEEP), NESTED)


def flipped(case: Case, data: bytes) -> bytes:
    """Bytes with some of them wrong, or an end missing."""
    found = bytearray(data)
    if case.draw.random() < 0.2:
        return bytes(found[: case.draw.randrange(len(found))])
    for _ in range(case.draw.choice((1, 1, 1, 8))):
        found[case.draw.randrange(len(found))] = case.draw.randrange(256)
    return bytes(found)


def sequences_of(case: Case) -> list[list[int]]:
    """Token ids that share prefixes."""
    found: list[list[int]] = [[case.draw.randrange(9) for _ in range(case.draw.randint(1, 12))]]
    for _ in range(case.draw.randint(0, 5)):
        before = case.draw.choice(found)
        more = [case.draw.randrange(9) for _ in range(case.draw.randint(0, 6))]
        found.append((before[: case.draw.randint(0, len(before))] + more) or [1])
    return found


def row_of(case: Case, tokens: list[int], routed: bool) -> Any:
    """A row of JSON lines with these tokens."""
    size, draw = len(tokens), case.draw
    form = "tokens" if routed else draw.choice(("list", "tokens", "input_ids", "pair"))
    if form == "list":
        return tokens
    row: dict[str, Any] = {"reward": draw.random(), "turn": draw.randrange(4), "trajectory": draw.choice((3, "a"))}
    if form == "pair":
        cut = draw.randint(0, size)
        row |= {"prompt_ids": tokens[:cut], "completion_ids": tokens[cut:]}
        return row | ({"completion_mask": [draw.randrange(2) for _ in tokens[cut:]]} if draw.random() < 0.5 else {})
    row[form] = tokens
    if routed:
        row["routes"] = [[draw.randrange(3), draw.randrange(3)] for _ in tokens]
    if form == "input_ids":
        row["attention_mask"] = [int(draw.random() < 0.8) for _ in tokens]
        row["labels"] = [draw.choice((-100, token)) for token in tokens]
    elif draw.random() < 0.5:
        start = draw.randint(0, size)
        row["spans"] = [[start, draw.randint(start, size)]]
    else:
        row["loss_mask"] = [draw.randrange(2) for _ in tokens]
    return row


def meaning(row: Any) -> tuple[list[Any], list[bool]] | None:
    """What a row of token ids says, read slowly; None: nothing that may be used."""
    fields = {"tokens": row} if isinstance(row, list) else row
    if not isinstance(fields, dict):
        return None
    given = {key: value for key, value in fields.items() if value is not None}
    key = next((one for one in ("tokens", "input_ids") if one in given), None)
    if key is None and isinstance(given.get("prompt_ids"), list) and isinstance(given.get("completion_ids"), list):
        before, after = given["prompt_ids"], given["completion_ids"]
        mask = given.get("completion_mask", [1] * len(after))
        if not _numbers(mask, len(after)) and not _numbers(mask, len(before) + len(after)):
            return None
        trained = [False] * (len(before) + len(after) - len(mask)) + [one > 0 for one in mask]
        return ([(token, None) for token in before + after], trained) if _ids(before + after) else None
    if key is None or not _ids(tokens := given[key]):
        return None
    size = len(tokens)
    trained, routes = [True] * size, given.get("routes", [None] * size)
    if "routes" in given and not _rectangular(routes, size):
        return None
    if "spans" in given:
        trained = [False] * size
        for span in given["spans"] if isinstance(given["spans"], list) else [None]:
            if not isinstance(span, list) or [type(one) for one in span] != [int, int]:
                return None
            if not 0 <= span[0] <= span[1] <= size:
                return None
            trained[span[0] : span[1]] = [True] * (span[1] - span[0])
    elif (name := next((one for one in ("loss_mask", "labels") if one in given), None)) is not None:
        if not _numbers(given[name], size):
            return None
        trained = [one > 0 if name == "loss_mask" else one != -100 for one in given[name]]
    kept = [1] * size
    if key == "input_ids" and "attention_mask" in given:
        if not _numbers(given["attention_mask"], size):
            return None
        kept = given["attention_mask"]
    found = [
        (token, json.dumps(route)) if "routes" in given else (token, None)
        for token, route in zip(tokens, routes, strict=True)
    ]
    return [one for one, real in zip(found, kept, strict=True) if real > 0], [
        one for one, real in zip(trained, kept, strict=True) if real > 0
    ]


def _ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(one) is int and 0 <= one < LIMIT for one in value)


def _numbers(value: Any, size: int) -> bool:
    fits = isinstance(value, list) and len(value) == size
    return fits and all(type(one) in (int, float, bool) and abs(one) <= sys.float_info.max for one in value)


def _rectangular(value: Any, size: int) -> bool:
    try:
        array = np.array(value)
    except Exception:
        return False
    is_whole = (array.dtype.kind == "i" or not array.size) and "e" not in str(value)  # neither true nor false
    return is_whole and isinstance(value, list) and len(value) == size


def of_lines(case: Case) -> None:
    """JSON lines, a JSON list or parquet with one value changed; or bytes that are wrong."""
    routed = case.draw.random() < 0.3
    rows = [row_of(case, tokens, routed) for tokens in sequences_of(case)]
    at = case.draw.randrange(len(rows))
    rows[at] = changed(case, rows[at])
    text = "\n".join(map(dumped, rows))
    if case.draw.random() < 0.2:
        path = case.path("rows.jsonl", data := flipped(case, text.encode("utf-8", "surrogatepass")))
        case.note = f"{data[:200]!r}"
        try:
            rows = [json.loads(line) for line in data.decode("utf-8-sig").split("\n") if line.strip()]
        except (ValueError, RecursionError):
            rows = [{}]
    else:
        path = case.path("rows.jsonl", text)
    said = [None if DEEP in str(row) else meaning(row) for row in rows]
    case.meant = None if None in said else said  # type: ignore[assignment]
    case.knows = not any(set(row) & {"messages", "text"} for row in rows if isinstance(row, dict))
    command(case, path)


def of_archive(case: Case) -> None:
    """A rollout file in which one number, one array or some bytes are wrong."""
    arrays = archive(case)
    name = case.draw.choice(list(arrays))
    way = case.draw.choice(("entry", "entry", "entry", "array", "bytes", "type"))
    if way == "entry" and arrays[name].size:
        at = case.draw.randrange(arrays[name].size)
        new = case.draw.choice((-1, 0, 1, 2, 3, 5, 2**31 - 1, 2**31, 2**62, -(2**62), math.nan, math.inf, 0.5))
        if isinstance(new, float) or arrays[name].dtype.kind == "f":
            arrays[name] = arrays[name].astype(np.float64)
        else:
            arrays[name] = arrays[name].astype(np.int64)
        arrays[name].reshape(-1)[at] = new
        case.note = f"{name}[{at}] = {new}"
    elif way == "array":
        arrays[name] = case.draw.choice((arrays[name][:-1], np.repeat(arrays[name], 2, 0), arrays[name][None]))
        case.note = f"{name} of shape {arrays[name].shape}"
    elif way == "type":
        dtype = case.draw.choice(("f8", "i1", "u8", ">i4", "?", "S3", "O", "c8", "m8[s]"))
        with contextlib.suppress(ValueError, TypeError):
            arrays[name] = arrays[name].astype(dtype)
        case.note = f"{name} of dtype {dtype}"
    case.meant, case.knows = archive_meaning(arrays), True
    data = io.BytesIO()
    (np.savez_compressed if case.draw.random() < 0.5 else np.savez)(data, **arrays)  # type: ignore
    content = data.getvalue()
    if way == "bytes":
        content, case.note = flipped(case, content), "bytes"
        case.knows = content[:4] == b"PK\x03\x04"
    command(case, case.path("rollouts.npz", content))


def archive(case: Case) -> dict[str, Any]:
    """A rollout file's arrays, as its docstring describes them."""
    samples = sequences_of(case)
    leaves = sorted(one for one in map(list, set(map(tuple, samples))) if not any(_extends(x, one) for x in samples))
    shared = [0] + [_shared(a, b) for a, b in itertools.pairwise(leaves)]
    suffixes = [leaf[size:] for leaf, size in zip(leaves, shared, strict=True)]
    size, draw = len(samples), case.draw
    spans = [sorted((draw.randint(0, len(one)), draw.randint(0, len(one)))) for one in samples]
    found = {
        "suffix_tokens": np.array(list(itertools.chain(*suffixes)), np.int32),
        "suffix_offsets": np.cumsum([0, *map(len, suffixes)]),
        "leaf_lcp": np.array(shared, np.int32),
        "dense_vocab": np.arange(9, dtype=np.int32),
        "leaf": np.array([next(i for i, x in enumerate(leaves) if x[: len(one)] == one) for one in samples], np.int32),
        "length": np.array([len(one) for one in samples], np.int32),
        "loss_ptr": np.arange(size + 1),
        "loss_start": np.array([start for start, _ in spans]),
        "loss_end": np.array([stop for _, stop in spans]),
        **{name: np.zeros(size, np.float32) for name in ("reward", "advantage", "advantage_batch")},
        **{name: np.arange(size) for name in ("group", "trial", "traj", "turn")},
    }
    if draw.random() < 0.3:
        found["routes"] = np.array([[[draw.randrange(3)]] for one in samples for _ in one])
    return found


def _shared(one: list[int], other: list[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _extends(one: list[int], other: list[int]) -> bool:
    return len(one) > len(other) and one[: len(other)] == other


def archive_meaning(arrays: dict[str, Any]) -> list[tuple[list[Any], list[bool]]] | None:
    """The samples of a rollout file, read number by number; None if a number says nothing."""
    try:
        given = {name: [_whole(one) for one in array] for name, array in arrays.items() if array.dtype.kind in "iu"}
        leaves: list[list[int]] = []
        for k, shared in enumerate(given["leaf_lcp"]):
            start, stop = given["suffix_offsets"][k : k + 2]
            before = leaves[-1] if leaves else []
            if not 0 <= shared <= len(before) or not 0 <= start <= stop <= len(given["suffix_tokens"]):
                return None
            leaves.append(before[:shared] + given["suffix_tokens"][start:stop])
        found, first = [], 0
        for i, (leaf, size) in enumerate(zip(given["leaf"], given["length"], strict=True)):
            if leaf < 0 or not 0 <= size <= len(leaves[leaf]):
                return None
            trained = [False] * size
            low, high = given["loss_ptr"][i : i + 2]
            for start, stop in zip(given["loss_start"][low:high], given["loss_end"][low:high], strict=True):
                if not 0 <= start <= stop <= size:
                    return None
                trained[start:stop] = [True] * (stop - start)
            routes = [None] * size
            if "routes" in arrays:
                routes = [json.dumps(one.tolist()) for one in arrays["routes"][first : first + size]]
            if not all(0 <= token < 2**31 for token in leaves[leaf]):
                return None
            first += size
            found.append((list(zip(leaves[leaf][:size], routes, strict=True)), trained))
        return found
    except (KeyError, IndexError, ValueError, TypeError):
        return None


def _whole(value: Any) -> Any:
    return int(value) if np.ndim(value) == 0 else None


def command(case: Case, path: str) -> None:
    """`dta plan` or `dta why` of a file, often with options."""
    case.words = ["plan", path, "--json", str(case.folder / "out.json")]
    if case.draw.random() < 0.1:
        case.words, case.knows = ["why", path], False
    elif case.draw.random() < 0.2:
        case.words += case.draw.choice((["--html", str(case.folder / "page.html")], ["--dot", "-"]))


def of_options(case: Case) -> None:
    """A good file with options that may be bad."""
    path = case.path("rows.jsonl", "[1, 2, 3]\n[1, 2]\n")
    name = case.draw.choice((*OPTIONS, *WORDS))
    value = case.draw.choice(
        (*map(str, VALUES), "chunk-size=" + str(case.value()), "rows=99", "turns=no", "1_0", "1e3")
    )
    case.words = ["plan", path, name, value, *case.draw.choice(([], ["--schedule"], ["--json", "-"]))]
    case.words += case.draw.choice(([], ["--memory-budget", "9"], ["--bytes-per-token", "1"]))
    case.note = value[:60]


def of_split(case: Case) -> None:
    """`dta split` with an argument that may be bad."""
    name = case.draw.choice(("--gpus", "--train", "--roll", "--measured"))
    value = case.draw.choice((*map(str, VALUES), "99999999", "2=3", "3/1=9", "99999999999999999999=1"))
    case.words = ["split", "--gpus", "4", "--train", "1", "--roll", "2", name, value]
    case.words += case.draw.choice(([], ["--json", str(case.folder / "out.json")]))


def of_check(case: Case) -> None:
    """`dta check` with settings of a trainer that may be bad, as words or as a file, and rows that may be empty."""
    rows = case.path("rows.jsonl", "".join(f"{[1] * case.draw.choice((0, 0, 1, 5))}\n" for _ in range(3)))
    names = sorted(name for _, defaults in TRAINERS.values() for name in defaults)
    drawn = {case.draw.choice(names): case.draw.choice((case.value(), 1, 2, 3, 10**9)) for _ in range(3)}
    settings = [f"{name}={value}" for name, value in drawn.items()]
    if case.draw.random() < 0.4:
        settings = [case.path("settings.json", dumped(changed(case, {"actor": drawn, "trainer": {"nnodes": 2}})))]
    case.words = ["check", rows, *settings, *case.draw.choice(([], ["--ranks", "3"], ["--trainer", "verl"]))]


def of_config(case: Case) -> None:
    """`dta estimate` with a configuration, a calibration or figures of a device that may be bad."""
    rows, calibration = case.path("rows.jsonl", "[1, 2, 3]\n[1, 2]\n"), []
    config = CONFIG
    if (way := case.draw.random()) < 0.5:
        config = changed(case, CONFIG)
        if case.draw.random() < 0.3:
            config = CONFIG | {case.draw.choice(list(CONFIG)): case.draw.choice((0, -1, 10**11, 10**30, 2**24))}
    elif way < 0.7:
        calibration = ["--" + case.draw.choice(("tflops", "bandwidth", "memory", "chunk-size")), str(case.value())]
    else:
        calibration = ["--calibration", case.path("rates.json", damaged_calibration(case))]
    case.words = ["estimate", case.path("config.json", dumped(config)), rows, *calibration]


def damaged_calibration(case: Case) -> bytes:
    """A calibration in which something is wrong."""
    made = Calibration()
    made.calls = 3
    fields = json.loads(made.to_json())
    for kind in fields["runs"]:
        fields["runs"][kind] = 2
        fields["samples"][kind] = [[2, 1, 1, 1, 100, 1000, 10, 0.01], [3, 1, 1, 1, 50, 500, 10, 0.005]]
    if case.draw.random() < 0.3:
        return flipped(case, json.dumps(fields).encode())
    return dumped(changed(case, fields)).encode("utf-8", "surrogatepass")


def of_places(case: Case) -> None:
    """What is no file, or has a strange name."""
    fifo = str(case.folder / "fifo")
    os.mkfifo(fifo)
    good = case.path("rows.jsonl", "[1, 2]\n")
    names = ("\x1b[31mred.jsonl", "caf\udce9.jsonl", "x" * 300, "a\0b", "missing", "[bold].jsonl")
    place = case.draw.choice((fifo, "/dev/zero", "/dev/null", "", ".", *(str(case.folder / name) for name in names)))
    with contextlib.suppress(OSError, ValueError):
        pathlib.Path(place).exists() or shutil.copy(good, place)
    case.words = case.draw.choice(
        (
            ["plan", place],
            ["plan", place, "--html", str(case.folder / "page.html")],
            ["why", place],
            ["split", place],
            ["plan", good, "--json", place if place not in (fifo, "") else "/dev/null"],
            ["plan", good, "--compare", f"file={place}"],
            ["estimate", case.path("config.json", json.dumps(CONFIG)), good, "--calibration", place],
        )
    )
    case.note = place


def of_schedule(case: Case) -> None:
    """The text of a schedule with a few characters wrong: parsed, or a `ScheduleError`."""
    text = str(plan([[1, 2, 3], [1, 2], [1, 4]], chunk_size=2).schedule).encode()
    damaged = (
        flipped(case, text).decode("utf-8", "replace").replace("s0", case.draw.choice(("s0", "s0..s9" + "9" * 16)))
    )
    case.note = damaged
    with contextlib.suppress(ScheduleError):
        Schedule.parse(damaged)


def of_transcripts(case: Case) -> None:
    """Messages in which something is wrong, with a tokenizer that has a template."""
    rows = changed(case, [{"messages": TALK, "tools": None}, {"prompt": "a", "completion": "b", "reward": 1}])
    lines = "\n".join(map(dumped, rows if isinstance(rows, list) else [rows]))
    case.words = ["plan", case.path("talks.jsonl", lines), "--tokenizer", tokenizer_folder()]


def of_tables(case: Case) -> None:
    """Parquet files and folders of `datasets` in which bytes or whole files are wrong."""
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table({"tokens": sequences_of(case)})
    if case.draw.random() < 0.5:
        if case.draw.random() < 0.3:
            times = pyarrow.array([LIMIT - 1] * len(table), pyarrow.timestamp(case.draw.choice(("ms", "us"))))
            table = table.append_column("when", times)
        data = io.BytesIO()
        pyarrow.parquet.write_table(table, data)
        content = data.getvalue() if case.draw.random() < 0.2 else b"PAR1" + flipped(case, data.getvalue())[4:]
        case.words = ["plan", case.path("rows.parquet", content)]
        return
    folder = case.folder / "saved"
    folder.mkdir()
    files = {
        "dataset_info.json": {
            "features": {"tokens": {"feature": {"dtype": "int64", "_type": "Value"}, "_type": "List"}}
        },
        "state.json": {"_data_files": [{"filename": "data.arrow"}], "_fingerprint": "a", "_split": None},
    }
    files |= {"dataset_dict.json": {"splits": ["train"]}} if case.draw.random() < 0.3 else {}
    name = case.draw.choice(list(files))
    for one, value in files.items():
        (folder / one).write_text(dumped(changed(case, value) if one == name else value), errors="replace")
    with pyarrow.OSFile(str(folder / "data.arrow"), "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    case.words = ["plan", str(folder)]


KINDS: dict[Callable[[Case], None], float] = {
    of_lines: 6.0,
    of_archive: 6.0,
    of_options: 3.0,
    of_split: 2.0,
    of_check: 4.0,
    of_places: 1.0,
    of_schedule: 1.0,
    of_config: 1.0,
    of_transcripts: 1.0,
    of_tables: 1.5,
}


def tokenizer_folder() -> str:
    """A small tokenizer with a template, saved once a process."""
    if not _FOLDERS:
        from tests.support.chat import tokenizer

        _FOLDERS.append(tempfile.TemporaryDirectory())
        tokenizer().save_pretrained(_FOLDERS[0].name)
    return _FOLDERS[0].name


_FOLDERS: list[tempfile.TemporaryDirectory[str]] = []  # it goes when the process does


def verdict(number: int) -> tuple[str, str]:
    """What became of a case: "planned", "refused", or one of `BAD`; and what it was."""
    with tempfile.TemporaryDirectory() as folder:
        case, found, crash = None, "", ""
        try:
            with _timed():
                case = Case(number, pathlib.Path(folder))
                kind, found = _run(case)
        except Hung:
            kind = "hung"
        except Exception as error:
            kind, crash = "crashed", f"{type(error).__name__}: {error}"
        words, note = (case.words, case.note) if case else ([], "")
        return kind, "\n".join([f"case {number}: dta {ascii(words)[:300]}", ascii(note)[:300], found, crash])


@contextlib.contextmanager
def _timed() -> Iterator[None]:
    def ring(*_: Any) -> None:
        raise Hung

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _run(case: Case) -> tuple[str, str]:
    if not case.words:
        return "planned", ""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = dta(case.words)
    text = err.getvalue()
    if UNFORESEEN in text or code not in (0, 2) or (code == 2) != ("dta: " in text):
        return "crashed", f"exit code {code}\n{text[:1500]}"
    if any(ord(one) < 32 and one != "\n" for one in out.getvalue() + text):
        return "wrong", f"control characters\n{(out.getvalue() + text)[:1500]!r}"
    written = case.folder / "out.json"
    if list(case.folder.glob("*.tmp")) or list(case.folder.glob(".*.tmp")) or (code and written.exists()):
        return "wrong", "a part of an output is left"
    if code:
        return "refused", text[:1500]
    if case.knows:
        return _compared(case, json.loads(written.read_text()) if written.exists() else None)
    return "planned", ""


def _compared(case: Case, made: Any) -> tuple[str, str]:
    """What was read and planned against what the file means."""
    if case.meant is None:
        return "wrong", "planned, although it means nothing"
    found = []
    try:
        for one in read(case.words[1], ReadOptions()).sequences:
            routes = [None] * len(one) if one.routes is None else map(json.dumps, np.asarray(one.routes).tolist())
            tokens = [int(token) for token in one.tokens]
            found.append((list(zip(tokens, routes, strict=True)), one.loss_mask().tolist()))
    except DTAError as error:
        return "wrong", f"planned, and then refused: {error}"
    if found != case.meant:
        return "wrong", f"read {str(found)[:600]}\nmeant {str(case.meant)[:600]}"
    stats = made["stats"]
    prefixes = {tuple(tokens[: i + 1]) for tokens, _ in case.meant for i in range(len(tokens))}
    expected = (len(case.meant), sum(len(tokens) for tokens, _ in case.meant), len(prefixes))
    if expected != (stats["sequences"], stats["tokens"], stats["tree_tokens"]):
        return "wrong", f"{expected} were meant, planned {stats}"
    return "planned", ""


def main() -> int:
    """The command line."""
    import resource

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-n", type=int, default=200, help="cases to draw")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--number", type=int, help="one case, with all it prints")
    options = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    if options.number is not None:
        print(*verdict(options.number))
        return 0
    counts: collections.Counter[str] = collections.Counter()
    first = MANY * options.seed
    for number in range(first, first + options.n):
        kind, detail = verdict(number)
        counts[kind] += 1
        if kind in BAD:
            print(f"{kind}: {detail}\n", flush=True)
    print(f"{options.n} drawn: {dict(counts)}")
    return int(any(counts[kind] for kind in BAD))


if __name__ == "__main__":
    sys.exit(main())
