"""Many drawn programs on all cores: `make fuzz N=2000 SEED=7`, or `make fuzz-relations`, which asks them for what
tests/fuzz/relations.py lists. What is drawn depends on N and SEED alone."""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from typing import Any

import torch._dynamo.config
from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.fuzz import metamorphic
from tests.fuzz import program as drawn_program
from tests.fuzz.grammar import programs
from tests.fuzz.metamorphic import BAD
from tests.fuzz.minimise import minimised
from tests.fuzz.program import Program

BLOCK = 25  # programs of one process, whose memory and whose crashes are its own
MANY = 1_000_000  # programs between two seeds
SECONDS = 5400  # for a block
ATTEMPTS = 40  # to make a failing program smaller

WORTHWHILE = 80  # percent that must run rather than be refused, of programs that a tree can share


def drawn(number: int) -> Program:
    """The program of a number. Two are drawn, for the first that hypothesis draws is always the plainest."""
    found: list[Program] = []
    twice = settings(
        max_examples=2,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    seed(number)(twice(given(programs())(lambda program: found.append(program))))()
    return found[-1]


def run_block(count: int, first: int, smaller: bool, relations: bool) -> None:
    """Prints a line of JSON before and after each program."""
    verdict = metamorphic.verdict if relations else drawn_program.verdict
    torch.set_num_threads(1)
    torch._dynamo.config.fake_tensor_cache_enabled = False
    for number in range(first, first + count):
        program = drawn(number)
        mixes = program.mixes
        print(json.dumps({"number": number, "source": program.source()}), flush=True)
        kind, detail = verdict(program)
        if kind in BAD and smaller:
            program = minimised(program, kind, ATTEMPTS, verdict)
            kind, detail = verdict(program)
        source = program.source() if kind in BAD else ""
        print(
            json.dumps({"number": number, "kind": kind, "detail": detail, "source": source, "mixes": mixes}), flush=True
        )


def collect(count: int, first: int, flags: list[str]) -> list[dict[str, Any]]:
    """The verdicts of a block, run in a process of its own."""
    command = [sys.executable, "-m", "tests.fuzz", "-n", str(count), "--block", str(first)]
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "DTA_CACHE_DIR": cache}
        try:
            done = subprocess.run(
                command + flags,
                capture_output=True,
                text=True,
                timeout=SECONDS,
                env=environment,
            )
            output, end = done.stdout, f"exit code {done.returncode}: {done.stderr[-500:]}" * bool(done.returncode)
        except subprocess.TimeoutExpired as error:
            output, end = (error.stdout or b"").decode(), f"not done after {SECONDS} s"
    lines = [json.loads(line) for line in output.splitlines() if line.startswith('{"number"')]
    found = [line for line in lines if "kind" in line]
    if end:
        last = lines[-1] if lines and "kind" not in lines[-1] else {"number": first, "source": ""}
        found.append({**last, "kind": "crashed", "detail": f"the process: {end}"})
    return found


def report(found: list[dict[str, Any]], folder: pathlib.Path) -> int:
    """Prints the summary, saves what failed, returns the exit code."""
    kinds = collections.Counter(one["kind"] for one in found)
    ran = kinds["equal"] + sum(kinds[kind] for kind in BAD)
    rightly = sum(one["kind"] == "refused" and one.get("mixes", False) for one in found)
    valid = max(ran + kinds["refused"] - rightly, 1)
    dense = sum(one["detail"] == "dense" for one in found)
    print(
        f"\n{len(found)} drawn, {kinds['discarded']} discarded, {kinds['equal']} equal ({dense} of them as captured), "
    )
    print(
        f"{kinds['refused']} refused ({rightly} of them mix tokens), {kinds['wrong']} wrong, {kinds['crashed']} crashed"
    )
    print(f"{100 * ran / valid:.0f}% ran rather than being refused (at least {WORTHWHILE}% are expected)")
    for kind in ("refused", "discarded"):
        reasons = collections.defaultdict(list)
        for one in found:
            if one["kind"] == kind and not one.get("mixes"):
                reasons[_reason(one["detail"])].append(one["number"])
        for reason, numbers in sorted(reasons.items(), key=lambda item: -len(item[1]))[:20]:
            print(f"  {kind} {len(numbers):4d}  {reason} (number {', '.join(map(str, numbers[:3]))})")
    failures = [one for one in found if one["kind"] in BAD]
    for failure in failures:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{failure['kind']}_{failure['number']}.py"
        path.write_text(failure["source"] or f"# {failure['detail']}\n")
        print(f"\n{path}: {failure['kind']}: {failure['detail'][:1500]}")
    return int(bool(failures))


def _reason(detail: str) -> str:
    """The first line of a message, and what was got."""
    lines = detail.splitlines()
    got = [line.strip() for line in lines if line.strip().startswith("got: ")]
    return " | ".join([lines[0][:120], *got])[:260]


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-n", type=int, default=200, help="programs to draw")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("fuzz_failures"))
    parser.add_argument("--as-drawn", action="store_true", help="do not make failing programs smaller")
    parser.add_argument("--relations", action="store_true", help="metamorphic relations in place of eager's results")
    parser.add_argument("--block", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.block is not None:
        run_block(options.n, options.block, not options.as_drawn, options.relations)
        return 0
    blocks = [(min(BLOCK, options.n - start), MANY * options.seed + start) for start in range(0, options.n, BLOCK)]
    flags = ["--as-drawn"] * options.as_drawn + ["--relations"] * options.relations
    found: list[dict[str, Any]] = []
    with concurrent.futures.ThreadPoolExecutor(options.workers) as pool:
        tasks = [pool.submit(collect, n, first, flags) for n, first in blocks]
        for task in concurrent.futures.as_completed(tasks):
            found += task.result()
            counts = collections.Counter(one["kind"] for one in found)
            print(f"{len(found)} of {options.n}: {dict(counts)}", flush=True)
    return report(found, options.output)


if __name__ == "__main__":
    sys.exit(main())
