"""Values of the tokens before, put together from slices, run over the tree as a mixer."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dta_compile
from dta_compile.errors import RefusalError, RuntimeContractError
from tests.support.tiny import SEGMENTS, SMALL_CHUNKS, WIDTH, BareLM, after, assert_same, shared_ids, weighted

OPTIONS = {**SMALL_CHUNKS, "codegen": "eager"}


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch.compiler.reset()


class Shifting(BareLM):
    def __init__(self, shift):
        super().__init__()
        self.shift = shift
        self.gate = nn.Parameter(torch.randn(WIDTH, dtype=torch.float64))

    def hidden(self, ids, mask=None):
        x = self.embedding(ids)
        if mask is not None:
            mask, zeroed = mask
            x = x * mask[..., None] if zeroed else x
            tokens = ids.shape[1]
            mask = torch.ones(tokens, tokens, dtype=torch.bool).tril() & mask[:, None, None, :]
        return self.mix(self.shift(x, self.gate), mask)


def check(model, *args, real=1):
    compiled = torch.compile(model, backend="dta", options=OPTIONS)

    def step(run):
        out = run(*args) * real
        weighted(out).backward()
        return (out,)

    assert_same(after(model, lambda: step(compiled)), after(model, lambda: step(model)))
    assert dta_compile.last_plan(compiled)


def added(x, g):
    return torch.cat([x[:, :1], x[:, 1:] + g * x[:, :-1]], 1)


def padded_and_cut(x, g):
    return x + g * F.pad(x, (0, 0, 1, 0))[:, :-1]


def padded_by_at_most_all(x, g):
    count = min(2, x.shape[1])
    return x + g * F.pad(x, (0, 0, count, -count))


def of_the_same_entries(x, g):
    return padded_and_cut(F.pad(x.index_select(1, torch.arange(x.shape[1])), (0, 0, 0, 0)), g)


def written_over_itself(x, g):
    y = x.clone()
    y[:, 1:] += g * x[:, :-1]
    return y


def after_padded_features(x, g):
    x = F.pad(x[..., :-4], (0, 4))
    return x + g * F.pad(x, (0, 0, 1, -1))


def of_rwkv(x, g):
    before = F.pad(x, (0, 0, 1, -1))
    return x + (before - x) * g.sigmoid()


def rolled(x, g):
    before = torch.roll(x, 1, 1)
    before[:, 0] = 0
    return x + g * before


def rolled_by_two(x, g):
    before = torch.roll(x, 2, dims=1)
    before[:, :2] = x[:, :2]
    return x + g * before


def written(x, g):
    before = torch.zeros_like(x)
    before[:, 1:] = x[:, :-1]
    return x + g * before


def after_a_learned_one(x, g):
    return x + torch.cat([g.expand(x.shape[0], 1, -1), x[:, :-1]], 1)


def of_heads(x, g):
    y = x.unflatten(-1, (2, -1)).transpose(1, 2)
    y = torch.cat([torch.zeros_like(y[:, :, :2]), y[:, :, :-2]], 2)
    return x + g * y.transpose(1, 2).flatten(2)


def twice(x, g):
    return x + added(F.silu(padded_and_cut(x, g)), g)


def of_one_length(x, g):
    for _ in range(x.shape[1]):
        x = x * 0.9
    return added(x, g)


def gated_by_a_layer(x, g):  # modded-nanogpt's smear
    gate = F.linear(x[:, 1:, :12], g[None, :12]).sigmoid()
    return torch.cat([x[:, :1], x[:, 1:] + gate * x[:, :-1]], 1)


def bounded(x, g):
    return torch.cat([x[:, :1], x[:, 1:] + (g * x[:, :-1]).clamp(-0.5, 0.5) ** 2], 1)


def of_some_features(x, g):
    y = (x * g).unflatten(-1, (2, -1))
    y[:, 1:, :, 4:] = y[:, :-1, :, 4:].clone()
    return y.flatten(2)


def of_features_beside_a_constant(x, g):
    y = x.new_zeros(*x.shape[:2], 2 * x.shape[2])
    y[..., : x.shape[2]] = x
    return rolled(y[..., ::2], g)


def kernel(g, *shape):
    return torch.arange(torch.Size(shape).numel(), dtype=g.dtype).sin().reshape(shape) * g[0]


def convolved(x, g):  # Zaya
    y = F.conv1d(F.pad(x, (0, 0, 2, 0)).transpose(1, 2), kernel(g, WIDTH, 1, 2), g, groups=WIDTH)
    return x + F.conv1d(y, kernel(g, WIDTH, WIDTH // 2, 2), g, groups=2).transpose(1, 2)


def convolved_with_dilation(x, g):
    y = F.conv1d(x.transpose(1, 2), kernel(g, WIDTH, WIDTH, 2), padding=2, dilation=2)
    return x + y[..., :-2].transpose(1, 2)


def convolved_by_channel(x, g):
    y = F.conv1d(x.transpose(1, 2), kernel(g, WIDTH, 1, 3), g, padding=2, groups=WIDTH)[..., : x.shape[1]]
    return x + F.conv1d(F.pad(y, (2, 0)), kernel(g, WIDTH, 1, 3), groups=WIDTH).transpose(1, 2)


def in_windows(x, g):  # Inkling 2
    windows = F.pad(x.transpose(1, 2), (2, 0))[..., -(x.shape[1] + 2) :].unfold(-1, 3, 1).flip(-1).transpose(1, 2)
    return x + (windows * (x @ kernel(g, WIDTH, 3))[:, :, None]).sum(-1)


def of_taps(x, g):
    padded = F.pad(x, (0, 0, 2, 0))
    return sum(g[i] * padded[:, i : i + x.shape[1]] for i in range(3))


def after_a_layer_of_zero(x, g):
    layer = kernel(g, WIDTH, WIDTH)
    first = F.linear(x.new_zeros(len(x), 1, WIDTH), layer, g)
    return x + torch.cat([first, F.linear(x, layer)[:, :-1]], 1)


def averaged(x, g):
    return g * x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]


def summed_by_heads(x, g):
    heads = (x * g).unflatten(-1, (2, -1)).permute(0, 2, 3, 1)
    return x + torch.cumsum(heads, -1, dtype=torch.float64).permute(0, 3, 1, 2).flatten(2)


def attended_linearly(x, g):
    q, k = F.elu(x[..., :4]) + 1, F.elu(g[:4] * x[..., 4:8]) + 1
    states, weights = (k[..., None] * x[:, :, None]).cumsum(1), (q * k.cumsum(1)).sum(-1, keepdim=True)
    return (q[:, :, None] @ states).squeeze(2) / weights


def attended_linearly_by_heads(x, g):
    q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in (x, x * g, x * 0.5))
    q, k = F.elu(q) + 1, F.elu(k) + 1
    states = (k[..., None] * v[..., None, :]).cumsum(2)
    y = torch.einsum("bhtd,bhtde->bhte", q, states) / torch.einsum("bhtd,bhtd->bht", q, k.cumsum(2))[..., None]
    return y.transpose(1, 2).flatten(2)


@pytest.mark.parametrize(
    "shift",
    [
        averaged,
        summed_by_heads,
        attended_linearly,
        attended_linearly_by_heads,
        convolved,
        convolved_with_dilation,
        convolved_by_channel,
        in_windows,
        of_taps,
        after_a_layer_of_zero,
        added,
        of_features_beside_a_constant,
        padded_and_cut,
        padded_by_at_most_all,
        of_the_same_entries,
        of_rwkv,
        rolled,
        rolled_by_two,
        written,
        after_a_learned_one,
        of_heads,
        twice,
        written_over_itself,
        after_padded_features,
        of_one_length,
        gated_by_a_layer,
        bounded,
        of_some_features,
    ],
)
@pytest.mark.sample(5)
def test_shifts_run_over_the_tree(shift):
    check(Shifting(shift), shared_ids())


def test_what_is_put_together_of_narrower_values_has_all_features():
    def joined(x, g):
        repeated = F.pad(torch.ones_like(x[:, 1:]) * (x[:, :-1, :1] * g[0]).sigmoid(), (0, 0, 1, 0))
        first = torch.cat([g.expand(x.shape[0], 1, -1), torch.zeros_like(x)], 1)[:, :-1]
        both = x.new_zeros(x.shape[0], x.shape[1] - 1, 2 * x.shape[2])
        both[..., : x.shape[2]] = x[:, :-1]
        both[..., x.shape[2] :] = x[:, 1:]
        both = torch.cat([x.new_zeros(x.shape[0], 1, 2 * x.shape[2]), both], 1)
        every = torch.cat([x, repeated, first, both], -1)
        return x + repeated.sum(-1, keepdim=True) + F.linear(every, kernel(g, WIDTH, 5 * WIDTH))

    check(Shifting(joined), shared_ids())


def test_a_shift_of_detached_values_gives_them_no_gradient():
    def detached(x, g):
        return torch.cat([x[:, :1], x[:, 1:] + F.linear(x[:, :-1].detach(), g.expand(WIDTH, WIDTH))], 1)

    check(Shifting(detached), shared_ids())


def test_a_wider_first_token_makes_all_wider():
    def widened(x, g):
        return x + torch.cat([torch.zeros(len(x), 1, WIDTH, dtype=x.dtype), (x * g).bfloat16()[:, :-1]], 1) / 3

    model, ids = Shifting(widened), shared_ids()
    compiled = torch.compile(model, backend="dta", options=OPTIONS)
    torch.testing.assert_close(compiled(ids), model(ids), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("shift", [added, gated_by_a_layer])
def test_shifts_of_one_row(shift):
    check(Shifting(shift), shared_ids(1))


@pytest.mark.sample(1)
@pytest.mark.parametrize("shift", [added, convolved_by_channel])
def test_shifts_of_further_batches(shift):
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = Shifting(shift)

        def forward(self, ids, others):
            return torch.cat([self.model(ids).flatten(), self.model(others).flatten()])

    check(Both(), shared_ids(), shared_ids(3)[:, :-2])


def test_a_shift_behind_the_last_attention_leaves_no_layer_dense(caplog):
    class Last(Shifting):
        def mix(self, x, pairs=None):
            return padded_and_cut(super().mix(x, pairs), self.gate)

    with caplog.at_level("WARNING", logger="dta_compile"):
        check(Last(added), shared_ids())
    assert not caplog.text


def joined_backwards(x, g):
    return x + g * torch.cat([x[:, 1:], x[:, :1]], 1)


def written_backwards(x, g):
    after = x * g
    after[:, :-1] = x[:, 1:]
    return after


def rolled_alone(x, g):
    return x + g * torch.roll(x, 1, 1)


def relative_to_the_first(x, g):
    return torch.cat([x[:, :1], x[:, 1:] - x[:, :1]], 1)


def after_the_first_twice(x, g):
    return x + g * torch.cat([x[:, :1].expand(-1, 2, -1), x[:, :-2]], 1)


def convolved_in_the_middle(x, g):
    return x + F.conv1d(x.transpose(1, 2), kernel(g, WIDTH, WIDTH, 3), padding=1).transpose(1, 2)


def convolved_over_the_whole_row(x, g):
    taps = (0.1 ** torch.arange(x.shape[1])).to(x).expand(WIDTH, 1, -1)
    return x + g * F.conv1d(F.pad(x.transpose(1, 2), (x.shape[1] - 1, 0)), taps, groups=WIDTH).transpose(1, 2)


def gated_by_a_roll(x, g):
    gate = F.pad((x.detach().sum(-1, keepdim=True) > 0).to(x.dtype), (0, 0, 1, -1)).roll(1, 1)
    return torch.cat([x[:, :1] * gate[:, :1], x[:, 1:] * gate[:, 1:]], 1)


def convolved_with_more_channels(x, g):
    y = F.conv1d(F.pad(x.transpose(1, 2), (2, 0, 0, 2)), kernel(g, WIDTH + 2, 1, 3), groups=WIDTH + 2)
    return x + y[:, :-2].transpose(1, 2)


@pytest.mark.parametrize(
    "shift",
    [
        convolved_with_more_channels,
        gated_by_a_roll,
        joined_backwards,
        written_backwards,
        rolled_alone,
        relative_to_the_first,
        after_the_first_twice,
        convolved_in_the_middle,
        convolved_over_the_whole_row,
    ],
)
def test_what_reads_other_tokens_is_refused(shift):
    with pytest.raises(RefusalError, match="tokens are mixed before the last attention"):
        torch.compile(Shifting(shift), backend="dta", options=OPTIONS)(shared_ids())


def test_shifted_scores_are_refused():
    class Scored(Shifting):
        def mix(self, x, pairs=None):
            scores = x @ x.mT
            scores = scores + F.pad(scores, (1, -1))
            later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
            return scores.masked_fill(later, -torch.inf).softmax(-1) @ x

    with pytest.raises(RefusalError):
        torch.compile(Scored(added), backend="dta", options=OPTIONS)(shared_ids())


def test_what_is_before_a_sequence_is_as_in_eager_mode_or_refused():
    model, ids, mask = Shifting(padded_and_cut), shared_ids(), torch.ones(5, 9, dtype=torch.bool)
    mask[0, :2] = mask[2, :1] = False
    check(model, ids, (mask, True), real=mask[..., None])
    compiled = torch.compile(model, backend="dta", options=OPTIONS)
    with pytest.raises(RuntimeContractError, match="padding before a sequence reaches token shift"):
        compiled(ids, (mask, False))
    check(model, ids, (mask.flip(1), False), real=mask.flip(1)[..., None])


def test_a_sum_over_padding_before_a_sequence_is_as_in_eager_mode_or_refused():
    model, ids, mask = Shifting(lambda x, g: g * x.cumsum(1)), shared_ids(), torch.ones(5, 9, dtype=torch.bool)
    mask[0, :2] = mask[2, :1] = False
    check(model, ids, (mask, True), real=mask[..., None])
    with pytest.raises(RuntimeContractError, match="padding before a sequence reaches cumulative sum"):
        torch.compile(model, backend="dta", options=OPTIONS)(ids, (mask, False))


def filled(x, real):
    return x.masked_fill(~real[..., None].bool(), 0.0)


def filled_where_the_mask_is_zero(x, real):
    return x.masked_fill((real == 0).unsqueeze(-1), 0)


def chosen(x, real):
    return torch.where(real.bool()[..., None], x, 0.0).masked_fill(
        torch.zeros_like(real, dtype=torch.bool)[..., None], 0
    )


@pytest.mark.sample(1)
@pytest.mark.parametrize("silence", [filled, filled_where_the_mask_is_zero, chosen])
def test_padding_before_a_sequence_that_is_filled_with_zeros(silence):
    class Filled(Shifting):
        def hidden(self, ids, real):
            x = silence(self.embedding(ids), real)
            pairs = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril() & real[:, None, None, :].bool()
            return self.mix(self.shift(x, self.gate), pairs)

    mask = torch.ones(5, 9, dtype=torch.int64)
    mask[0, :2] = mask[2, :1] = 0
    check(Filled(lambda x, g: x + g * x.cumsum(1)), shared_ids(), mask, real=mask[..., None])


def test_padding_before_a_sequence_that_something_else_fills_is_refused():
    class Filled(Shifting):
        def hidden(self, ids, real):
            x = self.embedding(ids).masked_fill(~real[..., None], 1.0)
            pairs = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril() & real[:, None, None, :]
            return self.mix(self.shift(x, self.gate), pairs)

    mask = torch.ones(5, 9, dtype=torch.bool)
    mask[0, :2] = False
    compiled = torch.compile(Filled(lambda x, g: x + g * x.cumsum(1)), backend="dta", options=OPTIONS)
    with pytest.raises(RuntimeContractError, match="padding before a sequence reaches cumulative sum"):
        compiled(shared_ids(), mask)


def test_sums_of_losses_and_of_features_stay():
    class Summed(Shifting):
        def forward(self, ids):
            logits = self.head(self.hidden(ids).cumsum(-1))
            return logits.cumsum(1), logits.logsumexp(-1).flip(1).cumsum(1)

    model, ids = Summed(added), shared_ids()
    compiled = torch.compile(model, backend="dta", options=OPTIONS)

    def step(run):
        results = run(ids)
        sum(map(weighted, results)).backward()
        return results

    assert_same(after(model, lambda: step(compiled)), after(model, lambda: step(model)))
    assert dta_compile.last_plan(compiled)


@pytest.mark.parametrize("shift", [added, averaged])
def test_packed_rows_are_refused(shift):
    class Packed(Shifting):
        def forward(self, ids, segments):
            x = self.embedding(ids)
            heads = self.shift(x, self.gate).unflatten(-1, (2, -1))
            return dta_compile.attention(*(heads.transpose(1, 2),) * 3, segments=segments)

    with pytest.raises(RuntimeContractError, match="of another sequence"):
        torch.compile(Packed(shift), backend="dta", options=OPTIONS)(shared_ids(*SEGMENTS.shape), SEGMENTS)
