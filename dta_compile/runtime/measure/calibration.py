"""Calibrate the cost model: fit its rates to the times of past runs, stored in one file per device and model.

A fit solves `seconds = rates . work` for samples of one kind of run ("forward", "backward"). Robustness:

* Samples are spread over sizes and calls: for every size of run (by half powers of two) each of the latest `CALLS`
  calls contributes one sample, its median run. So neither a thousand equal runs nor one disturbed call dominate.
* The loss is the sum of absolute relative errors, so that short and long runs weigh the same and outliers (page faults,
  other load) weigh little.
* The prior (defaults of `CostModel` times one common factor) weighs a fraction of a sample. It decides directions that
  the samples leave open, such as the shares of launches and tokens if all runs have one size.
* Finally all rates of the kind are scaled to the latest calls by the weighted median error (long runs weigh more). So
  predictions follow a machine that becomes slower or faster, and the ratios of rates, which decide between strategies,
  are unchanged.

The first call with runs of a kind is not recorded: it allocates and warms up.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import math
import pathlib
import platform
import re
import statistics
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from dta_compile.executable.executable import Executable, TensorSpec
from dta_compile.files import read_text, write_whole
from dta_compile.options import Options
from dta_compile.plan import Anchor, Backward, Chunk, CostModel, Forward, MeasuredRun, Rates, Work

logger = logging.getLogger("dta_compile")

Floats = npt.NDArray[np.floating[Any]]

FORMAT, VERSION = "dta_compile calibration", 1
KINDS = ("forward", "backward")
MOST_BYTES = 2**22  # largest file; it has at most 1,024 samples
# Bounds of measured values: a file with others was not written by this module.
MOST_COUNTED, LEAST_SECONDS, MOST_SECONDS = 2**53, 1e-12, 1e9

CALLS = 9  # most samples per size
SAMPLES = 512  # most samples per kind; the least recently seen size is evicted first
MINIMUM_RUNS = 16  # per kind; with fewer, rates are those of the prior times the common factor
BOUND = 100.0  # largest ratio between a rate and its prior times the common factor
PRIOR_WEIGHT = 0.001  # weight of each rate of the prior, in samples
TOLERANCE = 0.02  # relative errors above it and above their median count linearly, others by their square
HALF_LIFE, LEAST_WEIGHT = 100, 0.02  # calls after which a sample weighs half; its least weight
ROUNDS = 12  # iterations of reweighting
COMPARED = 2  # least number of samples of a size for comparing times
LONGEST_WAIT = 7  # most calls between two fits, each of which takes a millisecond or more


class Sample(NamedTuple):
    """Median run of a call, representing `runs` runs of its size: its work and its time."""

    call: int
    runs: int
    work: Work
    seconds: float


class RunHistory:
    """Samples of one kind of run.

    Attributes:
        prior: default rates.
        runs: number of recorded runs.
        sizes: samples by size of run, the least recently seen size first.
    """

    def __init__(self, prior: Rates) -> None:
        self.prior, self.runs = prior, 0
        self.sizes: dict[tuple[int, ...], list[Sample]] = {}

    @property
    def samples(self) -> Iterator[Sample]:
        """All samples, size by size."""
        return itertools.chain.from_iterable(self.sizes.values())

    def add(self, call: int, runs: list[tuple[Work, float]]) -> None:
        """Record a call: insert the median run of every size, by time relative to the prior."""
        of_size: dict[tuple[int, ...], list[tuple[float, Work, float]]] = {}
        for work, seconds in runs:
            relative = seconds / self.prior.seconds(work)
            of_size.setdefault(_size(work), []).append((relative, work, seconds))
        for timed in of_size.values():
            _, work, seconds = sorted(timed)[(len(timed) - 1) // 2]
            self.insert(Sample(call, len(timed), work, seconds))
        self.runs += len(runs)

    def insert(self, sample: Sample) -> None:
        """Add a sample; evict the oldest of its size, and the least recently seen size, if there are too many."""
        size = _size(sample.work)
        self.sizes[size] = [*self.sizes.pop(size, []), sample][-CALLS:]
        if sum(map(len, self.sizes.values())) > SAMPLES:
            del self.sizes[next(iter(self.sizes))]


class Fit(NamedTuple):
    """Result of fitting the samples of one kind.

    Attributes:
        rates: fitted rates; the scaled prior if there were few runs.
        factor: measured time over the time predicted by the prior.
        errors: errors of the rates on the samples, relative to the measured times.
    """

    rates: Rates
    factor: float
    errors: Floats


class Calibration:
    """Calibration of the rates of one model on one device.

    Attributes:
        path: file that stores it; None: in memory only.
        identity: name of model and device, for readers of the file.
        calls: number of recorded calls, including those of earlier processes.
        prior: rates before anything is recorded.
    """

    def __init__(self, path: pathlib.Path | None = None, identity: str = "", prior: CostModel | None = None) -> None:
        self.path, self.identity, self.calls, self.prior = path, identity, 0, prior or CostModel()
        self.histories = {kind: RunHistory(getattr(self.prior, kind)) for kind in KINDS}
        self._calls_here = 0  # since this object was made
        self._warm: set[str] = set()
        self._model = self.prior
        self._fitted_at = 0  # value of `calls` at the last fit

    @classmethod
    def load(
        cls,
        executable: Executable,
        device: torch.device,
        options: Options,
        attention: str = "",
        generated: bool = False,
        prior: CostModel | None = None,
    ) -> Calibration:
        """Load the calibration of this model and device, or return an empty one.

        Args:
            attention: name of the attention provider, if it does not follow from device and layers.
            generated: whether it is for runs with generated code.
            prior: rates before anything is recorded; None: the defaults for the device.
        """
        folder = options.cache_folder
        prior = prior or (CostModel.of_gpu() if device.type == "cuda" else CostModel())
        if folder is None:
            return cls(prior=prior)
        path = folder / file_name(executable, device, attention, generated)
        try:
            return cls.from_json(read_text(path, MOST_BYTES), path, prior)
        except (FileNotFoundError, NotADirectoryError):
            pass
        except (OSError, ValueError) as error:
            logger.info("dta: the calibration in %s is not used: %s", path, error)
        return cls(path, path.stem, prior)

    def record(self, runs: Iterable[tuple[str, Work, float]]) -> None:
        """Record the runs `(kind, work, seconds)` of one call; save after the 2nd, 4th, 8th, ... call."""
        of_kind: dict[str, list[tuple[Work, float]]] = {}
        for kind, work, seconds in runs:
            if kind in self.histories and seconds > 0 and work.launches:
                of_kind.setdefault(kind, []).append((work, seconds))
        ready = of_kind.keys() & self._warm
        self._warm.update(of_kind)
        if not ready:
            return
        self.calls, self._calls_here = self.calls + 1, self._calls_here + 1
        for kind in ready:
            self.histories[kind].add(self.calls, of_kind[kind])
        if self._calls_here > 1 and self._calls_here & (self._calls_here - 1) == 0:
            self.save()

    def cost_model(self) -> CostModel:
        """Return the fitted rates, refitted every few calls; the prior before anything is recorded."""
        if self.calls - self._fitted_at > min(self._fitted_at // 8, LONGEST_WAIT):
            self._model, self._fitted_at = self._fitted(), self.calls
        return self._model

    def _fitted(self) -> CostModel:
        fits = {kind: fit(history) for kind, history in self.histories.items() if history.runs}
        if not fits:
            return self.prior
        factor = next(iter(fits.values())).factor  # that of the forward if it has samples
        scaled = {kind: Rates(*(factor * rate for rate in getattr(self.prior, kind))) for kind in KINDS}
        rates = scaled | {kind: fitted.rates for kind, fitted in fits.items()}
        runs = sum(history.runs for history in self.histories.values())
        source = f"defaults scaled to {runs:,} runs"
        if runs >= MINIMUM_RUNS:  # with fewer, the error of the fit says nothing
            error = float(np.median(np.concatenate([fitted.errors for fitted in fits.values()])))
            source = f"calibrated on {runs:,} runs, median error of the fit {error:.0%}"
        return CostModel(**rates, restore=self.prior.restore * factor, source=source)

    def to_json(self) -> str:
        """Serialise for the file that `from_json` reads."""
        fields = {
            "format": FORMAT,
            "version": VERSION,
            "identity": self.identity,
            "calls": self.calls,
            "runs": {kind: history.runs for kind, history in self.histories.items()},
            "columns": ["call", "runs", *Work._fields, "seconds"],
            "samples": {kind: [*map(_row, history.samples)] for kind, history in self.histories.items()},
        }
        return json.dumps(fields) + "\n"

    @classmethod
    def from_json(cls, text: str, path: pathlib.Path | None = None, prior: CostModel | None = None) -> Calibration:
        """Parse the text of `to_json`; raise ValueError for anything else, other versions included."""
        try:
            fields = json.loads(text)
            if (fields["format"], fields["version"]) != (FORMAT, VERSION):
                raise ValueError(f"format {fields['format']!r}, version {fields['version']!r}")
            calibration = cls(path, str(fields["identity"]), prior)
            calibration.calls = _counted(fields["calls"])
            for kind, history in calibration.histories.items():
                history.runs = _counted(fields["runs"][kind])
                for row in fields["samples"][kind]:
                    history.insert(_sample(row, calibration.calls))
                if bool(history.runs) != bool(history.sizes):
                    raise ValueError(f"{history.runs} {kind} runs")
        except (LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
            raise ValueError(f"not a calibration: {type(error).__name__}: {error}") from error
        return calibration

    def save(self) -> None:
        """Write the file; log a failure and stay in memory."""
        if self.path is None:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self.path, self.to_json().encode())
        except OSError as error:
            logger.info("dta: the calibration is not kept: %s", error)
            self.path = None


def fit(history: RunHistory) -> Fit:
    """Fit the rates of least absolute relative error over the samples, scaled to the latest calls."""
    samples = list(history.samples)
    work = np.array([sample.work for sample in samples], np.float64)
    seconds = np.array([sample.seconds for sample in samples], np.float64)
    call = np.array([sample.call for sample in samples])
    age = call.max() - call
    # Weights by predicted time of the latest calls, because by measured time disturbed runs would weigh more.
    spent = np.where(age < CALLS, work @ history.prior * [sample.runs for sample in samples], 0.0)
    factor = _median(seconds / (work @ history.prior), spent)
    prior = factor * np.array(history.prior)
    shares = work * prior / seconds[:, None]  # shares of the measured times: `shares @ factors` should be 1
    factors: Floats = np.ones(len(prior))
    if history.runs >= MINIMUM_RUNS:
        factors = _robust(shares, np.maximum(0.5 ** (age / HALF_LIFE), LEAST_WEIGHT))
        factors *= _median(1 / (shares @ factors), spent)
    rates = Rates(*(factors * prior).tolist())
    return Fit(rates, factor, np.abs(shares @ factors - 1))


def of_whole_chunks(runs: Iterable[MeasuredRun]) -> list[MeasuredRun]:
    """Sum the runs of all parts to runs of whole chunks, for a sweep by stages.

    Repeated runs of parts, and runs for their states alone, are left out.
    """
    by_chunk: dict[tuple[str, Chunk], MeasuredRun] = {}
    for run in runs:
        if not isinstance(run.op, (Anchor, Forward, Backward)) or not getattr(run.op, "out", True):
            continue
        key = run.kind, run.op.chunk
        by_chunk[key] = run._replace(seconds=run.seconds + by_chunk[key].seconds) if key in by_chunk else run
    return list(by_chunk.values())


def times_as_fast(before: Calibration, after: Calibration) -> float | None:
    """Return the speedup from `before` to `after`, by median times of sizes with several samples in both; else None.

    Sizes are weighted by their predicted time in `after`.
    """
    old = new = 0.0
    for kind, history in after.histories.items():
        prior = before.histories[kind].prior
        for size, samples in history.sizes.items():
            others = before.histories[kind].sizes.get(size, [])
            if min(len(samples), len(others)) < COMPARED:
                continue
            amount = sum(sample.runs * prior.seconds(sample.work) for sample in samples)
            old, new = (
                total + amount * statistics.median(sample.seconds / prior.seconds(sample.work) for sample in chosen)
                for total, chosen in ((old, others), (new, samples))
            )
    return old / new if new else None


def _median(values: Floats, weights: Floats) -> float:
    """Return the weighted median: the least value with half of the weight at or below it."""
    order = values.argsort()
    total = weights[order].cumsum()
    return float(values[order][np.searchsorted(total, total[-1] / 2)])


def _robust(shares: Floats, weights: Floats) -> Floats:
    """Solve `shares @ factors = 1` within bounds by iteratively reweighted least squares."""
    factors: Floats = np.ones(shares.shape[1])
    predicted: Floats = np.ones(len(shares))  # relative to the measured times
    for _ in range(ROUNDS):
        error = np.abs(1 / predicted - 1)
        tolerance = max(TOLERANCE, _median(error, weights))
        weighted = shares * (weights * tolerance / np.maximum(error, tolerance) / predicted**2)[:, None]
        factors, before = _bounded(weighted.T @ shares + PRIOR_WEIGHT * np.eye(len(factors)), weighted.sum(0)), factors
        predicted = shares @ factors
        if np.allclose(factors, before, rtol=1e-3):
            break
    return factors


def _bounded(matrix: Floats, right: Floats) -> Floats:
    """Minimise `x . matrix x / 2 - right . x` within bounds, where matrix and right side include the prior towards 1.

    Every unknown is free or at one of its bounds; with five unknowns all cases are solved at once.
    """
    right = right + PRIOR_WEIGHT
    inside: Floats = np.linalg.solve(matrix, right)
    if (inside >= 1 / BOUND).all() and (inside <= BOUND).all():
        return inside
    free = _CASES == 0
    fixed = np.choose(_CASES, (0.0, 1 / BOUND, BOUND))
    systems = np.where(free[:, :, None] & free[:, None, :], matrix, np.eye(len(matrix)))
    solutions = np.linalg.solve(systems, np.where(free, right - fixed @ matrix, fixed)[..., None])[..., 0]
    value = ((solutions @ matrix) * solutions).sum(1) / 2 - solutions @ right
    legal = ((solutions >= 1 / BOUND - 1e-12) & (solutions <= BOUND + 1e-9)).all(1)
    best: Floats = solutions[np.where(legal, value, np.inf).argmin()]
    return best


_CASES = np.array(list(itertools.product(range(3), repeat=len(Rates._fields))))  # 0: free, 1: least, 2: most


def _size(work: Work) -> tuple[int, ...]:
    """Return the size class of a run: runs of one class differ by at most a factor of 1.4 in every amount."""
    return tuple(round(2 * math.log2(1 + amount)) for amount in work)


def _row(sample: Sample) -> list[float]:
    return [sample.call, sample.runs, *map(int, sample.work), float(f"{sample.seconds:.5g}")]


def _counted(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= MOST_COUNTED:
        raise ValueError(f"no count: {str(value)[:80]}")
    return value


def _sample(row: Any, calls: int) -> Sample:
    call, runs, *amounts, seconds = row
    work = Work._make(map(_counted, amounts))
    in_time = type(seconds) in (int, float) and LEAST_SECONDS <= seconds <= MOST_SECONDS
    if not in_time or _counted(call) > calls or min(_counted(runs), work.launches) < 1:
        raise ValueError(f"not a sample: {str(row)[:80]}")
    return Sample(call, runs, work, float(seconds))


def file_name(executable: Executable, device: torch.device, attention: str = "", generated: bool = False) -> str:
    """Return the file name: readable parts, then a hash of all that the time of a run depends on besides its work."""
    read = [(executable.values[spec.index], spec.requires_grad) for spec in executable.region_parameters]
    known = [(value, trained) for value, trained in read if isinstance(value, TensorSpec)]
    dtypes = "-".join(sorted({str(value.dtype).removeprefix("torch.") for value, _ in known})) or "no-parameters"
    threads = f"{torch.get_num_threads()}-threads" if device.type == "cpu" else ""
    parameters = [(value.shape, str(value.dtype), trained) for value, trained in known]
    layers = [(x.mixer.name, x.states) for x in executable.mixers]
    masks = [str(x.mask) for x in executable.attention]
    made_by = (torch.__version__, "inductor" if generated else "eager")
    hashed = (made_by, executable.training, threads, attention, parameters, layers, masks, executable.chunk_digest)
    digest = hashlib.sha256(repr(hashed).encode()).hexdigest()[:12]
    words = [device_name(device), threads, dtypes, digest]
    return "-".join(re.sub(r"[^a-z0-9]+", "-", word.lower()).strip("-") for word in words if word) + ".json"


def device_name(device: torch.device) -> str:
    """Return the device's product name."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type != "cpu":
        return device.type
    try:
        match = re.search(r"^model name\s*:\s*(.+)$", pathlib.Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        match = None
    return f"cpu {match[1] if match else platform.processor() or platform.machine()}"
