"""Run the step of fsdp2_grpo.py under Ray Train, which starts the ranks and their process group.

pip install "ray[train]"
python examples/ray_train.py [--workers 2] [--gpu]
"""

from __future__ import annotations

import argparse
from typing import Any

import fsdp2_grpo
import ray
from ray.train import RunConfig, ScalingConfig, report
from ray.train.torch import TorchConfig, TorchTrainer

# Pickle by value, as workers may not have this folder.
ray.cloudpickle.register_pickle_by_value(fsdp2_grpo)


def train_loop(config: dict[str, Any]) -> None:
    """Run the training on one worker; `report` is a collective, so all of them call it."""
    fsdp2_grpo.train(fsdp2_grpo.Settings(steps=config["steps"]))
    report({"steps": config["steps"]})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--gpu", action="store_true", help="one GPU per worker")
    arguments = parser.parse_args()
    trainer = TorchTrainer(
        train_loop,
        train_loop_config={"steps": arguments.steps},
        torch_config=TorchConfig(backend="nccl" if arguments.gpu else "gloo"),
        scaling_config=ScalingConfig(num_workers=arguments.workers, use_gpu=arguments.gpu),
        run_config=RunConfig(name="dta_fsdp2_grpo"),
    )
    trainer.fit()  # raises the errors of workers
    print(f"trained {arguments.steps} steps on {arguments.workers} workers")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
