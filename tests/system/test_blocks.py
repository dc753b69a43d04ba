"""Tokens of a block (of an image, say) attend to each other both ways; all others are causal."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dta_compile
from dta_compile.errors import RefusalError, RuntimeContractError
from dta_compile.options import Options
from tests.support.blocks import IMAGE, WINDOW, BlockLM, cases, make
from tests.support.cases import LOSSES, QUICK, check_streaming, check_transparent, options
from tests.support.tiny import TinyLM, after, assert_same, weights_like


@pytest.fixture(scope="module")
def model():
    return BlockLM()


@pytest.fixture(scope="module")
def compiled(model):
    torch._dynamo.reset()
    return torch.compile(model, backend="dta")


@settings(max_examples=25, **QUICK)
@given(case=cases, chosen=options, loss=st.sampled_from(sorted(LOSSES)))
def test_forward_and_backward(model, compiled, case, chosen, loss):
    check_transparent(model, compiled, case, chosen, loss)


@settings(max_examples=20, **QUICK)
@given(case=cases, chosen=options)
def test_streaming(model, compiled, case, chosen):
    check_streaming(model, compiled, case, chosen)


def test_a_block_that_differs_in_its_last_token_is_another_from_its_first(model, compiled):
    image = [IMAGE + 1] * 4
    case = make([[1, 2, *image, 3], [1, 2, *image, 3, 4], [1, 2, *image[1:], IMAGE, 3]], "right")
    check_transparent(model, compiled, case, Options(chunk_size=2, strategy="packed"), "weights")
    plan = dta_compile.last_plan(compiled)
    assert sorted(plan.prefix_tree.common.tolist()) == [0, 2, 7]
    assert plan.schedule.chunk_size == 4, "a block is one chunk, however small chunks are asked for"


class Written(torch.nn.Module):
    """`TinyLM` with a mask made by a function of ids and of the numbers of blocks."""

    def __init__(self, mask):
        super().__init__()
        self.model, self.mask = TinyLM(layers=1), mask

    def forward(self, ids, blocks):
        x = self.model.embedding(ids)
        places = torch.arange(ids.shape[1])
        return self.model.head(self.model.mix(x, self.mask(places[:, None], places, blocks[:, None])))


def in_blocks(query, key, blocks):
    return (query >= key) | (blocks[..., :, None] == blocks[..., None, :])


def window_or_block(query, key, blocks):
    same = (blocks[..., :, None] == blocks[..., None, :]) & (blocks[..., None] > 0)
    return ((query >= key) & (query - key < WINDOW)) | same


def of_packed_rows(query, key, both):
    segments, blocks = both[..., 0, :], both[..., 1, :]
    same_sequence = segments[..., :, None] == segments[..., None, :]
    return ((query >= key) | ((blocks[..., :, None] == blocks[..., None, :]) & (blocks[..., None] > 0))) & same_sequence


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("mask", "blocks", "tokens"),
    [
        (in_blocks, [0, 0, 1, 1, 1, 5, 5], 9),
        (window_or_block, [0, 3, 3, 3, 0, 1, 1], 9),
        (of_packed_rows, [[0, 0, 0, 1, 1, 1, 1], [0, 7, 7, 7, 7, 0, 3]], 8),  # one sequence of either row is shared
    ],
)
def test_other_spellings(mask, blocks, tokens):
    model = Written(mask)
    compiled = torch.compile(model, backend="dta", options={"chunk_size": 2})
    ids, blocks = torch.tensor([[1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 5, 6, 8]]), torch.tensor([blocks] * 2)

    def run(function):
        return after(model, lambda: [(y := function(ids, blocks)).detach(), (y * weights_like(y)).sum().backward()][:1])

    assert_same(run(compiled), run(model))
    assert dta_compile.last_plan(compiled).stats.tree_tokens == tokens


def with_slopes_of_distances(query, key, blocks):
    """ALiBi counts the distance to later tokens of the block up again."""
    distances = (query - key).abs().double()
    return torch.where(in_blocks(query, key, blocks), -0.5 * distances, -torch.inf)


@pytest.mark.parametrize(
    ("mask", "blocks", "message"),
    [
        (with_slopes_of_distances, [0, 0, 1, 1, 1, 5, 5], "with a bias by distance, which is only read for earlier"),
        (in_blocks, [0, 0, 1, 1, 0, 2, 2], "are in several pieces"),
        (window_or_block, [0, 3, 3, 3, 3, 1, 1], "than fit into the sliding window"),
        (lambda q, k, b: (q >= k) | (b[..., None] == 2 * b[..., None, :]), [0, 0, 1, 1, 1, 5, 5], "to later ones"),
    ],
)
def test_what_no_blocks_are(mask, blocks, message):
    compiled = torch.compile(Written(mask), backend="dta")
    with pytest.raises((RuntimeContractError, RefusalError), match=message):
        compiled(torch.arange(14).view(2, 7), torch.tensor([blocks] * 2))


def test_layers_agree_on_blocks():
    class Two(BlockLM):
        def masks(self, ids, mask):
            one, _, causal = super().masks(ids, mask)
            numbers = torch.arange(ids.shape[1]) // 2
            return [one, causal | (numbers[:, None] == numbers), causal]

    with pytest.raises(RuntimeContractError, match="different blocks"):
        torch.compile(Two(), backend="dta")(torch.tensor([[1, 8, 8, 8], [1, 2, 3, 4]]))
