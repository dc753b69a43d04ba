"""Scenarios of `distributed_worker` with `fully_shard` on every layer, the way trainers apply it."""

from __future__ import annotations

import functools
import gc
import types
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as group
from torch.distributed.tensor import DTensor

import dta_compile
from benchmarks.measuring.allocations import allocated_at_the_peak, counting
from dta_compile.errors import RuntimeContractError
from dta_compile.integrations.fully_shard import groups_of
from dta_compile.integrations.fully_shard_by_layer import LayerGroups
from dta_compile.runtime import engine
from tests.support.ranks import EXACT, Trained, Wrapped, assert_equal, reference, resume, trained
from tests.support.recurrent import no_float32_islands
from tests.support.tiny import SMALL_CHUNKS, TinyLM, assert_same, shared_ids, weighted

Model = Callable[[], torch.nn.Module]


def tiny(tied: bool = False, layers: int = 2) -> torch.nn.Module:
    model = TinyLM(layers=layers)
    if tied:
        model.head.weight = model.embedding.weight
    return model


def toy(name: str) -> torch.nn.Module:
    from tests.support.families import build

    return build(name, num_hidden_layers=2, hidden_size=32, intermediate_size=48, use_cache=False)


def by_hand(model: torch.nn.Module, **options: Any) -> torch.nn.Module:
    """Shard each layer, then the rest of the model."""
    for layer in model.blocks if isinstance(model, TinyLM) else model.model.layers:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def by_accelerate(model: torch.nn.Module) -> torch.nn.Module:
    """Shard with accelerate's own wrapping, which `Accelerator.prepare` applies only on GPUs."""
    from accelerate import FullyShardedDataParallelPlugin
    from accelerate.utils.fsdp_utils import fsdp2_prepare_model

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", cpu_ram_efficient_loading=False
    )
    state = types.SimpleNamespace(fsdp_plugin=plugin)
    accelerator = types.SimpleNamespace(
        state=state, mixed_precision="no", device=torch.device("cpu"), is_main_process=dist.get_rank() == 0
    )
    return fsdp2_prepare_model(accelerator, model)


def wrapped(model: torch.nn.Module, whole: bool = False, options: Any = SMALL_CHUNKS) -> Wrapped:
    """Compile a sharded model, in place or (`whole`) as part of a function of ids and mask."""
    trained = Trained(model)
    if whole:
        return Wrapped("fsdp2", trained, torch.compile(trained.forward, backend="dta", options=options), model)
    model.compile(backend="dta", options=options)
    return Wrapped("fsdp2", trained, trained, model)


def train(
    build: Model, shard: Callable[..., torch.nn.Module] = by_hand, whole: bool = False, clip: float = 0.0, **how: Any
) -> None:
    expected = reference("fsdp2", clip=clip, build=lambda: Trained(build()))
    ranks = wrapped(shard(build()), whole)
    assert_equal(trained(ranks, clip=clip, **how).parameters(), expected, EXACT)
    assert is_sharded(ranks.wrapped)
    assert dta_compile.last_plan(ranks.forward if whole else ranks.wrapped).stats.tree_tokens >= 0


def train_toy(name: str, **how: Any) -> None:
    with no_float32_islands():
        train(functools.partial(toy, name), **how)


def is_sharded(model: torch.nn.Module) -> bool:
    return all(isinstance(parameter, DTensor) for parameter in model.parameters())


def is_freed(module: torch.nn.Module) -> bool:
    return not any(group.is_unsharded for group in groups_of([module._get_fsdp_state()]))


def hybrid(model: torch.nn.Module) -> torch.nn.Module:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("copy", "shard"))
    return by_hand(model, mesh=mesh)


def offloaded(model: torch.nn.Module) -> torch.nn.Module:
    return by_hand(model, offload_policy=CPUOffloadPolicy(pin_memory=False))


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the full gradients, gathered from all ranks, and clear them."""
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    full = {name: grad.full_tensor() if isinstance(grad, DTensor) else grad for name, grad in grads.items()}
    model.zero_grad()
    return full


def own_ids(seed: int = 1) -> torch.Tensor:
    """Return different rows on each rank, more on higher ranks."""
    return shared_ids(batch=2 + dist.get_rank(), seed=10 * seed + dist.get_rank())


def pair(
    shard: Callable[..., torch.nn.Module] = by_hand,
    compile_options: Any = SMALL_CHUNKS,
    layers: int = 2,
    **options: Any,
) -> tuple[torch.nn.Module, torch.nn.Module, torch.nn.Module]:
    """Return a sharded model for eager mode, a copy of it, and the copy compiled."""
    eager, model = (shard(tiny(layers=layers), **options) for _ in range(2))
    return eager, model, torch.compile(model, backend="dta", options=compile_options)


def both(models: Sequence[Any], run: Callable[[Any], Any], tolerance: float = 1e-9) -> None:
    """Assert that a step returns the same values and gradients in eager FSDP2 and over the tree."""
    eager, model, compiled = models
    expected = run(eager), gradients(eager)
    assert_same((run(compiled), gradients(model)), expected, tolerance)


def crossed(forward: Any, order: Sequence[int]) -> Any:
    """Run the backward passes of two graphs that are alive at the same time, in the given order."""
    outputs = [forward(own_ids(seed)) for seed in (1, 2)]
    with torch.no_grad():
        scored = forward(own_ids(3))
    for index in order:
        weighted(outputs[index]).backward()
    return scored


def collectives(run: Callable[[], None]) -> tuple[int, int]:
    """Return how many groups are gathered and reduced during a run."""
    with (
        mock.patch.object(group, "foreach_all_gather", wraps=group.foreach_all_gather) as gathered,
        mock.patch.object(group, "foreach_reduce", wraps=group.foreach_reduce) as reduced,
    ):
        run()
    return gathered.call_count, reduced.call_count


def prefetching() -> AbstractContextManager[Any]:
    """Prefetch layers as on a GPU."""
    return mock.patch.object(LayerGroups, "_to_prefetch", LayerGroups._of)


def calls_of_all_kinds() -> None:
    """Check two live graphs in both orders, calls without graph or backward, and weights written in between.

    All layers are gathered together.
    """
    models = pair(compile_options={**SMALL_CHUNKS, "sweep": "chunks"})
    eager, model, compiled = models
    shards = [*eager.parameters(), *model.parameters()]  # the objects that an optimiser holds
    both(models, functools.partial(crossed, order=(0, 1)))
    both(models, functools.partial(crossed, order=(1, 0)))
    assert is_sharded(model)
    assert collectives(lambda: weighted(compiled(own_ids())).backward()) == (3, 3)  # groups: two layers, and the rest
    model.zero_grad()
    with torch.no_grad():
        compiled(own_ids())
    assert all(is_sharded(block) and is_freed(block) for block in model.blocks)
    outputs = compiled(own_ids())
    assert is_sharded(model.blocks[0]) and not is_freed(model.blocks[0])
    with torch.no_grad():  # after a forward without backward, the gathered copy is stale
        for parameter in shards:
            parameter.mul_(1.5)
    both(models, lambda forward: weighted(forward(own_ids())).backward())
    both(models, functools.partial(crossed, order=(0, 1)))
    outputs = compiled(own_ids())
    assert is_sharded(model.blocks[0]) and not is_freed(model.blocks[0])
    del outputs
    gc.collect()
    assert all(is_sharded(block) and is_freed(block) for block in model.blocks)
    both(models, lambda forward: weighted(forward(own_ids())).backward())
    # Outside of compiled calls every layer is gathered and freed as in eager mode.
    freed = []
    handle = model.blocks[0].register_forward_hook(lambda *_: freed.append(is_sharded(model.blocks[1])))
    both((eager, model, model), lambda forward: weighted(forward(own_ids())).backward())
    handle.remove()
    assert freed == [True] and isinstance(model.blocks[0], FSDPModule)


def layer_by_layer() -> None:
    """Check that layers are gathered only while they run, except in the first call, which is compared with eager mode.

    Covers trees of any size, a rank without a tree, and two live graphs.
    """
    models = pair(compile_options={**SMALL_CHUNKS, "memory_budget": 0})
    _, model, compiled = models
    for seed in (1, 2):
        both(models, lambda forward, seed=seed: weighted(forward(own_ids(seed))).backward())
        assert "outputs within" in dta_compile.last_plan(compiled).estimates.self_check
    both(models, functools.partial(crossed, order=(0, 1)))
    both(models, functools.partial(crossed, order=(1, 0)))

    def step() -> None:
        logits = compiled(own_ids())
        assert all(is_sharded(block) for block in model.blocks)
        weighted(logits).backward()
        model.zero_grad()

    assert collectives(step) == (2 * 2 + 1, 3)  # two layers, and the rest
    with prefetching():
        assert collectives(step) == (2 * 2 + 1, 3)
    assert dta_compile.last_plan(compiled).schedule.sweep == "stages"
    none = torch.zeros(own_ids().shape, dtype=torch.bool) if dist.get_rank() else torch.ones(own_ids().shape).bool()
    weighted(compiled(own_ids(), none)[none]).backward()  # a rank without tokens still takes part
    model.zero_grad()
    with torch.no_grad():
        assert_same(compiled(own_ids()), models[0](own_ids()))
    with mock.patch.object(engine, "_pays_layer_by_layer", lambda call: dist.get_rank() == 0):  # one rank is short
        both(models, lambda forward: weighted(forward(own_ids())).backward())
        assert dta_compile.last_plan(compiled).schedule.sweep == "chunks"
    both(models, lambda forward: weighted(forward(own_ids())).backward())


def groups_of_subtrees() -> None:
    """Check groups of subtrees: layers are reduced with every group, as many on every rank, and hooks run once."""
    options = {**SMALL_CHUNKS, "memory_budget": 0, "groups": 2 + dist.get_rank()}
    models = pair(compile_options=options)
    _, model, compiled = models
    for seed in (1, 2, 3):
        both(models, lambda forward, seed=seed: weighted(forward(own_ids(seed))).backward())
    assert len(dta_compile.last_plan(compiled).schedule.groups) == 1 + dist.get_world_size()
    both(models, functools.partial(crossed, order=(0, 1)))
    called: list[str] = []
    hooks = [
        parameter.register_post_accumulate_grad_hook(functools.partial(lambda name, _: called.append(name), name))
        for name, parameter in model.named_parameters()
    ]
    counts = collectives(lambda: weighted(compiled(own_ids())).backward())
    for hook in hooks:
        hook.remove()
    groups = 1 + dist.get_world_size()
    assert sorted(called) == sorted(name for name, _ in model.named_parameters())
    # The first layer is gathered three times a group, twice in the last, whose hidden states stay; the second is in the
    # last part, which goes forward once.
    assert counts == (5 * groups, 2 * groups + 1)
    model.zero_grad()
    none = torch.zeros(own_ids().shape, dtype=torch.bool) if dist.get_rank() else torch.ones(own_ids().shape).bool()
    weighted(compiled(own_ids(), none)[none]).backward()  # a rank without tokens still takes part
    model.zero_grad()
    both(models, lambda forward: weighted(forward(own_ids())).backward())


def short_rows_on_a_rank() -> None:
    """Check that a rank whose call runs as captured gathers and reduces in the order of ranks that have a tree."""
    models = pair(compile_options={**SMALL_CHUNKS, "verify": "off"})
    for columns in (9, 1):
        ids = own_ids()[:, : columns if dist.get_rank() else 9]
        both(models, lambda forward, ids=ids: weighted(forward(ids)).backward())
        with torch.no_grad():
            assert_same(models[2](ids), models[0](ids), 1e-9)
    options = {**SMALL_CHUNKS, "verify": "first" if dist.get_rank() else "off"}  # which gathers everything on one rank
    both(pair(compile_options=options), lambda forward: weighted(forward(own_ids())).backward())


def failures(**options: Any) -> None:
    """Check that a failing call, or a backward that fails half-way, leaves no trace in later calls."""
    models = pair(compile_options={**SMALL_CHUNKS, **options})
    _, model, compiled = models

    def run(forward: Any) -> None:
        weighted(forward(own_ids())).backward()

    def fail(_: torch.Tensor) -> None:
        raise ValueError("out of luck")

    both(models, run)
    for attempt in (lambda: compiled(own_ids().float()), lambda: compiled(own_ids(), torch.ones(1, 1))):
        try:
            attempt()
        except Exception:
            pass
        else:
            raise AssertionError("no error")
        gc.collect()  # an error's traceback may hold outputs of a part that did run
        assert all(is_sharded(block) for block in model.blocks)
    both(models, run)
    logits = compiled(own_ids())
    weight = model.blocks[1].up.weight  # other parameters have their gradients by then
    if options.get("sweep") == "chunks":
        states = [model.blocks[1]._get_fsdp_state()]
        gathered = [parameter._unsharded_param for group in groups_of(states) for parameter in group.fsdp_params]
        hook = next(one for one in gathered if one.shape == weight.shape).register_hook(fail)
    else:
        hook = weight.register_post_accumulate_grad_hook(fail)
    try:
        weighted(logits).backward()
    except ValueError:
        hook.remove()
    else:
        raise AssertionError("no error")
    del logits
    model.zero_grad()  # drop gradients that were reduced before the failure
    both(models, run)
    both(models, run)


def mixed_precision() -> None:
    """Check float32 layers between float64 ones: casts at their borders like in eager FSDP2."""
    policy = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float64)

    def shard(model: torch.nn.Module) -> torch.nn.Module:
        for block in model.blocks:
            fully_shard(block, mp_policy=policy)
        fully_shard(model.head, mp_policy=MixedPrecisionPolicy(output_dtype=torch.float32, cast_forward_inputs=False))
        fully_shard(model.norm, mp_policy=MixedPrecisionPolicy(param_dtype=torch.float64))
        return fully_shard(model)

    models = pair(shard)
    both(models, lambda forward: [weighted(logits := forward(own_ids())).backward(), logits.detach()], 2e-5)
    assert models[2](own_ids()).dtype is torch.float32


def streams() -> None:
    """Check `streaming_step`, which bypasses autograd at the model's outputs, twice into the same gradients."""
    eager, model, compiled = pair()
    for _ in range(2):
        sum(weighted(logits) for logits in eager(own_ids())).backward()
        dta_compile.streaming_step(compiled, lambda row, logits: weighted(logits), own_ids())
    assert is_sharded(model)
    assert_same(gradients(model), gradients(eager))


def without_a_root() -> None:
    """Check a model with only its layers sharded: they reduce as in eager mode, the rest has rank-local gradients."""

    def shard(model: torch.nn.Module) -> torch.nn.Module:
        for block in model.blocks:
            fully_shard(block)
        return model

    eager, model, compiled = pair(shard)
    for forward in (eager, compiled):
        for seed in (1, 2):
            weighted(forward(own_ids(seed))).backward()
    assert_same(gradients(model), gradients(eager))


def backbone() -> None:
    """Check a sharded model whose layers are compiled alone, next to an eager model."""

    class Whole(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = Hidden()
            self.head = torch.nn.Linear(16, 5, dtype=torch.float64)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.model(ids))

    class Hidden(TinyLM):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.hidden(ids)

    models = []
    for _ in range(2):
        torch.manual_seed(3)
        whole = Whole()
        for block in whole.model.blocks:
            fully_shard(block)
        models.append(fully_shard(whole))
    eager, model = models
    model.model.compile(backend="dta", options=SMALL_CHUNKS)
    for _ in range(2):
        both((eager, model, model), lambda forward: weighted(forward(own_ids())).backward())
    assert dta_compile.last_plan(model.model).stats.tree_tokens > 0


def predicted_memory() -> None:
    """Check that the plan's peak is a step's: parameters gathered by then, reductions, gradient sums, activations."""
    counting()
    ids = torch.randint(31, (5 + dist.get_rank(), 60))
    for sweep, layers in (("auto", 6), ("chunks", 2)):
        torch.compiler.reset()
        options = {"memory_budget": 0, "sweep": sweep}
        compiled = torch.compile(by_hand(model := TinyLM(width=256, layers=layers)), backend="dta", options=options)

        def step(compiled: Any = compiled, model: torch.nn.Module = model) -> None:
            weighted(compiled(ids)).backward()
            model.zero_grad(set_to_none=False)

        step()  # gathers all, to compare it with eager mode
        step()
        peak = allocated_at_the_peak(step)
        estimates = dta_compile.last_plan(compiled).estimates
        size = sum(parameter.numel() * parameter.itemsize for parameter in model.parameters())
        assert estimates.gathered_bytes <= size if sweep == "auto" else estimates.gathered_bytes == size
        assert 0.9 < estimates.peak_bytes / peak < 1.1, (sweep, estimates.peak_bytes, peak)


def strides() -> None:
    """Check strides: as large on every rank, few further gathers, and a rank without tokens takes part."""
    options = {**SMALL_CHUNKS, "memory_budget": 0, "stride": 2 + dist.get_rank()}
    models = pair(compile_options=options, layers=6)
    _, model, compiled = models
    for seed in (1, 2):
        both(models, lambda forward, seed=seed: weighted(forward(own_ids(seed))).backward())
    assert dta_compile.last_plan(compiled).schedule.stride == 1 + dist.get_world_size()
    both(models, functools.partial(crossed, order=(0, 1)))
    both(models, functools.partial(crossed, order=(1, 0)))
    # Forward each of six layers and the rest. Backward the last layer, which is a stretch; of a stretch of three layers
    # two run again, then the third, and the first once more; of two, each once, and there is no group of the embedding.
    # Where nothing is prefetched, a layer that ran again is gathered once more for its own backward.
    assert collectives(lambda: weighted(compiled(own_ids())).backward()) == (7 + 1 + (4 + 1) + (2 + 1), 7)
    with prefetching():
        assert collectives(lambda: weighted(compiled(own_ids())).backward()) == (7 + 1 + 4 + 2, 7)
        model.zero_grad()
        both(models, lambda forward: weighted(forward(own_ids())).backward())
    model.zero_grad()
    none = torch.zeros(own_ids().shape, dtype=torch.bool) if dist.get_rank() else torch.ones(own_ids().shape).bool()
    weighted(compiled(own_ids(), none)[none]).backward()
    model.zero_grad()


def images() -> None:
    """Check encoders sharded block by block: ranks encode different numbers of images; only some ranks, is refused."""
    from tests.support import vision

    def shard(model: Any) -> Any:
        for block in (*model.model.vision_tower.encoder.layers, *model.model.language_model.layers):
            fully_shard(block)
        return fully_shard(model)

    def run(rows: Sequence[Sequence[Any]], forward: Any) -> None:
        call = vision.inputs("llava", rows)
        weighted(forward(**call, use_cache=False).logits[call["attention_mask"].bool()]).backward()

    eager, model = (shard(vision.build("llava")) for _ in range(2))
    compiled = torch.compile(model, backend="dta", options={"codegen": "eager", "memory_budget": 0})
    first = dist.get_rank() == 0
    equal, other = [[5, "a", 7, 8], [5, "a", 7, 9]], [[5, "b", 6], [5, "c", 6, 4], ["a", 2]]
    text = [[5, 6, 7], [5, 6, 8]]
    for rows in (equal if first else other, other if first else equal, text):
        both((eager, model, compiled), functools.partial(run, rows), tolerance=2e-6)
    try:
        run(equal if first else text, compiled)
    except RuntimeContractError as error:
        assert "some ranks encode images" in str(error), error
    else:
        raise AssertionError("no error")
    both((eager, model, compiled), functools.partial(run, equal), tolerance=2e-6)


SCENARIOS = {
    "per layer, qwen3 in a function": ((4,), lambda: train_toy("qwen3", whole=True)),
    "per layer, llama by accelerate": ((2, 4), lambda: train_toy("llama", shard=by_accelerate)),
    "per layer, micro-batches, clipped, tied, offloaded": (
        (4,),
        lambda: train(functools.partial(tiny, tied=True), offloaded, clip=0.05, micro_batches=2),
    ),
    "per layer, calls of all kinds": ((2,), calls_of_all_kinds),
    "per layer, short rows on a rank": ((2,), short_rows_on_a_rank),
    "per layer, failures": ((2,), failures),
    "per layer, failures of groups": ((2,), lambda: failures(memory_budget=0, groups=2)),
    "per layer, failures with all gathered": ((2,), lambda: failures(sweep="chunks")),
    "per layer, layer by layer": ((2,), layer_by_layer),
    "per layer, groups of subtrees": ((2, 4), groups_of_subtrees),
    "per layer, strides": ((2,), strides),
    "per layer, images": ((2,), images),
    "per layer, mixed precision": ((4,), mixed_precision),
    "per layer, streaming": ((4,), streams),
    "per layer, rows as they are": (
        (4,),
        lambda: train(tiny, functools.partial(by_hand, reshard_after_forward=False), scatter=False),
    ),
    "per layer, hybrid": ((4,), lambda: train(tiny, hybrid)),
    "per layer, resumed": ((4,), lambda: resume(lambda: wrapped(by_hand(TinyLM(layers=1))))),
    "per layer, without a root": ((4,), without_a_root),
    "per layer, backbone": ((4,), backbone),
    "per layer, memory": ((4,), predicted_memory),
}
