"""The command `dta estimate`: predict time and memory of a training step over a file of rollouts."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math

from rich.console import Console
from rich.table import Table

from dta_compile.cli.arguments import add_source, read_options, read_source, real, size, visible, whole, write
from dta_compile.errors import OptionError
from dta_compile.estimate.devices import DEVICES, Device, device_named
from dta_compile.estimate.predict import OPTIMIZERS, SHARDS, Estimate, Prediction, Ranks, estimate, model_shape
from dta_compile.files import read_text
from dta_compile.options import CHOICES, Options
from dta_compile.plan import CostModel

FIGURE = real(1e-6, 1e9)  # range of device figures: TFLOP/s, TB/s, GB
MOST_COLUMNS = 1000
NOTES = """\
Ranges: steps measured on an H100 took 0.80 to 1.02 of what is predicted, memory 1.06 to 1.14; a device that was
not measured gets a factor of 2. Others are priced at the same rates, and scaled as they were measured there: dense
steps took 1.0 to 1.8 times as long, with checkpoints 1.7 to 3.7, packed trees 1.1 to 1.7. Not in it: the time of the
optimiser and of what ranks send each other, what the loss keeps. Sliding windows are priced as full attention."""


def add_estimate(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `dta estimate`."""
    parser.set_defaults(run=_run)
    parser.description = (
        "Tokens, memory by sweep and budget and the time of a step (forward and backward), against dense training and "
        "a packed tree, and in words what fits. 16-bit weights, gradients summed in float32."
    )
    parser.add_argument(
        "config", metavar="CONFIG", help="config.json of transformers, its folder, or a name of the hub"
    )
    add_source(parser)
    parser.add_argument("--device", default="h100", help=f"{', '.join(DEVICES)} (default: %(default)s)")
    parser.add_argument("--tflops", type=FIGURE, help="its peak in 16 bits, in place of the data sheet's")
    parser.add_argument("--bandwidth", type=FIGURE, metavar="TB/S", help="of its memory")
    parser.add_argument("--memory", type=FIGURE, metavar="GB", help="that it has")
    parser.add_argument("--calibration", metavar="FILE", help="measured rates, as compiled calls keep them (cache_dir)")
    parser.add_argument("--ranks", type=whole(1, 2**16), default=1, help="that divide the batch (default: %(default)s)")
    parser.add_argument(
        "--shard",
        choices=SHARDS,
        default=SHARDS[0],
        help="fsdp: weights, gradients and states are divided among the ranks (default: %(default)s)",
    )
    parser.add_argument(
        "--optimizer",
        choices=OPTIMIZERS,
        default="none",
        help=f"and its bytes of a parameter: {', '.join(f'{name} {held}' for name, held in OPTIMIZERS.items())}",
    )
    parser.add_argument("--sweep", choices=CHOICES["sweep"], default="auto", help="default: both are predicted")
    parser.add_argument("--chunk-size", type=int, help="default: as the cost model chooses")
    parser.add_argument(
        "--memory-budget", type=size, metavar="SIZE", help="such as 8GB (default: half of what is free)"
    )
    parser.add_argument("--leaf-only", action="store_true", help="leave out sequences that are prefixes of others")
    parser.add_argument("--json", metavar="OUT", help="write it as JSON to OUT (- for stdout) and print nothing")


def _run(arguments: argparse.Namespace) -> int:
    bandwidth, memory = arguments.bandwidth and arguments.bandwidth * 1e12, arguments.memory and arguments.memory * 1e9
    device = device_named(arguments.device, arguments.tflops, bandwidth, memory)
    options = Options(arguments.chunk_size, sweep=arguments.sweep, memory_budget=arguments.memory_budget)
    ranks = Ranks(arguments.ranks, arguments.shard, arguments.optimizer)
    batches = read_source(arguments.file, read_options(arguments), arguments.leaf_only).batches
    sequences = max(batches, key=lambda batch: sum(map(len, batch)), default=[])  # the largest file of a folder
    if not any(map(len, sequences)):
        raise OptionError("no sequences to estimate", where=arguments.file)
    cost = None if arguments.calibration is None else _calibrated(arguments.calibration)
    shape = model_shape(arguments.config)
    result, default = estimate(sequences, shape, device, options, cost, ranks), None
    if options.memory_budget is not None and (result.best is None or result.best.budget != options.memory_budget):
        default = estimate(sequences, shape, device, dataclasses.replace(options, memory_budget=None), cost, ranks)
    if arguments.json:
        figures = {"stats": result.plan.stats, **vars(result), "model": shape}
        del figures["plan"]
        write(arguments.json, json.dumps(figures, indent=1, default=dataclasses.asdict) + "\n")
        return 0
    console = Console(highlight=False)
    size = f"{shape.parameters / 1e9:.2f}B parameters, {shape.layers} layers"
    console.print(f"{visible(shape.name)}: {size}", soft_wrap=True, markup=False)
    _print(result, default, device, console)
    return 0


def _calibrated(path: str) -> CostModel:
    from dta_compile.runtime.measure.calibration import MOST_BYTES, Calibration

    try:
        return Calibration.from_json(read_text(path, MOST_BYTES), prior=CostModel.of_gpu()).cost_model()
    except ValueError as error:
        raise OptionError("not a calibration", expected="a file of the cache folder", got=f"{path}: {error}") from error


def _print(result: Estimate, default: Estimate | None, device: Device, console: Console) -> None:
    stats = result.plan.stats
    shared = f"C {stats.compression:.2f}, attention {stats.attention_compression:.2f}"
    ranks, batches = result.ranks.count, result.batches
    whose = f"largest batch of {ranks:,} ranks with {batches} each: " if ranks * batches > 1 else ""
    console.print(
        f"{whose}{stats.sequences:,} sequences, {stats.tokens:,} tokens, {stats.tree_tokens:,} to run ({shared}), "
        f"{result.head_rows:,} rows of the head",
        soft_wrap=True,
    )
    console.print(f"times by {visible(result.source)}", soft_wrap=True, markup=False)
    table = Table(box=None, pad_edge=False, header_style="dim")
    for title in ("", "seconds", "range", "times", "peak GB", "forwarded twice", "chunks"):
        table.add_column(title, justify="right" if title else "left", no_wrap=True)
    for prediction in result.ours:
        table.add_row(*_row(prediction, result), style="bold" if prediction is result.best else "")
    for prediction in result.others:
        table.add_row(*_row(prediction, result))
    wide = console.options.update(max_width=MOST_COLUMNS)
    console.width = max(console.width, console.measure(table, options=wide).maximum)  # figures are never cut
    console.print(table)
    console.print(NOTES, style="dim", soft_wrap=True)
    console.print(verdict(result, device), soft_wrap=True, markup=False)
    if default and default.best and default.best.seconds < (result.best.seconds if result.best else math.inf):
        console.print(f"without --memory-budget: {_with(default.best, default)}", soft_wrap=True)


def verdict(result: Estimate, device: Device) -> str:
    """Say whether the step fits and with which options, or how many ranks it would need."""
    ranks, best = result.ranks, result.best
    where = f"{ranks.count:,} x {visible(device.name)}" if ranks.count > 1 else visible(device.name)
    optimiser = "no optimiser" if ranks.optimizer == "none" else f"{ranks.optimizer} in it"
    memory = f"{device.memory / 1e9:,.0f} GB of memory, {result.usable / 1e9:,.0f} of them for plans"
    if best is not None:
        return f"verdict: fits {where} ({memory}, {optimiser}) with {_with(best, result)}"
    leanest = min(result.ours, key=lambda prediction: prediction.bytes)
    text = f"verdict: does not fit {where} ({memory}, {optimiser}): at least {leanest.bytes / 1e9:,.1f} GB"
    text += f", {result.fixed_bytes / 1e9:,.1f} of them for weights, gradients and the optimiser"
    if result.ranks_needed is None:
        return f"{text}; no number of ranks makes it fit, so train shorter sequences or take a smaller model"
    return f"{text}; it would with --ranks {result.ranks_needed} --shard fsdp"


def _with(best: Prediction, result: Estimate) -> str:
    """Return options in words, with what a step takes by them; where all is kept, a budget that is enough for all."""
    budget = best.bytes - result.fixed_bytes if best.budget is None else best.budget
    kept = f"{math.ceil(budget / 1e8) / 10:.1f}GB" if budget >= 1e9 else f"{math.ceil(budget / 1e6)}MB"
    options = f"options={{'sweep': '{best.sweep}', 'memory_budget': '{kept}'}}"
    parts = f", each rank's batch in {result.batches} one after another" if result.batches > 1 else ""
    least, most = (_seconds(best.seconds * factor) for factor in best.factors)
    return f"{options}{parts}: {best.bytes / 1e9:,.1f} GB, {_seconds(best.seconds)} s, {least} to {most} s"


def _row(prediction: Prediction, result: Estimate) -> tuple[str, ...]:
    least, most = (prediction.seconds * factor for factor in prediction.factors)
    reference = (result.best or result.ours[0]).seconds
    return (
        prediction.name,
        _seconds(prediction.seconds),
        f"{_seconds(least)} to {_seconds(most)}",
        f"{prediction.seconds / reference:.2f}" if reference else "",
        f"{prediction.bytes / 1e9:,.1f}{'' if prediction.bytes <= result.usable else ' (too much)'}",
        f"{prediction.forwarded_twice:,}",
        f"{prediction.chunk_size:,}" if prediction.chunk_size else "",
    )


def _seconds(value: float) -> str:
    return f"{value:.2f}" if value >= 0.1 else f"{value:.2g}"
