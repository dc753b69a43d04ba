"""Ordinary training code: several batches, numbers as arguments, computed weights, ids of several codebooks."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters

import dta_compile
from dta_compile.errors import RefusalError
from tests.support.inside import inside
from tests.support.tiny import VOCABULARY, WIDTH, BareLM, TinyLM, after, assert_same, log_probs, shared_ids, weighted

OPTIONS = {"chunk_size": 3, "codegen": "eager"}


@pytest.fixture
def model():
    return BareLM()


def compiled_function(function, **options):
    torch._dynamo.reset()
    return torch.compile(function, backend="dta", options=OPTIONS | options)


def assert_equals_eager(function, compiled, model, *args):
    """Outputs, and the gradients of weighted sums of all of them; `args` may make some anew for each run."""

    def step(run):
        outputs = run(*(arg() if callable(arg) else arg for arg in args))
        sum(weighted(out) for out in outputs).backward()
        return [out.detach() for out in outputs]

    expected = after(model, lambda: step(function))
    assert_same(after(model, lambda: step(compiled)), expected)


@pytest.mark.parametrize("take", [torch.take_along_dim, torch.Tensor.take_along_dim])
def test_entries_taken_along_a_dimension_leave_sizes_free(take, model):
    """torch computes `take_along_dim` with sizes as numbers, which would make a graph for every batch."""

    def function(ids, last):
        logits = model(ids)
        values = take(logits.log_softmax(-1), ids[..., None] - VOCABULARY, dim=-1)
        return values.squeeze(-1), take(logits, last[:, None, None], 1)

    compiled = compiled_function(function)
    counters.clear()
    for rows, tokens in ((5, 9), (4, 11), (3, 6)):
        assert_equals_eager(function, compiled, model, shared_ids(rows, tokens), torch.arange(rows) - 2)
    assert counters["stats"]["unique_graphs"] == 1


def test_the_last_token_by_one_hot_leaves_sizes_free(model):
    def function(ids, last):
        return ((model(ids) * F.one_hot(last, ids.shape[1])[..., None]).sum(1),)

    compiled = compiled_function(function)
    counters.clear()
    for rows, tokens in ((5, 9), (4, 11), (3, 6)):
        assert_equals_eager(function, compiled, model, shared_ids(rows, tokens), torch.arange(rows) + 1)
    assert counters["stats"]["unique_graphs"] == 1


def test_numbers_of_sizes_are_as_precise_as_eagers(model):
    """Times a boolean or an integer, a float is one of the default dtype. No number widens a tensor of one number."""
    model.gain = torch.nn.Parameter(torch.tensor(0.5), requires_grad=False)

    def function(ids):
        gains = (model.gain * (ids.shape[1] / 2) + ids.shape[0]).expand(WIDTH, 1)
        x = model.embedding(ids) + F.linear(ids[..., None].float(), gains)
        x = x + (x > 0) * (1000.0 / ids.shape[1]) + ids[..., None] * (10.0 / ids.shape[0])
        return (model.head(model.mix(x)),)

    compiled = compiled_function(function)
    for rows, tokens in ((5, 9), (7, 11)):
        assert_equals_eager(function, compiled, model, shared_ids(rows, tokens))


def test_rows_that_the_function_pads_itself(model):
    """How long rows are is known by their sizes alone, whatever the inputs are."""
    padded = functools.partial(torch.nn.utils.rnn.pad_sequence, batch_first=True)

    def function(*rows):
        real = padded([torch.ones_like(row) for row in rows]).bool()
        return [model(padded(rows), real).logsumexp(-1) * real]

    compiled = compiled_function(function)
    for lengths in ((9, 5, 7), (4, 11, 6)):
        assert_equals_eager(function, compiled, model, *(shared_ids(2, length)[0] for length in lengths))


def test_ids_and_mask_concatenated_from_tensors_of_their_own(model):
    """Only a guard on sums of sizes says that there are as many tokens in both."""

    def function(prompt, answers, is_answer):
        real = F.pad(is_answer, (prompt.shape[1], 0), value=True)
        return [model(torch.cat([prompt.expand(len(answers), -1), answers], 1), real).logsumexp(-1) * real]

    compiled = compiled_function(function)
    for rows, known, tokens in ((4, 6, 5), (3, 9, 4)):
        is_answer = torch.arange(tokens) < 2 + torch.arange(rows)[:, None]
        prompt, answers = shared_ids(2, known)[:1], shared_ids(rows, tokens)
        assert_equals_eager(function, compiled, model, prompt, answers, is_answer)


def run_from_embeddings(model, x):
    return model.head(model.mix(x))


@pytest.mark.slow
def test_chosen_and_rejected_of_different_lengths_with_a_reference_model(model):
    frozen = BareLM(seed=3).requires_grad_(False)

    def preference(chosen, rejected):
        chosen_log_prob = log_probs(model(chosen), chosen).sum(-1)
        rejected_log_prob = log_probs(model(rejected), rejected).sum(-1)
        with torch.no_grad():
            base = log_probs(frozen(chosen), chosen).sum(-1) - log_probs(frozen(rejected), rejected).sum(-1)
        return -F.logsigmoid(0.1 * (chosen_log_prob - rejected_log_prob - base)).mean(), rejected_log_prob

    compiled = compiled_function(preference, verify="first")
    for tokens in ((9, 7), (4, 11)):
        chosen, rejected = (shared_ids(5, length, seed=length) for length in tokens)
        assert_equals_eager(preference, compiled, model, chosen, rejected)
    assert dta_compile.last_plan(compiled).stats.compression > 1
    report = dta_compile.explain(preference, chosen, rejected)
    assert "batches of other sizes, each with a tree of its own\n  2 layers: causal" in str(report)
    with pytest.raises(RefusalError, match="mixes sequences"):
        dta_compile.streaming_step(compiled, lambda row, *outputs: outputs[0], chosen, rejected)


@pytest.mark.slow
def test_three_batches_of_different_sizes_one_with_padding(model):
    def losses(ids, fewer, padded, mask):
        shorter = log_probs(model(ids[:, :-2]), ids[:, :-2])
        masked = log_probs(model(padded, mask), padded)[mask[:, 1:]]
        auxiliary = (model.embedding(padded) * mask[..., None]).mean(1)  # padding is not computed
        return log_probs(model(ids), ids), shorter.exp(), log_probs(model(fewer), fewer).amax(1), masked, auxiliary

    fewer, padded = shared_ids(3, 9, seed=2), shared_ids(4, 6, seed=3)
    mask = torch.arange(6) < torch.tensor([6, 3, 5, 6])[:, None]
    compiled = compiled_function(losses)
    assert_equals_eager(losses, compiled, model, shared_ids(5, 9), fewer, padded, mask)


def test_the_plan_of_micro_batches_within_a_function_tells_of_each(model):
    ids = shared_ids(5, 9)
    compiled = compiled_function(lambda ids: torch.cat([model(part) for part in ids.split(2)]))
    with torch.no_grad():
        assert_same(compiled(ids), model(ids))
    for _ in range(2):
        plan = str(dta_compile.last_plan(compiled))
    assert plan.count("batch 2 of the call has a tree of its own: 1 sequences, 9 tokens, 9 to run") == 1


def test_a_batch_that_depends_on_another_is_refused(model):
    def encode(ids, context):
        pooled = run_from_embeddings(model, model.embedding(context)).mean(1, keepdim=True)[..., :WIDTH]
        return run_from_embeddings(model, model.embedding(ids) + pooled)

    with pytest.raises(RefusalError, match="tokens are mixed before the last attention") as caught:
        compiled_function(encode)(shared_ids(5, 9), shared_ids(5, 7))
    assert "test_supported_programs.py" in caught.value.where


def test_batches_joined_in_the_function_and_split_again(model):
    def preference(chosen, rejected):
        longest = max(chosen.shape[1], rejected.shape[1])
        both = torch.cat([F.pad(ids, (0, longest - ids.shape[1])) for ids in (chosen, rejected)])
        log_prob = log_probs(model(both), both)
        first, second = log_prob.split([len(chosen), len(rejected)])
        return -F.logsigmoid(first.sum(1) - second.sum(1)), log_prob[: len(chosen)], log_prob.chunk(2)[1].exp()

    compiled = compiled_function(preference)
    for tokens in ((9, 7), (6, 8)):
        assert_equals_eager(preference, compiled, model, *(shared_ids(4, n, seed=n) for n in tokens))


def test_numbers_as_arguments_may_differ_from_call_to_call(model):
    def scores(ids, number, factor=2.0, name=None):
        positions = model.position.weight[number : number + ids.shape[1]]
        logits = run_from_embeddings(model, model.embedding(ids) + positions) * number + ids.shape[0] * factor
        if name is None:
            logits = logits.clamp(min=-number) ** number
        turned = torch.roll(logits, number, -1) / (number + 1)
        return logits[..., :number], logits.topk(number, -1)[0], turned, logits[:, number:].mean(1), logits[..., number]

    compiled = compiled_function(scores)
    for arguments in ((1,), (2,), (3, 0.5, "linear")):
        assert_equals_eager(scores, compiled, model, shared_ids(5, 9 - arguments[0]), *arguments)


def test_floats_computed_from_arguments_may_differ_from_call_to_call(model):
    """`4 - bound` of an annealed range: torch draws no constant from a guard on a sum of floats."""

    def clipped(ids, bound):
        return (log_probs((model(ids) * 3).clamp(-4 + bound, 4 - bound), ids),)

    compiled = compiled_function(clipped)
    for rows, bound in ((6, 0.2), (4, 0.3), (5, 0.15)):
        assert_equals_eager(clipped, compiled, model, shared_ids(rows, 11), bound)


def test_weights_that_were_computed_outside_also_as_wide_as_the_batch_is_long(model):
    def with_weights(ids, down, merged):
        hidden = model.hidden(ids)
        return F.linear(hidden + (hidden @ down) @ down.T, merged["head"]), log_probs(model(ids), ids) * merged["each"]

    def merged():
        head = model.head.weight * model.head.bias[:, None]
        return {"head": head, "each": model.head.bias.sum().expand(len(ids), ids.shape[1] - 1)}

    compiled = compiled_function(with_weights)
    for batch in ((16, 16), (5, 9)):
        ids = shared_ids(*batch)
        assert_equals_eager(with_weights, compiled, model, ids, lambda: model.head.weight[:WIDTH, :5] * 2, merged)


def test_adapters_that_each_row_chooses(model):
    model.down, model.up = (torch.nn.Parameter(torch.randn(3, *size) / 4) for size in ((WIDTH, 2), (2, WIDTH)))
    model.flat = torch.nn.Embedding(3, 2 * WIDTH)
    model.double()

    def adapted(ids, chosen):
        x = model.embedding(ids)
        x = x + torch.bmm(x @ model.down[chosen], model.up.index_select(0, chosen % 3))
        x = x + (model.flat(chosen % 3).view(-1, 2, WIDTH) @ x.mT).mT @ model.up[chosen]
        return (run_from_embeddings(model, x),)

    compiled, ids = compiled_function(adapted), shared_ids(5, 9)
    assert_equals_eager(adapted, compiled, model, ids, torch.tensor([0, 2, 2, -3, 0]))
    tokens = dta_compile.last_plan(compiled).stats.tree_tokens
    with pytest.raises(IndexError, match="index 3 is out of bounds"):
        compiled(ids, torch.tensor([0, 1, 3, 0, 0]))
    assert_equals_eager(adapted, compiled, model, ids, torch.tensor([1, 1, 1, 1, 1]))
    assert dta_compile.last_plan(compiled).stats.tree_tokens < tokens, "rows with the same adapter share their prefixes"
    model.flat.padding_idx = 1  # so that this entry gets no gradient
    with pytest.raises(RefusalError, match="tokens are mixed before the last attention"):
        compiled_function(adapted)(ids, torch.tensor([0, 2, 2, 1, 0]))


@pytest.mark.slow
def test_ids_of_several_codebooks(model):
    def codes(last, second):
        x = model.embedding(last).sum(2) + model.embedding(second).sum(1)
        x = x + model.position(torch.arange(last.shape[1]))
        logits = torch.stack([run_from_embeddings(model, x) * (k + 1) for k in range(last.shape[2])], 2)
        log_prob = logits[:, :-1].log_softmax(-1).gather(-1, last[:, 1:, :, None])[..., 0]
        return log_prob, F.cross_entropy(logits.flatten(0, 2), last.flatten(), ignore_index=0)

    compiled = compiled_function(codes)
    for batch, tokens, books in ((4, 9, 3), (3, 7, 3), (3, 3, 2)):
        ids = torch.stack([shared_ids(batch, tokens, seed) for seed in range(books)], -1) % VOCABULARY
        assert_equals_eager(codes, compiled, model, ids, ids.flip(0).transpose(1, 2).contiguous())


@pytest.mark.slow
def test_complex_numbers(model):
    model.turn = torch.nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex128) / 4)

    def spectra(ids, mask):
        turned = model.hidden(ids, mask).to(torch.complex128) @ model.turn
        energy = torch.where(mask, (turned * turned.conj()).real.sum(-1), 0)
        return torch.where(mask, torch.view_as_real(turned.sum(-1).exp()).sum(-1), 0), energy

    def logits(ids):
        pairs = model.head(model.hidden(ids))[..., :20].unflatten(-1, (10, 2)).contiguous()
        return (torch.view_as_complex(pairs).prod(-1),)

    mask = torch.arange(9) < torch.tensor([9, 7, 9, 5])[:, None]
    for verify in ("off", "first"):
        assert_equals_eager(spectra, compiled_function(spectra, verify=verify), model, shared_ids(4, 9), mask)
    compiled, ids = compiled_function(logits), shared_ids(4, 9)
    expected = after(model, lambda: logits(ids)[0].abs().sum().backward())
    assert_same(after(model, lambda: compiled(ids)[0].abs().sum().backward()), expected)
    assert "gradients within" in dta_compile.last_plan(compiled).estimates.self_check


def test_an_empty_part_of_another_dtype_counts_for_the_result(model):
    def widened(ids):
        x = model.hidden(ids).float()
        return (torch.cat([torch.zeros(0, dtype=torch.float64), x], 1).exp(), torch.cat([torch.zeros(0), ids]))

    compiled, ids = compiled_function(widened), shared_ids(4, 9)
    for mine, theirs in zip(compiled(ids), widened(ids), strict=True):
        assert_same(mine, theirs, tolerance=1e-6)


def test_stacks_of_parts_and_of_results_are_no_loops_over_rows(model):
    def stacked(ids):
        x = model.hidden(ids)
        halves = torch.stack(x.chunk(2, -1)).sum(0)
        return torch.stack(torch.split(halves, 4, -1), -1) + torch.stack([x[..., :4], x[..., 4:8]], -1)

    def tops(ids):
        scores = model(ids)
        return torch.stack([row.max(-1).values for row in scores])

    for function in (stacked, tops):
        assert_equals_eager(function, compiled_function(function), model, shared_ids(4, 9))


def test_loops_over_numbers_of_sequences(model):
    def weighed(ids):
        scores = model(ids).logsumexp(-1).mean(1)
        return torch.stack([row.softmax(-1) * 2 for row in scores]), torch.stack([s.logsumexp(0) for s in scores])

    assert_equals_eager(weighed, compiled_function(weighed), model, shared_ids(4, 9))


def test_batch_norm_by_kept_statistics_and_batched_products_of_heads_are_token_wise(model):
    norm = torch.nn.BatchNorm1d(WIDTH).double().eval()
    norm.running_var.uniform_(0.5, 2, generator=torch.Generator().manual_seed(1))
    bias, gates = model.norm.bias.unflatten(0, (2, 1, -1)), model.position.weight[: WIDTH // 2].unflatten(1, (2, -1))

    def function(ids):
        x = norm(model.embedding(ids).transpose(1, 2)).transpose(1, 2)
        heads = x.reshape(-1, 2, WIDTH // 2).permute(1, 0, 2)
        gated = torch.baddbmm(bias.detach(), heads, gates.detach().transpose(0, 1))
        return (run_from_embeddings(model, gated.permute(1, 0, 2).reshape(x.shape)),)

    assert_equals_eager(function, compiled_function(function), model, shared_ids())


def test_values_that_are_put_together_as_they_were_mix_no_tokens(model):
    def function(ids):
        x = model.embedding(ids)
        batch, tokens, width = x.shape
        x = x.movedim(1, 0).flatten(1).view(tokens, batch, width).movedim(0, 1) * 2
        x = torch.cat([x[:, :2], x[:, 2:-1], x[:, -1:]], 1).sin()
        return (run_from_embeddings(model, x[:, torch.arange(tokens)] + x[torch.arange(batch)]),)

    assert_equals_eager(function, compiled := compiled_function(function), model, shared_ids())
    assert dta_compile.last_plan(compiled).stats.compression > 1


@pytest.mark.parametrize(
    "moved",
    [
        lambda x: torch.cat([x[:, 1:], x[:, :1]], 1),
        lambda x: torch.cat([x[:, :2], x[:, 3:], x[:, 2:3]], 1),
        lambda x: x[:, torch.arange(x.shape[1]).flip(0)],
        lambda x: x.flatten(0, 1).view(x.shape[1], x.shape[0], -1).transpose(0, 1),
    ],
)
def test_values_that_are_put_together_in_another_way_are_refused(model, moved):
    function = compiled_function(lambda ids: run_from_embeddings(model, moved(model.embedding(ids))))
    with pytest.raises(RefusalError):
        function(shared_ids(4, 9))


def test_assertions_about_what_a_tensor_holds(model):
    names = {}
    exec(
        "def checked(ids):\n assert ids.max().item() < 30 * ids.shape[0], 'too large'\n return ids", names
    )  # pytest rewrites those of a file

    def run(ids):
        return (log_probs(model(names["checked"](ids)), ids),)

    ids = shared_ids() % 30
    compiled = compiled_function(run)
    assert_equals_eager(run, compiled, model, ids)
    assert inside(compiled).only
    with pytest.raises((RuntimeError, AssertionError), match="too large"):  # as Dynamo of this torch has it
        compiled(ids + 30 * len(ids))


@pytest.mark.parametrize("given", ["arguments", "buffers"])
def test_weights_that_are_no_parameters(given):
    """Tensors without a gradient in place of all parameters, as `functional_call` has them, and weights as buffers."""
    model = TinyLM()
    weights = {name: 1.1 * value.detach() for name, value in model.named_parameters()}

    def function(weights, ids):
        return torch.func.functional_call(model, weights, ids).log_softmax(-1)

    if given == "buffers":
        for name, value in weights.items():
            owner, _, own = name.rpartition(".")
            delattr(model.get_submodule(owner), own)
            model.get_submodule(owner).register_buffer(own, value)
        weights = {}
    compiled = compiled_function(function)
    for rows, tokens in ((5, 9), (4, WIDTH), (WIDTH, 11)):  # some of them as many as features
        ids = shared_ids(rows, tokens)
        assert_same(compiled(weights, ids), function(weights, ids))
        assert dta_compile.last_plan(compiled).stats.compression > 1.2
