"""Who runs the processes: Ray's actors, or torch.multiprocessing where Ray is missing."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from typing import Any, Protocol

import torch.multiprocessing

NAMES = ("auto", "ray", "processes")


class Handle(Protocol):
    """A process that was started."""

    def ended(self) -> bool | None:
        """None while it runs; then whether it ended by itself and without an error."""

    def kill(self) -> None:
        """End it at once."""


class Engine(Protocol):
    """Starts processes."""

    def start(self, function: Callable[..., None], *args: Any) -> Handle:
        """A process that calls the function."""

    def close(self) -> None:
        """Let go of everything."""


def make_engine(name: str) -> Engine:
    """The engine of a name; "auto" is Ray where it is installed.

    Raises:
        ValueError: an unknown name, or Ray is asked for and not installed.
    """
    if name not in NAMES:
        raise ValueError(f"unknown engine {name!r}; expected one of {', '.join(NAMES)}")
    has_ray = importlib.util.find_spec("ray") is not None
    if name == "ray" and not has_ray:
        raise ValueError("the engine 'ray' needs Ray: pip install ray, or choose 'processes'")
    return RayEngine() if has_ray and name != "processes" else ProcessEngine()


class ProcessEngine:
    """torch.multiprocessing, every process from a clean start."""

    def __init__(self) -> None:
        self._context = torch.multiprocessing.get_context("spawn")

    def start(self, function: Callable[..., None], *args: Any) -> Handle:
        process = self._context.Process(target=function, args=args, daemon=True)
        process.start()
        return _Process(process)

    def close(self) -> None:
        pass


class _Process:
    def __init__(self, process: Any) -> None:
        self._process = process

    def ended(self) -> bool | None:
        return None if self._process.is_alive() else self._process.exitcode == 0

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


class RayEngine:
    """An actor for every process, on this machine: the run's folder is what they share."""

    def __init__(self) -> None:
        import ray

        self._ray, self._ours = ray, not ray.is_initialized()
        if self._ours:
            variables = {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
            ray.init(log_to_driver=True, include_dashboard=False, runtime_env={"env_vars": variables})

    def start(self, function: Callable[..., None], *args: Any) -> Handle:
        actor = self._ray.remote(_Caller).options(num_cpus=0).remote()
        return _Actor(self._ray, actor, actor.call.remote(function, *args))

    def close(self) -> None:
        if self._ours:
            self._ray.shutdown()


class _Caller:
    """What an actor is an instance of."""

    def call(self, function: Callable[..., None], *args: Any) -> None:
        function(*args)


class _Actor:
    def __init__(self, ray: Any, actor: Any, result: Any) -> None:
        self._ray, self._actor, self._result = ray, actor, result

    def ended(self) -> bool | None:
        done, _ = self._ray.wait([self._result], timeout=0)
        if not done:
            return None
        try:
            self._ray.get(self._result)
        except self._ray.exceptions.RayError:
            return False
        return True

    def kill(self) -> None:
        self._ray.kill(self._actor)
