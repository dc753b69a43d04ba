"""Records of measurements, which are written to JSON and read back."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import platform
import statistics
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

import dta_compile


@dataclasses.dataclass
class Outcome:
    """Result of one method on one workload; values that were not measured are None, and `error` says why.

    Attributes:
        first_call_seconds: time of the first step, including compilation.
        seconds: times of the timed steps.
        gradient_difference: distance to one sequence at a time (see `model.gradient_difference`).
        peak_bytes: growth of resident memory over a step, in a separate process.
        note: how the step ran.
    """

    first_call_seconds: float | None = None
    seconds: list[float] = dataclasses.field(default_factory=list)
    gradient_difference: float | None = None
    peak_bytes: int | None = None
    note: str = ""
    error: str = ""

    @property
    def median(self) -> float | None:
        return statistics.median(self.seconds) if self.seconds else None


@dataclasses.dataclass
class Result:
    """Results of all methods on one workload.

    Attributes:
        tokens, pairs: tokens and causal attention pairs of the single sequences.
        tree_tokens, tree_pairs: the same of their prefix tree.
        ideal: ratio of floating-point operations, sequences over tree.
    """

    name: str
    group: str
    description: str
    parameter: float | None
    sequences: int
    tokens: int
    pairs: int
    tree_tokens: int
    tree_pairs: int
    ideal: float
    outcomes: dict[str, Outcome] = dataclasses.field(default_factory=dict)

    @property
    def compression(self) -> float:
        """Compression ratio, the paper's C."""
        return self.tokens / self.tree_tokens

    @property
    def attention_compression(self) -> float:
        return self.pairs / self.tree_pairs

    def seconds(self, method: str) -> float | None:
        """Return the median of the timed steps."""
        return self.outcomes[method].median if method in self.outcomes else None

    def throughput(self, method: str) -> float | None:
        """Return tokens of all sequences, shared or not, per second."""
        seconds = self.seconds(method)
        return self.tokens / seconds if seconds else None

    def speedup(self, method: str) -> float | None:
        """Return the speed-up over one sequence at a time."""
        seconds, reference = self.seconds(method), self.seconds("dense")
        return reference / seconds if seconds and reference else None

    def efficiency(self, method: str) -> float | None:
        """Return the speed-up relative to the ratio of floating-point operations."""
        speedup = self.speedup(method)
        return speedup / self.ideal if speedup else None


@dataclasses.dataclass
class Report:
    """Report of a run.

    Attributes:
        facts: machine, versions, date.
        settings: settings that must agree for a run to be resumed.
        methods: family and description by name.
    """

    facts: dict[str, Any]
    settings: dict[str, Any]
    methods: dict[str, dict[str, str]]
    results: list[Result] = dataclasses.field(default_factory=list)

    def save(self, path: Path) -> None:
        """Write everything; an interrupted write keeps the previous file."""
        unfinished = path.with_suffix(".part")
        unfinished.write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n")
        unfinished.replace(path)

    @classmethod
    def load(cls, path: Path) -> Report:
        data = json.loads(path.read_text())
        for result in data["results"]:
            result["outcomes"] = {name: Outcome(**outcome) for name, outcome in result["outcomes"].items()}
        results = [Result(**result) for result in data["results"]]
        return cls(data["facts"], data["settings"], data["methods"], results)


def machine_facts() -> dict[str, Any]:
    """Collect facts about the machine and versions that a comparison with other figures needs."""
    facts = {"date": datetime.date.today().isoformat(), "processor": _processor(), "cores": os.cpu_count()}
    facts |= {"memory": _memory(), "system": platform.system(), "python": platform.python_version()}
    facts |= {"torch": torch.__version__, "transformers": transformers.__version__, "numpy": np.__version__}
    return facts | {"dta_compile": f"{dta_compile.__version__} {_commit()}".strip()}


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _memory() -> str:
    try:
        return f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB"
    except (ValueError, OSError, AttributeError):
        return "unknown"


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return f"({done.stdout.strip()})"
