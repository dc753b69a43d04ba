"""A compiled call is an ordinary differentiable function: what autograd promises in eager mode, it promises here."""

import functools
import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dta_compile
from dta_compile.errors import RuntimeContractError
from dta_compile.plan import CostModel, Rates
from dta_compile.runtime.attention.layer import AttentionRuntime
from dta_compile.runtime.measure.calibration import Calibration
from tests.support.tiny import (
    SMALL_CHUNKS,
    BareLM,
    TinyLM,
    after,
    assert_same,
    gradients,
    log_probs,
    shared_ids,
    weighted,
)

IDS, OTHER = shared_ids(), shared_ids(batch=3, tokens=6, seed=2)


@pytest.fixture(scope="module")
def model():
    return TinyLM(layers=1)


@pytest.fixture(scope="module")
def compiled(model):
    torch._dynamo.reset()
    return torch.compile(model, backend="dta", options=SMALL_CHUNKS)


@pytest.fixture(autouse=True)
def no_gradients(model):
    yield
    model.requires_grad_(True).zero_grad()


def both(model, compiled, step):
    """Asserts that a step leaves the same results and gradients on both sides."""
    expected = after(model, lambda: step(model))
    assert_same(after(model, lambda: step(compiled)), expected)
    return expected


def test_gradient_accumulation_over_micro_batches(model, compiled):
    def step(forward):
        for ids in (IDS, OTHER):
            weighted(forward(ids)).backward()

    both(model, compiled, step)


@pytest.mark.parametrize("last_first", [True, False])
def test_two_forwards_before_two_backwards(model, compiled, last_first):
    def step(forward):
        losses = [weighted(forward(IDS)), weighted(forward(OTHER))]
        for loss in reversed(losses) if last_first else losses:
            loss.backward()

    both(model, compiled, step)
    both(model, compiled, lambda f: (weighted(f(IDS)) * weighted(f(OTHER)).tanh()).backward())


def test_autograd_grad_of_some_parameters(model, compiled):
    wanted = [model.embedding.weight, model.blocks[0].up.bias, model.head.weight]

    def step(forward):
        found = torch.autograd.grad(weighted(forward(IDS)), wanted)
        assert all(parameter.grad is None for parameter in model.parameters())
        return found

    both(model, compiled, step)


def test_backward_with_inputs_touches_these_alone(model, compiled):
    wanted = [model.norm.bias, model.blocks[0].query.weight]

    def step(forward):
        torch.autograd.backward(weighted(forward(IDS)), inputs=wanted)

    _, found = both(model, compiled, step)
    assert sum(grad is not None for grad in found.values()) == 2


def test_hooks_see_each_gradient_once_and_may_change_it(model, compiled):
    def step(forward):
        seen, accumulated, handles = {}, [], []
        for name, parameter in model.named_parameters():

            def hook(grad, name=name):
                seen.setdefault(name, []).append(grad.clone())
                return grad * 2 if "bias" in name else None

            handles += [
                parameter.register_hook(hook),
                parameter.register_post_accumulate_grad_hook(lambda p, name=name: accumulated.append(name)),
            ]
        weighted(forward(IDS)).backward()
        for handle in handles:
            handle.remove()
        assert sorted(accumulated) == sorted(name for name, _ in model.named_parameters())
        assert all(len(grads) == 1 for grads in seen.values())
        return seen

    both(model, compiled, step)


def test_retain_graph_allows_a_second_backward(model, compiled):
    def step(forward):
        out = forward(IDS)
        weighted(out).backward(retain_graph=True)
        first = gradients(model)
        weighted(out).backward(retain_graph=True)
        weighted(out.log_softmax(-1)).backward()
        return first

    both(model, compiled, step)


@pytest.mark.slow
def test_a_retained_backward_of_earlier_states_leaves_later_layers_without_gradients():
    model = TinyLM(layers=3)

    def states(ids):
        found = [model.embedding(ids)]
        for block in model.blocks:
            found.append(block(found[-1], None))
        return found

    def step(forward):
        hidden, parameters = forward(IDS), list(model.parameters())
        losses = [weighted(hidden[depth]) for depth in (3, 1, 2)]
        return [torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True) for loss in losses]

    torch._dynamo.reset()
    found = step(torch.compile(states, backend="dta", options={**SMALL_CHUNKS, "sweep": "stages"}))
    for ours, expected in zip(sum(found, ()), sum(step(states), ()), strict=True):
        assert (ours is None) == (expected is None)
        assert ours is None or torch.allclose(ours, expected, rtol=1e-9, atol=1e-9)


def test_a_backward_after_one_that_stopped_half_way_begins_anew():
    model = TinyLM(layers=3)

    def attention_and_state(ids):
        x, found = model.embedding(ids), []
        for block in model.blocks:
            keys = block.query(block.norm(x)).unflatten(-1, (4, -1)).transpose(1, 2)
            found.append(F.scaled_dot_product_attention(keys, keys, keys, is_causal=True))
            x = x + block.out(found[-1].transpose(1, 2).flatten(2))
        return found[1], x

    def step(forward):
        middle, state = forward(IDS)
        hook = model.blocks[2].out.weight.register_hook(lambda _: {}["stop"])
        with pytest.raises(KeyError, match="stop"):
            (weighted(middle) + weighted(state)).backward(retain_graph=True)
        hook.remove()
        return torch.autograd.grad(weighted(middle), list(model.parameters()), allow_unused=True)

    torch._dynamo.reset()
    found = step(torch.compile(attention_and_state, backend="dta", options={**SMALL_CHUNKS, "sweep": "stages"}))
    for ours, expected in zip(found, step(attention_and_state), strict=True):
        assert (ours is None) == (expected is None)
        assert ours is None or torch.allclose(ours, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("which", ["eager", "dta"])
def test_a_second_backward_without_retain_graph_raises_torchs_error(model, compiled, which):
    loss = weighted({"eager": model, "dta": compiled}[which](IDS))
    loss.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


def test_create_graph_raises_and_never_drops_a_penalty(model, compiled):
    with pytest.raises(RuntimeContractError, match="cannot be differentiated again"):
        torch.autograd.grad(weighted(compiled(IDS)), list(model.parameters()), create_graph=True)
    both(model, compiled, lambda f: weighted(f(IDS)).backward())


def test_derivatives_in_forward_mode_are_refused_or_right():
    """torch 2.15 breaks the graph before the first operator that has one, so that it is computed densely."""
    torch._dynamo.reset()
    model = TinyLM(layers=1)
    compiled, weight = torch.compile(model, backend="dta", options=SMALL_CHUNKS), model.head.weight
    compiled(IDS)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(weight, torch.ones_like(weight))
        try:
            out = torch.func.functional_call(compiled, {"_orig_mod.head.weight": dual}, (IDS,))
        except RuntimeContractError as error:
            assert "no derivative in forward mode" in str(error)
        else:
            expected = torch.func.functional_call(model, {"head.weight": dual}, (IDS,))
            both = (torch.autograd.forward_ad.unpack_dual(value).tangent for value in (out, expected))
            torch.testing.assert_close(*both)
    torch._dynamo.reset()  # torch 2.15 has no guard for such a break: later calls of a model alike would have it, too


@pytest.mark.sample(1)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_scoring_runs_forward_over_the_tree_only(model, compiled, mode):
    with mode():
        scores = compiled(IDS)
        expected = model(IDS)
    plan = dta_compile.last_plan(compiled)
    assert plan.schedule.mode == "score" and plan.stats.compression > 2
    assert not scores.requires_grad
    assert_same(scores.clone(), expected.clone())
    both(model, compiled, lambda f: weighted(f(IDS)).backward())
    assert dta_compile.last_plan(compiled).schedule.mode == "transparent"


def test_eval_then_train(model, compiled):
    model.eval()
    try:
        both(model, compiled, lambda f: weighted(f(IDS)).backward())
    finally:
        model.train()
    both(model, compiled, lambda f: weighted(f(IDS)).backward())


def test_two_compiled_models_interleaved(model, compiled):
    other = BareLM(seed=5)
    other_compiled = torch.compile(other, backend="dta", options={"chunk_size": 2, "strategy": "vanilla"})

    def step(first, second):
        mine, theirs = first(IDS), second(IDS)
        weighted(theirs).backward()
        weighted(first(OTHER)).backward()
        weighted(mine).backward()

    expected = after(other, lambda: after(model, lambda: step(model, other)))
    assert_same(after(other, lambda: after(model, lambda: step(compiled, other_compiled))), expected)


def test_one_module_compiled_twice_serves_both(model, compiled):
    again = torch.compile(model, backend="dta", options={"chunk_size": 1000, "strategy": "dense"})

    def step(first, second):
        return weighted(first(IDS) + second(IDS)).backward()

    expected = after(model, lambda: step(model, model))
    assert_same(after(model, lambda: step(compiled, again)), expected)
    assert dta_compile.last_plan(again).schedule.strategy == "dense"
    assert dta_compile.last_plan(compiled).schedule.strategy != "dense"


@pytest.mark.parametrize(("method", "call"), [("mix", 3), ("mix_backward", 1), ("mix_backward", 4)])
def test_an_exception_in_the_middle_leaves_the_next_step_correct(model, compiled, monkeypatch, method, call):
    from dta_compile.runtime.path.stack import PathStack

    original, calls = getattr(PathStack, method), []

    def failing(*arguments):
        calls.append(1)
        if len(calls) == call:
            raise MemoryError("out of memory in the test")
        return original(*arguments)

    monkeypatch.setattr(PathStack, method, failing)
    with pytest.raises(MemoryError):
        weighted(compiled(IDS)).backward()
    if dta_compile.last_plan(compiled).schedule.sweep == "chunks":  # else those of later layers are there, as in eager
        assert all(parameter.grad is None for parameter in model.parameters())
    monkeypatch.undo()
    model.zero_grad()
    both(model, compiled, lambda f: weighted(f(IDS)).backward())


def test_an_exception_in_a_retained_backward_can_be_retried(model, compiled, monkeypatch):
    from dta_compile.runtime.path.stack import PathStack

    expected = after(model, lambda: weighted(model(IDS)).backward())
    loss = weighted(compiled(IDS))
    monkeypatch.setattr(PathStack, "mix_backward", None)
    with pytest.raises(TypeError):
        loss.backward(retain_graph=True)
    monkeypatch.undo()
    assert_same(after(model, lambda: loss.backward()), expected)


def test_exceptions_in_a_hook_and_in_the_loss(model, compiled):
    def refuse(grad):
        raise ValueError("in a hook")

    handle = model.embedding.weight.register_hook(refuse)
    with pytest.raises(ValueError, match="in a hook"):
        weighted(compiled(IDS)).backward()
    handle.remove()
    model.zero_grad()
    with pytest.raises(RuntimeError):
        (compiled(IDS) + torch.zeros(2)).sum().backward()
    both(model, compiled, lambda f: weighted(f(IDS)).backward())


@pytest.mark.parametrize("which", ["eager", "dta"])
def test_a_parameter_changed_between_forward_and_backward_is_an_error(model, compiled, which):
    loss = weighted({"eager": model, "dta": compiled}[which](IDS))
    with torch.no_grad():
        model.blocks[0].up.weight.add_(0.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


IN_PIECES = [{"sweep": "stages"}, {"sweep": "stages", "stride": 2}, {"sweep": "stages", "groups": 2}]


@pytest.mark.parametrize("options", IN_PIECES, ids=str)
@pytest.mark.parametrize("is_frozen", [True, False])
def test_weights_that_run_forward_again_may_not_change_before(options, is_frozen):
    """Eager mode needs them no more: a frozen embedding, or a layer below those whose gradients are asked for."""
    torch._dynamo.reset()
    model = TinyLM(layers=4)
    changed, above = (model.embedding, model.blocks[0]) if is_frozen else (model.blocks[1].up, model.blocks[2])
    changed.requires_grad_(not is_frozen)
    compiled = torch.compile(model, backend="dta", options={**SMALL_CHUNKS, "memory_budget": 0, **options})
    expected = torch.autograd.grad(weighted(model(IDS)), [*above.parameters()])
    loss = weighted(compiled(IDS))
    with torch.no_grad():
        changed.weight.mul_(1.5)
    schedule = dta_compile.last_plan(compiled).schedule
    if schedule.stride > 1 or schedule.groups:
        with pytest.raises(RuntimeContractError, match="changed in place before its backward"):
            torch.autograd.grad(loss, [*above.parameters()])
    else:
        assert_same(torch.autograd.grad(loss, [*above.parameters()]), expected)


@pytest.mark.parametrize(("budget", "verify"), [(0, "auto"), (2**30, "auto"), (0, "always")])
def test_hooks_on_saved_tensors_hide_no_change_of_a_parameter(model, budget, verify):
    """Eager mode goes on with the copies that these hooks have made; a verified call is given views of parameters."""
    options = {**SMALL_CHUNKS, "memory_budget": budget, "verify": verify}
    compiled = torch.compile(model, backend="dta", options=options)
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda kept: kept):
        loss = weighted(compiled(IDS))
    with torch.no_grad():
        model.blocks[0].up.weight.mul_(1.5)
    with pytest.raises(RuntimeContractError, match="changed in place before its backward"):
        loss.backward()


@pytest.mark.parametrize("options", IN_PIECES, ids=str)
def test_a_default_device_changes_no_backward(model, options):
    compiled = torch.compile(model, backend="dta", options={**SMALL_CHUNKS, "memory_budget": 0, **options})
    expected = after(model, lambda: weighted(model(IDS)).backward())
    loss = weighted(compiled(IDS))
    with torch.device("meta"):
        assert_same(after(model, loss.backward), expected)


@pytest.mark.parametrize("budget", [0, 2**30])
def test_a_parameter_given_other_memory_between_forward_and_backward_is_an_error(model, budget):
    """Eager mode takes gradients of a mixture then: what it saved are views of the old memory, and parameters."""
    compiled = torch.compile(model, backend="dta", options={**SMALL_CHUNKS, "memory_budget": budget})
    loss = weighted(compiled(IDS))
    weight = model.blocks[0].up.weight
    before = weight.data
    weight.data = before * 1.5
    with pytest.raises(RuntimeContractError, match=r"(?s)changed in place before its backward.*`\.data` was set"):
        loss.backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    weight.data = before
    both(model, compiled, lambda f: weighted(f(IDS)).backward())


def test_a_buffer_changed_between_forward_and_backward_is_a_typed_error(model):
    shift = torch.zeros(1, dtype=torch.float64)
    compiled = torch.compile(lambda ids: model.head(model.hidden(ids) + shift), backend="dta", options=SMALL_CHUNKS)
    loss = weighted(compiled(IDS))
    shift.add_(1)
    with pytest.raises(RuntimeContractError, match="buffer or input of the compiled call was changed in place"):
        loss.backward()


@pytest.mark.parametrize("which", ["eager", "dta"])
def test_ids_changed_between_forward_and_backward_are_an_error(model, which):
    """A chunk that is run again would read the new ids."""
    options = {**SMALL_CHUNKS, "memory_budget": 0}
    forward = {"eager": model, "dta": torch.compile(model, backend="dta", options=options)}[which]
    ids = IDS.clone()
    loss = weighted(forward(ids))
    ids.copy_(IDS.flip(0))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_outputs_may_be_changed_in_place(model, compiled):
    both(model, compiled, lambda f: weighted(f(IDS).div_(0.7).log_softmax(-1)).backward())
    both(model, compiled, lambda f: weighted(f(IDS)[:, :-1].mul_(3.0)).backward())


def test_optimiser_steps_equal_eager():
    def train(wrap):
        model = BareLM(seed=3)
        forward, optimiser = wrap(model), torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses = []
        for seed in range(3):
            ids = shared_ids(batch=3 + seed, tokens=7 + seed, seed=seed)
            loss = -log_probs(forward(ids), ids).mean()
            optimiser.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimiser.step()
            losses.append(loss.detach())
        return losses, dict(model.named_parameters())

    # Adam divides by the gradient's size: where that is rounding alone, rounding decides the step.
    expected = train(lambda model: model)
    losses, parameters = train(lambda model: torch.compile(model, backend="dta", options=SMALL_CHUNKS))
    assert_same(losses, expected[0])
    assert_same(parameters, expected[1], tolerance=1e-6)


def in_backward(model, forward):
    """Update each parameter as its gradient arrives, swept stage by stage."""
    optimisers = {parameter: torch.optim.AdamW([parameter], lr=1e-2, eps=1e-4) for parameter in model.parameters()}

    def update(parameter):
        optimisers[parameter].step()
        optimisers[parameter].zero_grad()

    for parameter in optimisers:
        parameter.register_post_accumulate_grad_hook(update)
    for seed in range(3):
        weighted(forward(shared_ids(batch=3 + seed, seed=seed))).backward()


def averaged(model, forward):
    """Average weights, and score with them."""
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    optimiser = torch.optim.Muon([model.blocks[0].up.weight], lr=1e-2)
    for seed in range(3):
        weighted(forward(shared_ids(batch=3 + seed, seed=seed))).backward()
        optimiser.step()
        optimiser.zero_grad()
        average.update_parameters(model)
    model.load_state_dict(average.module.state_dict())
    with torch.no_grad():
        return forward(IDS)


@pytest.mark.parametrize("train", [in_backward, averaged])
def test_optimisers_in_the_backward_averages_and_muon_equal_eager(train):
    torch._dynamo.reset()
    eager, model = TinyLM(layers=1), TinyLM(layers=1)
    compiled = torch.compile(model, backend="dta", options={**SMALL_CHUNKS, "sweep": "stages"})
    expected, found = train(eager, eager), train(model, compiled)
    if expected is not None:
        assert_same(found, expected)
    assert_same(dict(model.named_parameters()), dict(eager.named_parameters()))


@pytest.mark.sample(1)
@pytest.mark.parametrize("backward", [True, False])
def test_a_finished_step_keeps_no_activations(model, compiled, backward):
    from dta_compile.runtime.path.stack import PathStack

    def alive():
        return sum(type(item) is PathStack for item in gc.get_objects())

    gc.collect()
    gc.disable()  # no reference cycles either: on a GPU, waiting for the collector means running out of memory
    try:
        assert alive() == 0
        out = compiled(IDS)
        assert alive() > 0
        if backward:
            weighted(out).backward()
        else:
            del out
        assert alive() == 0
    finally:
        gc.enable()


def test_gradients_of_a_layer_arrive_before_layers_below_run(monkeypatch):
    """Swept stage by stage: what frees or reduces a gradient as it arrives never meets those of all layers."""
    torch._dynamo.reset()
    model, held = TinyLM(layers=3), []
    compiled = torch.compile(model, backend="dta", options={**SMALL_CHUNKS, "sweep": "stages"})
    expected = after(model, lambda: weighted(model(IDS)).backward())[1]
    gone = {}

    def take(name, parameter):
        held.append(sum(one.grad is not None for one in model.parameters()))
        gone[name], parameter.grad = parameter.grad, None

    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(functools.partial(take, name))
    weighted(compiled(IDS)).backward()
    assert_same(gone, expected)
    assert list(gone)[-1].startswith(("embedding", "position")) and max(held) < len(gone) / 2


def test_attention_is_not_run_again_where_its_results_are_kept(monkeypatch, request):
    """Swept stage by stage, where query-key pairs are what costs: once forward, for two backwards twice."""
    if request.config.getoption("--sweep") == "groups":
        pytest.skip("groups keep nothing")
    torch._dynamo.reset()
    model, runs, rates = TinyLM(layers=2), [], Rates(0.0, 0.0, 0.0, 1.0, 0.0)
    monkeypatch.setattr(Calibration, "cost_model", lambda self: CostModel(rates, rates))
    forward = AttentionRuntime.forward
    monkeypatch.setattr(AttentionRuntime, "forward", lambda self, x: runs.append(x.chunk) or forward(self, x))
    options = {**SMALL_CHUNKS, "sweep": "stages", "memory_budget": 3_000, "verify": "off"}
    compiled = torch.compile(model, backend="dta", options=options)
    expected = after(model, lambda: weighted(model(IDS)).backward())[1]
    loss = weighted(compiled(IDS))
    chunks = len(runs)
    kept = str(dta_compile.last_plan(compiled).schedule).count(" results")
    assert kept > 0
    assert_same(after(model, lambda: loss.backward(retain_graph=True))[1], expected)
    again = len(runs) - chunks
    assert again < chunks
    assert_same(after(model, loss.backward)[1], expected)
    assert len(runs) - chunks - again == chunks, "a second backward has no results"


class Variants(TinyLM):
    """One call with everything that parameters can be: tied, adapted, used after the tree, unused."""

    def __init__(self):
        super().__init__(layers=1)
        self.head.weight = self.embedding.weight
        self.down, self.up = nn.Linear(16, 2, bias=False), nn.Linear(2, 16, bias=False)
        self.scale, self.unused = nn.Parameter(torch.tensor(1.5)), nn.Linear(3, 3)
        self.double()

    def forward(self, ids):
        hidden = self.hidden(ids)
        logits = self.head(hidden) + (hidden.detach() @ self.head.weight.detach().T) * 0.1
        adapted = self.head(hidden + self.up(self.down(hidden)))
        entropy = -(adapted.softmax(-1) * adapted.log_softmax(-1)).sum(-1)
        penalty = self.scale * self.blocks[0].up.weight.pow(2).sum()  # no token in it
        return {"logits": logits, "adapted": [adapted, entropy], "best": logits.argmax(-1), "penalty": penalty, "n": 3}


@pytest.fixture(scope="module")
def variants():
    model = Variants()
    return model, torch.compile(model, backend="dta", options=SMALL_CHUNKS)


@pytest.mark.parametrize("used", ["logits", "adapted", "entropy", "penalty", "twice", "all"])
def test_several_outputs_of_which_some_are_used(variants, used):
    model, compiled = variants

    def step(forward):
        out = forward(IDS)
        assert out["n"] == 3 and not out["best"].requires_grad and out["best"].dtype is torch.int64
        logits, (adapted, entropy) = out["logits"], out["adapted"]
        losses = {
            "logits": lambda: weighted(logits),
            "adapted": lambda: weighted(adapted),
            "entropy": lambda: weighted(entropy),
            "penalty": lambda: out["penalty"],
            "twice": lambda: weighted(logits) + weighted(logits.softmax(-1)) + (logits * logits).mean(),
            "all": lambda: weighted(logits * adapted) * out["penalty"] + weighted(entropy),
        }
        losses[used]().backward()
        return out

    # As in eager mode no gradient is not a zero gradient: an unused parameter keeps None.
    expected = after(model, lambda: step(model))
    found = after(model, lambda: step(compiled))
    assert found[1]["unused.weight"] is None and found[1]["unused.bias"] is None
    assert_same(found, expected)


@pytest.fixture(scope="module")
def stateful(model):
    """The model, compiled and not, returning the states between its layers, logits, and a score of detached states."""

    def states(ids):
        first = model.embedding(ids)
        second = model.blocks[0](first, None)
        logits = model.head(model.norm(second))
        return first, second, logits, model.norm(second.detach()).mean(-1)

    torch._dynamo.reset()
    return states, torch.compile(states, backend="dta", options=SMALL_CHUNKS)


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (lambda first, second, logits, score: (first.retain_grad(), weighted(logits)), "retain_grad"),
        (lambda first, second, logits, score: (second.register_hook(torch.neg), weighted(logits)), "a hook on"),
        (lambda first, second, logits, score: (first.register_hook(torch.neg), weighted(second)), "a hook on"),
    ],
)
def test_hooks_on_outputs_from_which_others_are_computed_are_refused(model, stateful, ask, words):
    for outlives in (True, False) if "hook" in words else (True,):
        outputs = stateful[1](IDS)
        _, loss = ask(*outputs)
        if not outlives:
            del outputs
        with pytest.raises(RuntimeContractError, match=f"(?s)lacks what comes by way of.*got: {words}") as caught:
            loss.backward()
        assert "test_autograd_contract.py" in caught.value.where or "tiny.py" in caught.value.where
        assert all(parameter.grad is None for parameter in model.parameters())


def test_hooks_on_outputs_that_the_compiler_computes_anew_or_looks_through_are_refused(model):
    """A view, a weight, positions and joined slices: eager mode computes the logits from each of them."""

    def states(ids):
        positions = model.position(torch.arange(ids.shape[1]))
        hidden = model.mix(model.embedding(ids) + positions)
        first, rest = hidden[:, :1], hidden[:, 1:]
        joined = torch.cat([first, rest], 1)
        flat = joined.reshape(-1, joined.shape[-1])
        weight = model.head.weight * 2
        return positions, first, rest, flat, weight, F.linear(flat.view(joined.shape), weight)

    torch._dynamo.reset()
    compiled = torch.compile(states, backend="dta", options=SMALL_CHUNKS)
    for i in range(5):
        for ask in (
            lambda value: value.retain_grad(),
            lambda value: value.register_hook(torch.neg),
            lambda value: value.grad_fn.register_prehook(lambda grads: grads),
        ):
            *others, logits = compiled(IDS)
            ask(others[i])
            with pytest.raises(RuntimeContractError, match="lacks what comes by way of"):
                weighted(logits).backward()
    expected = after(model, lambda: sum(map(weighted, states(IDS))).backward())
    assert_same(after(model, lambda: sum(map(weighted, compiled(IDS))).backward()), expected)


def test_outputs_that_share_memory_in_eager_mode_share_it(model):
    """Autograd itself refuses a write with gradients that would not reach the other views of the memory."""

    def states(ids):
        hidden = model.hidden(ids)
        flat = hidden.view(-1, hidden.shape[-1])
        scores = model.head(flat)
        return hidden, flat, scores, scores.view(*ids.shape, -1), hidden[:, :1]

    torch._dynamo.reset()
    compiled = torch.compile(states, backend="dta", options=SMALL_CHUNKS)

    def written(run):
        hidden, _, _, logits, first = outputs = run(IDS)
        hidden.mul_(2)
        logits[:, 0] = 0
        first.add_(1)
        return outputs

    with torch.no_grad():
        assert_same(written(compiled), written(states))
    with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
        written(compiled)
    assert_same(*(after(model, lambda f=f: sum(map(weighted, f(IDS))).backward()) for f in (compiled, states)))


def test_hooks_on_rows_from_which_others_are_computed_are_refused_in_a_streaming_step(model, stateful):
    def loss(row, first, second, logits, score):
        first.register_hook(torch.neg)
        return weighted(logits) + weighted(first)

    with pytest.raises(RuntimeContractError, match="lacks what comes by way of"):
        dta_compile.streaming_step(stateful[1], loss, IDS)
    model.zero_grad()


def test_gradients_for_outputs_from_which_others_are_computed_are_refused(stateful):
    first, second, logits, _ = stateful[1](IDS)
    for wanted in (first, second):
        with pytest.raises(RuntimeContractError, match=r"torch\.autograd\.grad with respect to"):
            torch.autograd.grad(weighted(logits) + weighted(wanted), wanted, retain_graph=True)


def test_gradients_at_outputs_that_lack_nothing_equal_eager(model, stateful):
    """Of the last value, of one alone, through hooks that are gone, and beside a value of detached ones."""

    def step(forward):
        first, second, logits, score = forward(IDS)
        loss = weighted(logits) + weighted(second)
        found = [torch.autograd.grad(loss, logits, retain_graph=True), torch.autograd.grad(weighted(first), first)]
        logits.register_hook(lambda grad: grad * 2)
        first.register_hook(torch.neg).remove()
        loss.backward(retain_graph=True)
        second.retain_grad()
        weighted(score).backward()
        assert second.grad is None
        return found

    expected = after(model, lambda: step(stateful[0]))
    assert_same(after(model, lambda: step(stateful[1])), expected)


def test_frozen_parameters_and_adapters(variants):
    model, compiled = variants
    frozen = {"embedding.weight", "blocks.0.norm.weight", "blocks.0.up.bias"}
    for trained in (lambda name: name not in frozen, lambda name: name.startswith(("up.", "down."))):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(trained(name))
        _, found = both(model, compiled, lambda f: weighted(f(IDS)["adapted"][0]).backward())
        assert found["up.weight"] is not None and found["embedding.weight"] is None
    model.requires_grad_(True)


def test_logits_of_one_row_are_not_copied_and_may_be_written(model, compiled):
    """Its tokens are the rows that chunks write, in their order, unless some are padding."""
    ids, mask = IDS[:1], torch.ones_like(IDS[:1], dtype=torch.bool)
    with torch.no_grad():
        logits = compiled(ids)
    assert logits.untyped_storage().nbytes() == (ids.numel() + 2) * logits[0, 0].nbytes  # the chunks', and two more
    for real in (ids.shape[1], ids.shape[1] - 2):
        mask[:, real:] = False

        def step(run):
            logits = run(ids, mask)
            logits.mul_(0.5)
            weighted(logits * mask[..., None]).backward()
            return ()

        assert_same(after(model, lambda: step(compiled)), after(model, lambda: step(model)))


def test_gradients_at_padding_are_an_error_not_a_loss(model, compiled):
    mask = torch.ones_like(IDS, dtype=torch.bool)
    mask[1, 5:] = False
    out = compiled(IDS, mask)
    for uses_padding in (lambda x: x.pow(2).add(x), torch.square, torch.abs, lambda x: x.relu().pow(3), torch.cosh):
        with pytest.raises(RuntimeContractError, match="4 of 4 padding positions with a gradient"):
            uses_padding(out).sum().backward(retain_graph=True)
    with torch.no_grad():
        assert not compiled(IDS, mask)[~mask].any()
    weighted(compiled(IDS, mask) * mask[..., None]).backward()
    assert model.head.weight.grad is not None


@pytest.mark.parametrize("factor", [float("nan"), float("inf")])
def test_a_loss_without_a_value_has_gradients_that_tell_of_it(model, compiled, factor):
    """A mean over no tokens is 0 / 0, and a scaled loss may overflow: both reach padding as NaN, through any mask."""
    mask = torch.ones_like(IDS, dtype=torch.bool)
    mask[1, 5:] = False
    ((compiled(IDS, mask) * mask[..., None]).sum() * factor).backward()
    assert not any(parameter.grad.isfinite().all() for name, parameter in model.named_parameters())
    model.zero_grad()
    with pytest.raises(RuntimeContractError, match="4 of 4 padding positions with a gradient, all NaN"):
        torch.where(mask[..., None], 1.0, factor * 0).mul(compiled(IDS, mask)).sum().backward()
    model.zero_grad()
    dta_compile.streaming_step(compiled, lambda row, out: (out * mask[row, :, None]).sum() * factor, IDS, mask)
    assert not any(parameter.grad.isfinite().all() for name, parameter in model.named_parameters())
    model.zero_grad()
    with pytest.raises(RuntimeContractError, match="4 of 4 padding positions with a gradient, all NaN"):
        dta_compile.streaming_step(
            compiled, lambda row, out: torch.where(mask[row, :, None], 1.0, factor * 0).mul(out).sum(), IDS, mask
        )
    assert all(parameter.grad is None for parameter in model.parameters())


def test_gradients_at_padding_are_an_error_in_a_streaming_step_too(model, compiled):
    mask = torch.ones_like(IDS, dtype=torch.bool)
    mask[1, 5:] = mask[3, 7:] = False
    padding = int((~mask).sum())
    with pytest.raises(RuntimeContractError, match=f"{padding} of {padding} padding positions with a gradient"):
        dta_compile.streaming_step(compiled, lambda row, out: out.abs().sum(), IDS, mask)
    assert all(parameter.grad is None for parameter in model.parameters())
    dta_compile.streaming_step(compiled, lambda row, out: weighted(out * mask[row, :, None]), IDS, mask)
    assert model.head.weight.grad is not None


class PositionsToo(BareLM):
    """Returns, besides the logits, a trained value of the positions alone: no batch axis."""

    def forward(self, ids, mask=None):
        return super().forward(ids, mask), self.head(self.position(torch.arange(ids.shape[1])))


@pytest.mark.parametrize("rows", [slice(None), slice(1)])
def test_a_value_without_batch_axis_comes_back_without_one(rows):
    model = PositionsToo()
    compiled = torch.compile(model, backend="dta", options=SMALL_CHUNKS)

    def step(forward):
        logits, positions = forward(IDS[rows])
        (weighted(logits) + positions.pow(2).sum()).backward()
        return logits, positions

    assert_same(after(model, lambda: step(compiled)), after(model, lambda: step(model)))


def test_tensors_without_values_have_the_shapes_of_results():
    """Of a model on the meta device, say, whose operators or bytes somebody counts: there are no prefixes to share."""
    torch._dynamo.reset()
    empty = BareLM().to("meta")
    out = torch.compile(empty, backend="dta")(IDS.to("meta"))
    assert out.is_meta and out.shape == empty(IDS.to("meta")).shape
