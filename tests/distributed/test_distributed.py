"""Data parallelism: rows dealt out as balanced trees, wrappers that need nothing special, and what is refused."""

import datetime
import functools
import json
import pathlib
import subprocess
import sys
import time
import types

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import dta_compile
from dta_compile import distributed
from dta_compile.errors import OptionError, RefusalError, RuntimeContractError, VerificationError
from dta_compile.integrations import fully_shard_by_layer
from dta_compile.integrations.fully_shard import groups_of
from dta_compile.plan import CostModel
from dta_compile.runtime.engine import Engine
from dta_compile.runtime.path.stack import PathStack
from dta_compile.runtime.transparent import TreeRun
from tests.support import distributed_worker, per_layer
from tests.support.tiny import SMALL_CHUNKS, BareLM, TinyLM, assert_same, shared_ids, weighted

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="needs the gloo backend")
ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What the worker's scenarios came to, by number of ranks; a run for each number that is asked for."""

    @functools.cache
    def run(ranks, *names):
        file = tmp_path_factory.mktemp("ranks") / "results.json"
        launch = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        command = [sys.executable, "-m", *launch, "-m", "tests.support.distributed_worker", str(file), *names]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400 * ranks)
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(file.read_text())

    return run


# On two ranks, in one run; all others are on four, or slow.
QUICK = (
    "rows come back",
    "packed rows come back",
    "a bad batch",
    "ddp",
    "fsdp2",
    "per layer, calls of all kinds",
    "per layer, short rows on a rank",
    "one tree, drawn",
    "one tree, failures",
)


@pytest.mark.parametrize("scenario", QUICK)
def test_two_ranks_agree_with_one_process(results, scenario):
    found = results(2, *QUICK)[scenario]
    assert found == "", found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scenario", "ranks"),
    [
        (name, n)
        for name, (ranks, _) in distributed_worker.SCENARIOS.items()
        for n in ranks
        if n > 2 or name not in QUICK
    ],
)
def test_ranks_agree_with_one_process(results, scenario, ranks):
    found = results(ranks, *([scenario] if ranks == 2 else []))[scenario]
    assert found == "", found


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_buckets_are_reduced_while_layers_below_go_backward(one_rank, monkeypatch):
    torch.compiler.reset()
    events, backward = [], TreeRun.backward
    model = TinyLM(layers=3)
    compiled = torch.compile(model, backend="dta", options={**SMALL_CHUNKS, "sweep": "stages"})
    monkeypatch.setattr(dist, "_DEFAULT_FIRST_BUCKET_BYTES", 1000)
    parallel = DistributedDataParallel(compiled, bucket_cap_mb=0.001)

    def reduce(_, bucket):
        events.append("reduced")
        done = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    parallel.register_comm_hook(None, reduce)
    monkeypatch.setattr(TreeRun, "backward", lambda run, *args: events.append(run.number) or backward(run, *args))
    for _ in range(2):  # buckets follow the order in which the first gradients came
        events.clear()
        weighted(parallel(shared_ids())).backward()
    parts = [event for event in events if event != "reduced"]
    assert parts == sorted(parts, reverse=True) and len(parts) > 3
    assert all("reduced" in events[events.index(part) : events.index(part - 1)] for part in parts[:-1])


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")  # of torch
def test_parameters_are_gathered_for_a_self_check_until_it_succeeds(one_rank, monkeypatch):
    torch.compiler.reset()
    *_, compiled = per_layer.pair(compile_options={**SMALL_CHUNKS, "sweep": "stages"})
    write = PathStack.write
    with monkeypatch.context() as patched:
        patched.setattr(PathStack, "write", lambda path, layer, key, value: write(path, layer, key, value + 1))
        for _ in range(2):
            with pytest.raises(VerificationError):
                compiled(shared_ids())
    for _ in range(2):
        weighted(compiled(shared_ids())).backward()
        assert "outputs within" in dta_compile.last_plan(compiled).estimates.self_check


def with_hooks_that_read(forward):
    def pack(value):
        assert value.untyped_storage().nbytes() >= value.numel() * value.itemsize, "freed"
        return value.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        return weighted(forward(shared_ids()))


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")
def test_saved_tensor_hooks_never_get_parameters_that_are_freed(one_rank):
    torch.compiler.reset()
    options = {**SMALL_CHUNKS, "memory_budget": 0, "groups": 2, "verify": "off"}
    per_layer.both(per_layer.pair(compile_options=options), lambda forward: with_hooks_that_read(forward).backward())


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")
def test_a_module_that_is_not_gathered_for_backward_can_be_recomputed_there(one_rank):
    def sharded(model):
        fully_shard(model.embedding).set_unshard_in_backward(False)
        return per_layer.by_hand(model)

    torch.compiler.reset()
    models = per_layer.pair(sharded, {**SMALL_CHUNKS, "memory_budget": 0, "verify": "off"})
    per_layer.both(models, lambda forward: weighted(forward(shared_ids())).backward())


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")
def test_gradients_can_be_cleared_between_forward_and_backward(one_rank):
    def run(forward, model):
        for _ in range(2):
            loss = weighted(forward(shared_ids()))
            model.zero_grad()
            loss.backward()
        loss = weighted(forward(shared_ids()))
        weighted(model(shared_ids())).backward()  # eagerly, while the graph of the other call is alive
        loss.backward()

    torch.compiler.reset()
    eager, model, compiled = per_layer.pair(
        compile_options={**SMALL_CHUNKS, "sweep": "chunks"}, reshard_after_forward=True
    )
    per_layer.both((eager, model, compiled), lambda forward: run(forward, eager if forward is eager else model))


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")
def test_a_module_that_is_never_read_gets_no_gradient_of_zero(one_rank):
    def sharded(model):
        model.value = fully_shard(torch.nn.Linear(16, 1, dtype=torch.float64))
        per_layer.by_hand(model).set_reduce_scatter_unused_params(True)
        return model

    def run(forward, model):
        weighted(forward(shared_ids())).backward()
        return [parameter.grad is None for parameter in model.parameters()]

    torch.compiler.reset()
    inputs = torch.ones(2, 16, dtype=torch.float64)
    eager, model, compiled = per_layer.pair(sharded, {**SMALL_CHUNKS, "verify": "off"})
    for _ in range(2):
        assert run(eager, eager) == run(compiled, model) and model.value.weight.grad is None
    states = [part._get_fsdp_state() for part in model.modules() if isinstance(part, FSDPModule)]
    assert [group._dta_is_read for group in groups_of(states)] == [True, True, True, False]
    for forward, own in (eager, eager), (compiled, model):  # once it has been read, it does
        own.value(inputs).sum().backward()
        own.zero_grad()
        weighted(forward(shared_ids())).backward()
        assert own.value.weight.grad is not None


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")
def test_a_call_that_a_checkpoint_repeats_within_a_backward_is_refused(one_rank):
    torch.compiler.reset()
    models = per_layer.pair()
    loss = weighted(checkpoint(models[2], shared_ids(), use_reentrant=False))
    with pytest.raises(RuntimeContractError, match="within a backward"):
        loss.backward()
    models[1].zero_grad()
    per_layer.both(models, lambda forward: weighted(forward(shared_ids())).backward())


def test_ranks_decide_over_all_meshes_that_layers_are_sharded_over(monkeypatch):
    def sharded_over(ranks, copies=None):
        mesh = types.SimpleNamespace(shard_process_group=ranks, replicate_process_group=copies)
        return types.SimpleNamespace(_fsdp_param_groups=[types.SimpleNamespace(mesh_info=mesh, device="cpu")])

    said = {"pair": [3, 1], "all": [2, 5], "copies": [0, 7]}
    monkeypatch.setattr(dist, "all_reduce", lambda mine, _, ranks: mine.copy_(mine.maximum(torch.tensor(said[ranks]))))
    layers = [sharded_over("pair"), sharded_over("all", "copies"), sharded_over("all")]
    assert fully_shard_by_layer._most(layers, 1, 1) == [3, 7]


def test_a_streamed_program_that_waits_for_other_ranks_runs_once(one_rank, monkeypatch):
    class Mean(TinyLM):
        def forward(self, ids, mask):
            count = mask.sum().double()
            dist.all_reduce(count)
            return super().forward(ids, mask).logsumexp(-1) / count

    torch.compiler.reset()
    eager, model, ids = Mean(), Mean(), shared_ids()
    mask = torch.arange(ids.shape[1]) < 5 + torch.arange(len(ids))[:, None]
    monkeypatch.setattr(Engine, "run", lambda *_: pytest.fail("on this rank alone, as it has padding"))
    compiled = torch.compile(model, backend="dta", options=SMALL_CHUNKS)
    losses = dta_compile.streaming_step(compiled, lambda row, values: values[mask[row]].sum(), ids, mask)
    expected = (eager(ids, mask) * mask).sum(1)
    expected.sum().backward()
    assert_same((torch.stack(losses), per_layer.gradients(model)), (expected.detach(), per_layer.gradients(eager)))


def in_parts(model):
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = dist.init_device_mesh("cpu", (1,))
    parallelize_module(model, mesh, {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()})
    return torch.compile(model, backend="dta", options=SMALL_CHUNKS), mesh


@pytest.mark.filterwarnings("ignore")  # of torch, about hooks and graph breaks
def test_an_input_that_is_spread_over_ranks_is_refused_by_name(one_rank):
    from torch.distributed.tensor import DTensor, Replicate

    class Shifted(TinyLM):
        def forward(self, ids, shift):
            return super().forward(ids) + shift.to_local()

    torch.compiler.reset()
    model, mesh = in_parts(Shifted())
    shift = DTensor.from_local(torch.ones(5, 9, 31, dtype=torch.float64), mesh, [Replicate()])
    with pytest.raises(RefusalError, match="tensor parallelism: an input of the model is a DTensor") as caught:
        model(shared_ids(), shift)
    assert "context parallelism" in caught.value.what and "Replicate" in caught.value.got


def test_a_stage_of_a_pipeline_is_exact_but_shares_nothing():
    stage, generator = TinyLM().blocks[1], torch.Generator().manual_seed(1)
    hidden = torch.randn(1, 6, 16, dtype=torch.float64, generator=generator).expand(2, -1, -1).clone()
    hidden.requires_grad_()
    weights = torch.randn(2, 6, 16, dtype=torch.float64, generator=generator)
    compiled = torch.compile(stage, backend="dta")
    inputs = [hidden, *stage.parameters()]
    expected = torch.autograd.grad((weights * stage(hidden, None)).sum(), inputs)
    torch.testing.assert_close(torch.autograd.grad((weights * compiled(hidden, None)).sum(), inputs), expected)
    assert dta_compile.last_plan(compiled).stats.compression == 1


def test_one_process_needs_no_process_group():
    ids = shared_ids()
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "reward": torch.arange(5.0)}
    shard = distributed.scatter(batch)
    assert shard.batch["input_ids"][:, : ids.shape[1]].tolist() == sorted(ids.tolist()) and shard.rows == 5
    assert shard.imbalance == 1.0 and len(shard.costs) == 1
    assert torch.equal(shard.to_owners(shard.batch["reward"]), batch["reward"])
    assert torch.equal(shard.to_owners(shard.batch["input_ids"]), ids)


def test_a_rank_without_rows_has_padding_to_run():
    batch = {
        "input_ids": torch.zeros(0, 5, dtype=torch.long),
        "attention_mask": torch.zeros(0, 5),
        "reward": torch.zeros(0),
    }
    shard = distributed.scatter(batch)
    assert shard.rows == 0 and shard.costs == [0]
    assert shard.batch["input_ids"].shape == (2, 8) and shard.batch["reward"].shape == (2,)
    assert not shard.batch["attention_mask"].any()
    assert shard.to_owners(shard.batch["reward"]).shape == (0,)
    assert shard.to_owners(shard.batch["input_ids"]).shape == (0, 5)


def test_padding_and_fields_of_rows():
    mask = torch.tensor([[0, 1, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0]])
    ids = torch.arange(12).reshape(3, 4)
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids, "square": torch.eye(4)[:3], "old": ids / 2}
    shard = distributed.scatter(batch, per_row=["square"], padding={"old": 7.0})
    padded = torch.nn.functional.pad
    assert torch.equal(
        shard.batch["input_ids"], padded(torch.tensor([[0, 0, 0, 0], [1, 2, 0, 0], [4, 5, 6, 7]]), (0, 4))
    )
    assert shard.batch["labels"][:, :4].tolist() == [[-100] * 4, [1, 2, -100, -100], [4, 5, 6, 7]]
    assert shard.batch["old"][:, :4].tolist() == [[7.0] * 4, [0.5, 1, 7, 7], [2, 2.5, 3, 3.5]]
    assert bool((shard.batch["labels"][:, 4:] == -100).all()) and bool((shard.batch["old"][:, 4:] == 7).all())
    assert torch.equal(shard.batch["square"], torch.eye(4)[[2, 0, 1]])
    assert shard.to_owners(shard.batch["old"], fill=-1.0).tolist() == [[-1, 0.5, 1, -1], [2, 2.5, 3, 3.5], [-1] * 4]


def packed_rows(*rows):
    """A packed batch of sequences of ids, by rows of equal widths."""
    ids = torch.tensor([[token for one in row for token in one] for row in rows], dtype=torch.long)
    positions = torch.tensor([[place for one in row for place in range(len(one))] for row in rows], dtype=torch.long)
    return {"input_ids": ids, "position_ids": positions, "labels": ids, "advantages": torch.randn(ids.shape)}


def test_sequences_of_packed_rows_are_dealt_out_one_by_one():
    rows = [[5, 6, 7], [5], [1, 2]], [[5, 6], [1, 2, 3, 4]]
    batch = packed_rows(*rows) | {"per_head": torch.randn(2, 6, 3)}
    shard = distributed.scatter(batch, packed="position_ids")
    in_order = packed_rows(sorted(rows[0] + rows[1]))
    assert shard.rows == 5 and shard.costs == [7]
    assert all(torch.equal(shard.batch[name], in_order[name]) for name in ("input_ids", "position_ids", "labels"))
    assert all(torch.equal(shard.to_owners(shard.batch[name]), values) for name, values in batch.items())


@pytest.mark.parametrize("batch", [packed_rows([]), packed_rows([[3]]), packed_rows([[3, 4], [3]])])
def test_padding_of_a_packed_row_goes_on_with_no_sequence(batch):
    shard = distributed.scatter(batch, packed="position_ids")
    count = batch["input_ids"].numel()
    assert all(values.shape == (1, 8) for values in shard.batch.values())
    assert shard.batch["labels"][:, count:].eq(-100).all() and not shard.batch["input_ids"][:, count:].any()
    numbered = pytest.importorskip("transformers.masking_utils").find_packed_sequence_indices
    restarts = numbered(shard.batch["position_ids"])[0, count:]
    assert restarts.tolist() == list(range(shard.rows, shard.rows + 8 - count))
    assert torch.equal(shard.to_owners(shard.batch["labels"]), batch["labels"])


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({"attention_mask": torch.ones(1, 6)}, {}, r"mask 'attention_mask'(.*\n)*.*mask=None"),
        ({"reward": torch.zeros(1)}, {}, r"'reward' is not one entry per token(.*\n)*.*value of its sequence"),
        ({"position_ids": None}, {}, "no 'position_ids'"),
        ({"position_ids": torch.rand(1, 6)}, {}, "no 'position_ids'"),
        ({"position_ids": torch.tensor([[0, 1, 5, 6, 0, 1]])}, {}, r"begin at 0\n.*row 0, token 2(.*\n)*.*got: 5"),
        ({}, {"padding": {"position_ids": 1}}, "padding of 'position_ids'"),
        ({}, {"per_row": "labels"}, "'labels' per row"),
    ],
)
def test_what_packed_rows_cannot_have_is_an_error(change, options, message):
    batch = packed_rows([[1, 2], [1, 3], [4, 5]]) | change
    batch = {name: values for name, values in batch.items() if values is not None}
    with pytest.raises((RuntimeContractError, OptionError), match=message):
        distributed.scatter(batch, packed="position_ids", **options)


def test_values_of_packed_rows_are_per_token():
    shard = distributed.scatter(packed_rows([[1, 2], [1, 3], [4, 5]]), packed="position_ids")
    with pytest.raises(OptionError, match="'values' per row"):
        shard.to_owners(torch.zeros(1, 8), per_token=False)
    with pytest.raises(RuntimeContractError, match="not one entry per token"):
        shard.to_owners(torch.zeros(1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input_ids": None}, "no token ids"),
        ({"input_ids": torch.zeros(2, 3)}, "no token ids"),
        ({"attention_mask": torch.ones(2, 4)}, "mask 'attention_mask' does not fit"),
        ({"reward": torch.zeros(3)}, "field 'reward'"),
        ({"reward": [1.0, 2.0]}, "field 'reward'"),
        ({"scores": torch.zeros(2, 5)}, r"not clear whether 'scores'.*\n.*\n.*\n.*per_row=\['scores'\]"),
    ],
)
def test_a_malformed_batch_is_an_error(change, message):
    batch = {"input_ids": torch.zeros(2, 3, dtype=torch.long), "reward": torch.zeros(2)} | change
    with pytest.raises(RuntimeContractError, match=message):
        distributed.scatter({name: value for name, value in batch.items() if value is not None})


def test_values_that_do_not_fit_are_not_sent_back():
    shard = distributed.scatter({"input_ids": torch.zeros(2, 3, dtype=torch.long)})
    with pytest.raises(RuntimeContractError, match="do not fit"):
        shard.to_owners(torch.zeros(3))
    with pytest.raises(RuntimeContractError, match="per_token=False"):
        shard.to_owners(torch.zeros(2, 7))
    with pytest.raises(RuntimeContractError, match="not one entry per token"):
        shard.to_owners(torch.zeros(2), per_token=True)
    square = torch.randn(2, 8)  # as wide as the shard's batch
    assert torch.equal(shard.to_owners(square, per_token=False), square)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"per_row": "old", "per_token": ["old"]}, "not both"),
        ({"per_row": ["input_ids"]}, "not both"),
        ({"padding": {"lables": -1}}, "'lables'"),
        ({"padding": {"input_ids": 0.5}}, "'input_ids' cannot be padded"),
    ],
)
def test_what_is_said_of_fields_is_checked(options, message):
    batch = {"input_ids": torch.zeros(2, 3, dtype=torch.long), "old": torch.zeros(2, 3)}
    with pytest.raises(OptionError, match=message):
        distributed.scatter(batch, **options)


def test_ranks_that_are_no_group_or_of_two_dimensions_are_refused(one_rank):
    mesh = dist.init_device_mesh("cpu", (1, 1), mesh_dim_names=("copy", "shard"))
    for ranks, problem in (mesh, "one dimension of ranks"), ("WORLD", "something else than a group"):
        torch.compiler.reset()
        compiled = torch.compile(BareLM(), backend="dta", options={"mesh": ranks})
        with pytest.raises(OptionError, match=problem):
            compiled(shared_ids())
        with pytest.raises(OptionError, match=problem):
            distributed.scatter({"input_ids": torch.zeros(1, 1, dtype=torch.long)}, ranks)


def test_token_mean_is_the_mean_of_what_counts():
    losses = torch.tensor([[1.0, 2.0, float("nan")], [4.0, float("inf"), 8.0]], requires_grad=True)
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    mean = distributed.token_mean(losses, mask)
    mean.backward()
    assert mean.item() == pytest.approx(7 / 3)
    assert torch.equal(losses.grad, mask / 3)
    assert distributed.token_mean(losses, mask, total=14).item() == 0.5  # one of several micro-batches
    assert distributed.token_mean(losses[:0], mask[:0]).item() == 0.0
    with pytest.raises(RuntimeContractError, match="do not fit"):
        distributed.token_mean(losses, mask[:1])


def fail_in_the_middle(rank, folder):
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=datetime.timedelta(seconds=20))
    model = TinyLM()
    wrapped = torch.nn.parallel.DistributedDataParallel(torch.compile(model, backend="dta", options=SMALL_CHUNKS))
    logits = wrapped(shared_ids())
    if rank == 1:
        raise RuntimeError("out of luck")
    started = time.monotonic()
    try:
        weighted(logits).backward()
    except RuntimeError as error:
        text = f"{time.monotonic() - started} {error}"
    else:
        text = "no error"
    pathlib.Path(folder, "left").write_text(text)


@pytest.mark.slow
def test_a_rank_that_fails_leaves_the_others_with_torchs_error(tmp_path):
    context = mp.spawn(fail_in_the_middle, args=(str(tmp_path),), nprocs=2, join=False)
    for process in context.processes:
        process.join(120)
    seconds, message = (tmp_path / "left").read_text().split(" ", 1)
    assert float(seconds) < 40 and "gloo" in message.lower()


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["--one-tree"]], ids=["own trees", "one tree"])
def test_the_example_under_torchrun_equals_one_process(more):
    launch = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [
        sys.executable,
        "-m",
        *launch,
        "examples/fsdp2_grpo.py",
        "--steps",
        "2",
        "--turns",
        "1",
        "--layers",
        "1",
        "--check",
        *more,
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "step 1: loss" in done.stdout and "largest difference of the weights" in done.stdout


def test_the_example_under_ray_train():
    pytest.importorskip("ray.train")
    command = [sys.executable, "examples/ray_train.py", "--steps", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "trained 1 steps on 2 workers" in done.stdout


def test_scatter_takes_a_cost_model():
    batch = {"input_ids": shared_ids()}
    assert distributed.scatter(batch, cost=CostModel()).rows == 5
    with pytest.raises(RuntimeContractError, match="unknown cost"):
        distributed.scatter(batch, cost="seconds")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_token_mean_of_narrow_values_counts_all_tokens(dtype):
    losses = torch.full((2, 40_000), 2.0, dtype=dtype, requires_grad=True)
    mean = distributed.token_mean(losses, torch.ones_like(losses))
    mean.backward()
    assert mean.item() == pytest.approx(2.0)
    assert losses.grad.double().sum().item() == pytest.approx(1.0, rel=1e-2)
    assert distributed.token_mean(losses, losses.detach(), total=80_000).item() == pytest.approx(2.0)
