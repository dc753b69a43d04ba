"""Check equality, speed and memory on one GPU, in one call of under nine minutes.

    python -m benchmarks.gpu --rollouts FOLDER

checks equality with float64, that no uninitialised memory is read, and that nothing synchronises or recompiles. Then it
runs Qwen3-1.7B, 4B and 8B (all layers, random bfloat16 weights) on batches of rollouts: one sequence at a time with and
without checkpointing, leaves only, a packed tree mask with FlexAttention, and dta. It prints a table per model and
batch and the acceptance lines, and writes results.json (after every item) and plots to `--output`. Items that did not
fit into `--seconds` are listed, and a second call resumes the first:

    python -m benchmarks.gpu --rollouts FOLDER --resume build/gpu/results.json

Other calls: `--part checks`, `--models 8b --workloads airline_think`, `--only 'speed/*/auto'`, `--part ablations`,
`--part attention` (kernels alone, also with other block sizes), and without a GPU `--smoke`: everything with a toy
model on the CPU.

A batch consists of whole groups of rollouts whose compression is close to that of their file, if any fits: it has at
most `--max-tokens`, and a step over its tree takes at most `--tree-seconds` by estimate. One sequence at a time is
slow: beyond `--dense-seconds` only every n-th sequence by length runs, and the time is scaled by the number of
operations (the tables say so). Memory peaks are `torch.cuda.max_memory_allocated` of the timed steps, including weights
and gradients. Tokens per second count all tokens of all sequences; MFU is relative to 989 TFLOP/s, by the operations of
all sequences and by those of the tree. `benchmarks/gpu/methods.py` says how the rivals are tuned.

This process never opens the GPU: a child process does, and is restarted if an error leaves the device unusable.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

PARTS = "checks,speed,memory,graphs"
MODELS = "1.7b,4b,8b"
WORKLOADS = "airline_think,airline_modprefix,mathlike,aimelike,retail_think"
BUNDLED = "airline_tiny"
CONCLUDING = 25.0  # seconds reserved for tables and plots at the end
GRACE = 30.0  # seconds that the last item may exceed its estimate
LEAST = 45.0  # least seconds left for which starting another process pays


def main(argv: Sequence[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = _parser()
    arguments = _complete(parser, parser.parse_args(argv))
    if arguments.worker:
        return _work(arguments)
    file = arguments.output / "results.json"
    if arguments.resume is None:
        file.unlink(missing_ok=True)  # so that the final file belongs to this run
    status = _work(arguments) if arguments.smoke else _supervise(arguments, argv, file)
    if file.is_file():
        from rich.console import Console

        from benchmarks.gpu_report import conclude

        conclude(file, Console(width=160))
    return status


def _work(arguments: argparse.Namespace) -> int:
    from benchmarks.gpu.run import run  # imported here: torch takes seconds

    return run(arguments)


def _supervise(arguments: argparse.Namespace, argv: list[str], file: Path) -> int:
    """Run the work in a child process, and after each one that broke the device, in another for the rest."""
    end = time.monotonic() + arguments.seconds - CONCLUDING
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}  # output is visible even if a process is killed
    status, more = 0, ["--resume", str(arguments.resume)] if arguments.resume else []
    while (left := end - time.monotonic()) > LEAST:
        before = file.read_bytes() if file.is_file() else b""
        command = [sys.executable, "-m", "benchmarks.gpu", *argv, *more, "--worker", "--seconds", f"{left:.0f}"]
        try:
            status = subprocess.run(command, timeout=left + GRACE, env=environment).returncode
        except subprocess.TimeoutExpired:
            return 1
        if status == 0 or not file.is_file() or file.read_bytes() == before:
            return status
        more = ["--resume", str(file), "--keep-failures"]
    return status


def _complete(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> argparse.Namespace:
    """Fill in defaults that depend on other arguments; exit on missing files."""
    arguments.models = arguments.models or ("tiny" if arguments.smoke else MODELS)
    arguments.workloads = arguments.workloads or (WORKLOADS if arguments.rollouts else BUNDLED)
    if arguments.smoke:
        arguments.max_tokens = min(arguments.max_tokens, 1500)
    if arguments.rollouts:
        files = [arguments.rollouts / f"{name}.npz" for name in arguments.workloads.split(",")]
        if missing := [str(file) for file in files if not file.is_file()]:
            parser.error(f"no file {', '.join(missing)}")
    elif arguments.workloads != BUNDLED:
        parser.error(f"without --rollouts there is {BUNDLED} alone")
    if arguments.resume and not arguments.resume.is_file():
        parser.error(f"no file {arguments.resume}")
    return arguments


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", metavar="NAMES", default=PARTS, help="or ablations, attention (default: %(default)s)")
    parser.add_argument("--models", metavar="NAMES", help=f"default: {MODELS}")
    parser.add_argument("--workloads", metavar="NAMES", help=f"default: {WORKLOADS}, or {BUNDLED} without --rollouts")
    parser.add_argument("--only", metavar="PATTERN", default="*", help="of items, as in 'speed/8b/*/auto'")
    parser.add_argument("--rollouts", type=Path, metavar="FOLDER", help="of rollout files; default: the bundled one")
    parser.add_argument("--output", type=Path, default=Path("build/gpu"), help="default: %(default)s")
    parser.add_argument("--resume", type=Path, metavar="JSON", help="go on with a run; what failed is tried again")
    parser.add_argument("--seconds", type=float, default=520.0, help="for everything (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=327_680, help="of a batch (default: %(default)s)")
    parser.add_argument("--tree-seconds", type=float, default=4.5, help="of a step, by estimate (default: %(default)s)")
    parser.add_argument("--dense-seconds", type=float, default=15.0, help="likewise, of rivals (default: %(default)s)")
    parser.add_argument("--smoke", action="store_true", help="a toy model on the CPU")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--keep-failures", action="store_true", help=argparse.SUPPRESS)
    return parser
