"""Start a trainer like `accelerate launch` with FSDP2 on gloo ranks: eagerly, then over the tree.

    accelerate launch --config_file CONFIG -m tests.support.launched OUT.json WAY '{"settings": 1}'

accelerate enables FSDP only on accelerators; `with_fsdp_on_cpus` is the only change to its state.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any
from unittest import mock

from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType

CONFIG = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
num_machines: 1
num_processes: {ranks}
mixed_precision: 'no'
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_cpu_ram_efficient_loading: false
  fsdp_reshard_after_forward: true
  fsdp_state_dict_type: FULL_STATE_DICT
"""


def launch(way: str, ranks: int = 2, **settings: Any) -> list[dict[str, Any]]:
    """Return every rank's `difference` of the weights, `wrapped` modules, and `compression` of each call."""
    with tempfile.TemporaryDirectory() as folder:
        config, out = pathlib.Path(folder, "config.yaml"), pathlib.Path(folder, "out.json")
        config.write_text(CONFIG.format(ranks=ranks))
        command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config)]
        command += ["--module", "tests.support.launched", str(out), way, json.dumps(settings)]
        environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
        root = pathlib.Path(__file__).parents[2]
        done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=400)
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(out.read_text())  # type: ignore[no-any-return]


@contextlib.contextmanager
def with_fsdp_on_cpus() -> Iterator[None]:
    """Give accelerate's state the settings that it takes only on several accelerators."""
    start = AcceleratorState.__init__

    def start_with_fsdp(self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        start(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None:
            self.fsdp_plugin = fsdp_plugin
        if self._shared_state.get("fsdp_plugin") is not None:
            self.distributed_type = DistributedType.FSDP

    with mock.patch.object(AcceleratorState, "__init__", start_with_fsdp):
        yield


def main(out: str, way: str, settings: str) -> None:
    import torch.distributed as dist
    from torch.distributed.fsdp import FSDPModule

    from tests.support import trainers

    class Watch(trainers.TrainerCallback):
        wrapped = 0

        def on_train_begin(self, *args: Any, model: Any = None, **kwargs: Any) -> None:
            self.wrapped = sum(isinstance(module, FSDPModule) for module in model.modules())

    watch = Watch()

    def run(compiled: Any = None) -> trainers.Run:
        def make(folder: str, callbacks: list[Any], **given: Any) -> Any:
            return getattr(trainers, way)(folder, [*callbacks, watch], **given)

        return trainers.train(make, compiled, **json.loads(settings))

    with with_fsdp_on_cpus():
        eager, ours = run(), run(trainers.callback)
    figures = {
        "difference": trainers.difference(eager, ours),
        "moved": trainers.moved(ours),
        "wrapped": watch.wrapped,
        "compression": [plan.stats.compression for plan in ours.plans],
    }
    all_figures: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(all_figures, figures)
    if dist.get_rank() == 0:
        pathlib.Path(out).write_text(json.dumps(all_figures))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
