"""The self-check of the first call: what it finds, what it leaves alone, and when it says that there is none."""

import pytest
import torch
from torch import nn

import dta_compile
from dta_compile.errors import RuntimeContractError, VerificationError
from dta_compile.runtime.verification import sample, self_check
from tests.support.inside import inside
from tests.support.tiny import SMALL_CHUNKS, BareLM, TinyLM, after, assert_same, log_probs, shared_ids, weighted


def dta(function, **options):
    return torch.compile(function, backend="dta", options=options)


def engine_of(compiled):
    return inside(compiled).newest


def check_line(compiled):
    text = str(dta_compile.last_plan(compiled))
    found = [line for line in text.splitlines() if line.startswith("  self-check ")]
    return text[text.index(found[0]) :].replace("\n           ", "") if found else None


@pytest.fixture(scope="module")
def steps():
    """A compiled model whose self-check can be run again and again."""
    torch._dynamo.reset()
    model = BareLM()
    compiled = dta(model, **SMALL_CHUNKS)
    compiled(shared_ids(5, 40))

    def step(*args):
        inside(compiled).forget_check()
        return compiled(*(args or (shared_ids(5, 40),)))

    return model, compiled, step


def test_the_plan_says_what_was_compared(steps):
    _, compiled, step = steps
    step()
    assert "self-check 2 rows of 40 tokens at the first call: outputs within " in check_line(compiled)
    within = [float(part.split()[0].rstrip(",;")) for part in check_line(compiled).split("within ")[1:]]
    assert len(within) == 2 and all(0 < found < 1e-12 for found in within)
    with torch.no_grad():
        compiled(shared_ids(5, 40))
    assert "outputs within" in check_line(compiled) and "gradients" not in check_line(compiled)


@pytest.mark.parametrize(
    ("where", "name", "value", "says"),
    [
        (self_check, "SHARE", 0.0, "skipped: it would take "),
        (self_check, "default_budget", lambda device: 0, "MiB for 2 rows of 40 tokens are not free"),
        (sample, "WHOLE", 0, "skipped: its inputs cannot be cut to a few tokens"),
        (sample, "_bytes", lambda call, sizes: 1 // 0, "skipped: ZeroDivisionError: "),
    ],
)
def test_why_nothing_was_compared(steps, monkeypatch, where, name, value, says):
    model, compiled, step = steps
    monkeypatch.setattr(where, name, value)
    monkeypatch.setattr(self_check, "UNNOTICED", 0.0)
    ids = shared_ids(5, 40)
    assert_same(step(ids), model(ids))
    assert says in check_line(compiled)


def test_empty_batches_are_no_first_call():
    mask = torch.zeros(3, 8, dtype=torch.bool)
    masked = dta(BareLM())
    masked(shared_ids(3, 8), mask)
    assert check_line(masked) is None and not engine_of(masked).checked
    masked(shared_ids(3, 8), torch.ones_like(mask))
    assert "outputs within" in check_line(masked)


def test_nothing_is_disturbed(steps):
    """Random numbers, gradients, hooks, saved tensors and autocast's cache are what they would be without."""
    model, compiled, step = steps
    seen, packed = [], []
    handles = [p.register_hook(seen.append) for p in model.parameters()]
    handles += [p.register_post_accumulate_grad_hook(seen.append) for p in model.parameters()]
    state, timed = torch.get_rng_state(), engine_of(compiled).calibration(torch.device("cpu")).calls
    with torch.autograd.graph.saved_tensors_hooks(lambda x: packed.append(x) or x, lambda x: x):
        compiled(shared_ids(5, 40))
        without = len(packed)
        step()
    assert len(packed) == 2 * without and "outputs within" in check_line(compiled)
    assert torch.equal(torch.get_rng_state(), state)
    assert not seen and all(p.grad is None for p in model.parameters())
    assert engine_of(compiled).calibration(torch.device("cpu")).calls == timed
    assert dta_compile.last_plan(compiled).stats.sequences == 5
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize("method", ["write", "mix_backward"])
@pytest.mark.parametrize("streaming", [False, True])
def test_a_mismatch_is_found_before_a_gradient_is_handed_out(steps, monkeypatch, method, streaming):
    from dta_compile.runtime.path.stack import PathStack

    model, compiled, step = steps

    def wrong_values(self, layer, key, value, write=PathStack.write):
        write(self, layer, key, value * 1.01)

    def wrong_gradients(self, *arguments, backward=PathStack.mix_backward):
        query, key, value = backward(self, *arguments)
        return query, key * 1.01, value

    monkeypatch.setattr(PathStack, method, {"write": wrong_values, "mix_backward": wrong_gradients}[method])
    what = "output 0" if method == "write" else "the gradient of .*"
    with pytest.raises(VerificationError, match=f"{what} .*differs from the captured program(?s:.*)got: "):
        if streaming:
            inside(compiled).forget_check()
            dta_compile.streaming_step(compiled, lambda row, out: out.sum(), shared_ids(5, 40))
        else:
            step()
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("verify", ["auto", "first", "always"])
def test_calls_are_checked_until_one_is_right(monkeypatch, verify):
    from dta_compile.runtime.path.stack import PathStack

    def wrong_values(self, layer, key, value, write=PathStack.write):
        write(self, layer, key, value * 1.01)

    model, ids = BareLM(), shared_ids(5, 40)
    compiled = dta(model, **SMALL_CHUNKS, verify=verify)
    with monkeypatch.context() as patched:
        patched.setattr(PathStack, "write", wrong_values)
        for _ in range(2):
            with pytest.raises(VerificationError, match="output 0"):
                compiled(ids)
    assert_same(compiled(ids), model(ids))
    assert "outputs within" in check_line(compiled) and engine_of(compiled).checked


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_divergence_of_equal_models_is_only_rounding(dtype, monkeypatch):
    """Its gradient is zero but for rounding, as at the first step of a run with a penalty on it; a wrong one is not."""
    from dta_compile.runtime.path.stack import PathStack

    model, reference = BareLM().to(dtype), BareLM().to(dtype).requires_grad_(False)

    def divergence(ids):
        mine, theirs = model(ids).log_softmax(-1), reference(ids).log_softmax(-1)
        return (mine.exp() * (mine - theirs)).sum(-1)

    compiled = dta(divergence, **SMALL_CHUNKS)
    compiled(shared_ids(5, 40)).sum().backward()
    assert "gradients within" in check_line(compiled)
    assert all(p.grad.abs().max() < 1e5 * torch.finfo(dtype).eps for p in model.parameters())

    def wrong_gradients(self, *arguments, backward=PathStack.mix_backward):
        return tuple(grad + 1e-3 for grad in backward(self, *arguments))

    monkeypatch.setattr(PathStack, "mix_backward", wrong_gradients)
    inside(compiled).forget_check()
    with pytest.raises(VerificationError, match="the gradient of"):
        compiled(shared_ids(5, 40))


def test_an_operator_with_a_wrong_rule_is_found():
    from dta_compile.passes.axes.tokenwise_operators import TOKEN_RULES
    from dta_compile.token_rules import pointwise

    @torch.library.custom_op("dta_test_self_check::sums", mutates_args=())
    def sums(x: torch.Tensor) -> torch.Tensor:
        return x.cumsum(1)

    sums.register_fake(torch.empty_like)
    sums.register_autograd(lambda ctx, grad: grad.flip(1).cumsum(1).flip(1))
    model = BareLM()
    dta_compile.register_token_rule(torch.ops.dta_test_self_check.sums.default, pointwise)
    try:
        with pytest.raises(VerificationError, match=r"output 0 .*differs"):
            dta(lambda ids: model.head(sums(model.hidden(ids))))(shared_ids())
    finally:
        TOKEN_RULES.pop(torch.ops.dta_test_self_check.sums.default)


def test_rows_and_columns_around_a_fork(steps, monkeypatch):
    """Long batches are cut to rows that share a prefix and fork within the columns that are left."""
    _, compiled, step = steps
    monkeypatch.setattr(sample, "LEAST_TOKENS", 32)
    monkeypatch.setattr(sample, "SHARE", 1000)
    taken = []
    monkeypatch.setattr(self_check, "sample", lambda call: taken.append(sample.sample(call)) or taken[-1])
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 31, (6, 60), generator=generator)
    ids[4, :50] = ids[2, :50]
    step(ids)
    (found,) = taken
    assert "2 rows of 16 tokens" in check_line(compiled)
    (cut,) = [arg for arg in found.args if isinstance(arg, torch.Tensor) and arg.dtype is torch.int64]
    assert sorted(map(tuple, cut.tolist())) == sorted(map(tuple, ids[[2, 4], 42:58].tolist()))
    step(ids[:, :16])
    assert "2 rows of 16 tokens" in check_line(compiled)


def test_axes_that_are_indexed_by_data_are_not_cut(monkeypatch):
    """Otherwise indices would be out of bounds, which ends the process on a GPU."""
    monkeypatch.setattr(sample, "LEAST_TOKENS", 32)
    model = BareLM()

    def last(ids, at):
        return model(ids).gather(1, at[:, None, None].expand(-1, -1, 31))

    compiled = dta(last)
    compiled(shared_ids(5, 40), torch.tensor([39, 38, 39, 37, 39]))
    assert "2 rows of 40 tokens" in check_line(compiled)

    def reordered(ids, at):
        return log_probs(model(ids), ids)[at]

    compiled = dta(reordered)
    compiled(shared_ids(6, 16), torch.tensor([5, 0, 1, 4, 3, 2]))
    assert "6 rows of 16 tokens" in check_line(compiled)


class Bfloat16(TinyLM):
    def __init__(self):
        super().__init__(layers=1)
        self.bfloat16()


@pytest.mark.parametrize("build", [lambda: BareLM(), lambda: BareLM().float(), Bfloat16])
@pytest.mark.sample(1)
def test_rounding_and_padding_are_no_mismatch(build):
    """Sums that cancel, ties, values at padding, infinities, whole numbers: right programs pass in every precision."""
    model = build()

    def outputs(ids, mask, old):
        logits = model(ids, mask)
        found = log_probs(logits, ids)
        ratio = (found - old).exp()
        real = mask[:, 1:].to(found)
        return (
            ((ratio - 1) * real).sum(),  # nothing but rounding
            (found * real).sum(1),
            logits.argmax(-1),
            torch.where(mask[..., None], logits, -torch.inf),
            mask.long().sum(1),
            found > -3,
        )

    ids, mask = shared_ids(5, 20), torch.ones(5, 20, dtype=torch.bool)
    mask[1, 12:], mask[3, 15:] = False, False
    old = log_probs(model(ids, mask), ids).detach()
    compiled = dta(outputs)
    results = compiled(ids, mask, old)
    assert "outputs within" in check_line(compiled) and "gradients within" in check_line(compiled)
    results[1].sum().backward()


def test_programs_that_are_not_comparable():
    model = BareLM()
    ids = shared_ids()

    def noisy(ids):
        return model(ids) + torch.rand(ids.shape[0], 1, 1)

    compiled = dta(noisy)
    try:
        compiled(ids)
    except dta_compile.errors.RefusalError:
        pytest.skip("random numbers are refused")
    assert "skipped: aten.rand.default draws random numbers" in check_line(compiled)


def test_whole_calls():
    """`first` and `always` compare what they return, and leave gradients and hooks to the user's backward."""
    model = BareLM()
    compiled, seen = dta(model, verify="always"), []
    handle = model.head.weight.register_hook(seen.append)
    out = compiled(shared_ids())
    assert "the whole call: outputs within" in check_line(compiled) and not seen
    weighted(out).backward()
    assert len(seen) == 1
    handle.remove()
    got = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    weighted(model(shared_ids())).backward()
    assert_same(got, {name: p.grad for name, p in model.named_parameters()})


def test_without():
    compiled = dta(nn.Sequential(BareLM()), verify="off")
    compiled(shared_ids())
    assert check_line(compiled) is None


def test_padding_that_comes_near_by_chance_is_not_compared():
    """Eager computes something else at padding, and of a thousand such entries some look as if nothing changed them."""
    model = Bfloat16()
    ids = shared_ids(40, 60)
    mask = torch.arange(60) < torch.arange(10, 50)[:, None]
    compiled = dta(lambda ids, mask: log_probs(model(ids, mask), ids), verify="always")
    (compiled(ids, mask) * mask[:, 1:]).sum().backward()
    assert "outputs within" in check_line(compiled) and "gradients within" in check_line(compiled)


@pytest.mark.parametrize("counts_padding", [True, False])
def test_a_metric_that_counts_padding_is_refused_though_no_gradient_tells_of_it(counts_padding):
    torch._dynamo.reset()
    model, ids = BareLM(), shared_ids(4, 9)
    mask = torch.arange(9) < torch.tensor([[9], [6], [9], [7]])

    def function(ids, mask):
        found = log_probs(model(ids, mask), ids)
        loss = (found * mask[:, 1:]).sum() / mask[:, 1:].sum()
        with torch.no_grad():
            counted = found if counts_padding else found.masked_fill(~mask[:, 1:], -torch.inf)
            largest = (counted + 5).exp().max()
        return loss, largest, found

    compiled = dta(function, **SMALL_CHUNKS)
    if counts_padding:
        with pytest.raises(VerificationError, match=r"output 1 \(max.*depends on padding") as caught:
            compiled(ids, mask)
        assert "largest = (counted + 5).exp().max()" in caught.value.where
    else:
        assert_same(compiled(ids, mask)[:2], function(ids, mask)[:2])
        assert "within" in check_line(compiled)


@pytest.mark.sample(3)
@pytest.mark.parametrize("verify", ["auto", "first", "always", "off"])
@pytest.mark.parametrize("masked", [False, True])
def test_a_metric_is_checked_at_the_first_call_that_has_padding(verify, masked):
    torch._dynamo.reset()
    model, ids = BareLM(), shared_ids(4, 9)
    full = torch.ones(4, 9, dtype=torch.bool)
    mask = torch.arange(9) < torch.tensor([[9], [6], [9], [7]])

    def function(ids, mask):
        found = log_probs(model(ids, mask), ids)
        with torch.no_grad():
            counted = found * mask[:, 1:] if masked else found
            return found, counted.sum(1), counted.mean()

    compiled = dta(function, verify=verify, **SMALL_CHUNKS)
    for _ in range(2):
        assert_same(compiled(ids, full), function(ids, full))
    for _ in range(2):  # a refused call leaves the check to the next one
        if masked or verify == "off":
            results = compiled(ids, mask)
            assert not masked or bool(torch.isclose(results[2], function(ids, mask)[2], rtol=1e-9))
        else:
            with pytest.raises(VerificationError, match=r"output 1 \(.*depends on padding"):
                compiled(ids, mask)


def test_a_metric_that_reads_padding_by_the_data_of_a_later_call_is_refused():
    """By a mask of the caller's; with a gradient the backward tells."""
    torch._dynamo.reset()
    model, ids = BareLM(), shared_ids(4, 9)
    mask = torch.arange(9) < torch.tensor([[9], [6], [9], [7]])

    def function(ids, mask, weights):
        found = log_probs(model(ids, mask), ids)
        return (found * mask[:, 1:]).sum(), (found.detach() * weights).sum() / weights.sum(), (found * weights).sum()

    compiled, good = dta(function, **SMALL_CHUNKS), mask[:, 1:].double()
    bad = good.index_fill(1, torch.tensor([6]), 1.0)
    assert_same(compiled(ids, mask, good), function(ids, mask, good))
    with pytest.raises(VerificationError, match=r"output 1 .*depends on padding"):
        compiled(ids, mask, bad)
    assert_same(compiled(ids, mask, good), function(ids, mask, good))
    alone = dta(lambda *args: function(*args)[2], **SMALL_CHUNKS)
    for refused in (RuntimeContractError, VerificationError):
        with torch.set_grad_enabled(refused is RuntimeContractError):
            assert_same(alone(ids, mask, good), function(ids, mask, good)[2])
            with pytest.raises(refused, match="padding"):
                alone(ids, mask, bad).backward()


def test_padding_of_every_batch_of_a_call_is_looked_at():
    torch._dynamo.reset()
    model, ids, other = BareLM(), shared_ids(4, 9), shared_ids(3, 7)
    masks = torch.ones_like(ids, dtype=torch.bool), torch.arange(7) < torch.tensor([[7], [5], [6]])

    def weighted_by_means(ids, mask):
        found = log_probs(model(ids, mask), ids)
        return (found * mask[:, 1:]).sum(1) * found.detach().mean(1)

    def function(ids, mask, other, other_mask):
        return weighted_by_means(ids, mask), weighted_by_means(other, other_mask)

    compiled = dta(function, **SMALL_CHUNKS)
    with pytest.raises(VerificationError, match=r"output 1 .*depends on padding"):
        compiled(ids, masks[0], other, masks[1])


@pytest.mark.sample(1)
@pytest.mark.parametrize("verify", ["auto", "always"])
def test_the_last_columns_are_of_tokens_and_their_mean_is_none(verify):
    """Both have no token axis, and here padding alone determines the last column."""
    torch._dynamo.reset()
    model, ids = BareLM(), shared_ids(4, 9)
    mask = torch.arange(9) < torch.tensor([[8], [6], [8], [7]])

    def log_probs_kept(ids, mask):
        return model(ids, mask)[:, -4:].log_softmax(-1)

    compiled = dta(log_probs_kept, verify=verify, **SMALL_CHUNKS)
    kept, both = mask[:, -4:, None], (compiled, log_probs_kept)
    assert_same(*(after(model, lambda f=f: ((f(ids, mask) * kept).sin().sum().backward(),)) for f in both))
    averaging = dta(lambda ids, mask: (log_probs_kept(ids, mask), model(ids, mask)[:, -1].mean()), verify=verify)
    with pytest.raises(VerificationError, match=r"output 1 .*depends on padding"):
        averaging(ids, mask)


def test_a_metric_of_real_tokens_is_not_computed_twice_in_later_calls(monkeypatch):
    torch._dynamo.reset()
    model, ids = BareLM(), shared_ids(4, 9)
    mask = torch.arange(9) < torch.tensor([[9], [6], [9], [7]])

    def function(ids, mask):
        found = log_probs(model(ids, mask), ids)
        return found, (found * mask[:, 1:]).sum()

    compiled = dta(function, **SMALL_CHUNKS)
    compiled(ids, torch.ones_like(mask))
    runs = []
    engine = engine_of(compiled)
    epilogue = engine.epilogue
    monkeypatch.setattr(engine, "epilogue", lambda *args: runs.append(args) or epilogue(*args))
    counts = []
    for _ in range(3):
        compiled(ids, mask)
        counts.append(len(runs))
    assert counts == [3, 4, 5]
