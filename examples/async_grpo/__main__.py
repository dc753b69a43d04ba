"""Asynchronous multi-turn GRPO of a small model from scratch: see docs/use/asynchronous_rl.md.

    python -m examples.async_grpo FOLDER [--updates 100] [--way dta] [--workers 1]

FOLDER is all that there is of a run; the same command goes on with a run that was stopped or killed.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path

from .engine import NAMES
from .game import require_environment
from .run import RunFailed, run
from .settings import WAYS, Settings


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--engine", choices=NAMES, default="auto", help="default: Ray where it is installed")
    for field in dataclasses.fields(Settings):
        kind = {"updates": int, "seconds": float}.get(field.name, type(field.default))
        choices = WAYS if field.name == "way" else None
        text = f"default: {field.default}"
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=kind, choices=choices, default=None, help=text)
    arguments = vars(parser.parse_args())
    folder, engine = arguments.pop("folder"), arguments.pop("engine")
    given = {name: value for name, value in arguments.items() if value is not None}
    try:
        require_environment()
        known = Settings.load(folder) if (folder / "settings.json").exists() else Settings()
        run(folder, dataclasses.replace(known, **given), engine)
    except (RunFailed, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"stopped; the same command goes on with {folder}", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
