"""`attn_implementation="dta"` and `dta_compile.attention` over the tree: against eager on every sequence alone."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import dta_compile
from dta_compile.errors import OptionError, RefusalError
from tests.support.families import GQA, ONE, TOY, V
from tests.support.helpers import FLOAT32_ISLANDS, assert_equal, make_batch, measure, random_loss, reference, rollouts
from tests.support.inside import inside
from tests.support.tiny import PACKED_IDS, SEGMENTS, SMALL_CHUNKS, StatedLM, after, assert_same, weighted

ROLLOUTS = rollouts(V)
WINDOWED = {**GQA, "head_dim": 16, "sliding_window": 5}
MODELS = {
    "gemma2": {**WINDOWED, "attn_logit_softcapping": 1.0, "final_logit_softcapping": 2.0},
    "vaultgemma": {**WINDOWED, **ONE, "attn_logit_softcapping": 1.0},
    "gpt_oss": WINDOWED,
    "granite_swa": {**WINDOWED, **ONE},
    "qwen3": {**WINDOWED, **ONE},
}


class Dense(nn.Module):
    """In the place of experts."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(TOY["hidden_size"], TOY["hidden_size"])

    def forward(self, hidden, *_):
        return self.linear(hidden).tanh(), None


def build(name, implementation):
    config = transformers.AutoConfig.for_model(name, **MODELS[name])
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=implementation)
    for layer in model.model.layers if name == "gpt_oss" else ():
        torch.manual_seed(2)
        layer.mlp = Dense()
    for parameter in model.parameters():
        if parameter.shape == (4,):
            nn.init.normal_(parameter)  # sinks
    return model.double().train()


def packed(model, _):
    ids = torch.tensor([[token for sequence in ROLLOUTS for token in sequence]])
    positions = torch.cat([torch.arange(len(sequence)) for sequence in ROLLOUTS])[None]
    out = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    return nn.utils.rnn.pad_sequence(out[0].split([*map(len, ROLLOUTS)]), batch_first=True)


def sizes_of(program):
    """The tensors that prologue and chunk graphs make."""
    graphs = [program.prologue, *program.stages.modules]
    for graph in graphs:
        for node in graph.graph.nodes:
            values = node.meta.get("val")
            for value in values if isinstance(values, (tuple, list)) else [values]:
                if isinstance(value, torch.Tensor):
                    yield node, value.shape


SLOW = ("gemma2", "vaultgemma", "gpt_oss", "granite_swa")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in MODELS]
)
def test_models(name):
    torch._dynamo.reset()
    batch = make_batch(ROLLOUTS)
    loss = random_loss(batch, V)
    expected = reference(build(name, "eager"), batch, loss)
    model = build(name, "dta")
    assert_equal(measure(model, model, batch, loss, packed), expected, FLOAT32_ISLANDS)
    assert_equal(measure(model, model, batch, loss), expected, FLOAT32_ISLANDS)
    compiled = torch.compile(model, backend="dta", options={"chunk_size": 4})
    assert_equal(measure(compiled, model, batch, loss, packed), expected, FLOAT32_ISLANDS)
    assert dta_compile.last_plan(compiled).segments is not None
    assert_equal(measure(compiled, model, batch, loss), expected, FLOAT32_ISLANDS)
    assert dta_compile.last_plan(compiled).stats.compression > 1.5
    for engine in inside(compiled).engines:
        tokens = engine.program.tokens
        for node, shape in sizes_of(engine.program):
            squares = [size for size in shape if isinstance(size, torch.SymInt) and size.node.expr == tokens]
            assert len(squares) < 2, node.format_node()


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
def test_generation_keeps_the_setting(name):
    """With a KV cache, from prompts padded at the left: as eager for each prompt alone."""
    eager, model = (build(name, implementation).eval() for implementation in ("eager", "dta"))
    batch = make_batch(ROLLOUTS[:4], padding="left")
    wanted = {"max_new_tokens": 9, "do_sample": False, "pad_token_id": 0}
    found = model.generate(input_ids=batch.ids, attention_mask=batch.mask, **wanted)
    for row, prompt in enumerate(ROLLOUTS[:4]):
        alone = eager.generate(input_ids=torch.tensor([prompt]), **wanted)
        assert torch.equal(found[row, -9:], alone[0, -9:])
    prompt = torch.tensor([ROLLOUTS[1]])
    static = model.generate(input_ids=prompt, cache_implementation="static", **wanted)
    assert torch.equal(static, eager.generate(input_ids=prompt, **wanted))


@pytest.mark.slow
def test_checkpointed_layers():
    torch._dynamo.reset()
    batch = make_batch(ROLLOUTS)
    loss, model = random_loss(batch, V), build("gemma2", "dta")
    expected = measure(model, model, batch, loss, packed)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    compiled = torch.compile(model, backend="dta")
    assert_equal(measure(compiled, model, batch, loss, packed), expected, FLOAT32_ISLANDS)
    assert dta_compile.last_plan(compiled).stats.compression > 1.5


def test_ends_of_sequences_tell_them_as_well():
    """What collators give beside positions, for models that are called without positions."""
    model, ids = build("qwen3", "dta"), torch.tensor([ROLLOUTS[0] + ROLLOUTS[1]])
    ends = torch.tensor([0, len(ROLLOUTS[0]), ids.shape[1]], dtype=torch.int32)
    positions = torch.cat([torch.arange(len(ROLLOUTS[0])), torch.arange(len(ROLLOUTS[1]))])[None]
    told = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    # Positions that go on, shifted by a constant: rotary attention is the same.
    longest = {"max_length_q": 17, "max_length_k": 17}
    by_ends = model(input_ids=ids, use_cache=False, cu_seq_lens_q=ends, cu_seq_lens_k=ends, **longest).logits
    torch.testing.assert_close(told, by_ends, rtol=1e-4, atol=1e-5)


def as_sdpa(model, **inputs):
    """The largest difference between "dta" and "sdpa"."""
    found = []
    for implementation in ("dta", "sdpa"):
        model.set_attn_implementation(implementation)
        with torch.no_grad():
            found.append(model(**inputs)[0])
    return float((found[0] - found[1]).abs().max())


def test_masks_of_both_directions_and_masks_that_models_read():
    sizes = {**TOY, "num_attention_heads": 4}
    both = transformers.ModernBertConfig(**sizes, local_attention=4, global_attn_every_n_layers=2)
    reads = transformers.DogeConfig(**sizes, num_key_value_heads=2)
    ids = torch.tensor([ROLLOUTS[0], ROLLOUTS[0][::-1]])
    padding = torch.ones_like(ids)
    padding[1, -4:] = 0
    for config, cls in ((both, transformers.AutoModel), (reads, transformers.AutoModelForCausalLM)):
        model = cls.from_config(config, attn_implementation="sdpa").double().eval()
        for mask in (None, padding):
            assert as_sdpa(model, input_ids=ids, attention_mask=mask) < 1e-6


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("make", ["create_causal_mask", "create_sliding_window_causal_mask"])
@pytest.mark.parametrize("begins", [0, 5])
def test_blocks_of_both_directions_in_packed_rows(make, begins, is_compiled):
    """Images in packed rows: a union within the rows is no causal mask, in graphs and outside of them."""
    torch._dynamo.reset()
    config = transformers.Gemma3TextConfig(**TOY, sliding_window=3)
    positions = torch.cat([torch.arange(begins), torch.arange(12 - begins)])[None]
    blocks = torch.tensor([[-1, 0, 0, 0, -1, -1, -1, 1, 1, 1, 1, -1]])

    def mask():
        given = {"inputs_embeds": torch.zeros(1, 12, 4), "attention_mask": None, "cache": None}
        given |= {"position_ids": positions, "block_sequence_ids": blocks}
        return getattr(transformers.masking_utils, make)(config, **given)

    config._attn_implementation = "sdpa"
    expected = mask()
    config._attn_implementation = "dta"
    run = torch.compile(mask, backend="eager", fullgraph=True) if is_compiled else mask
    assert torch.equal(run(), expected)


def test_a_position_bias_stays():
    sizes = {"vocab_size": V, "d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 4}
    config = transformers.T5Config(**sizes, is_decoder=True, use_cache=False)
    model = transformers.T5EncoderModel(config).double().eval().encoder
    ids, padding = torch.tensor([ROLLOUTS[0]]), torch.ones(1, len(ROLLOUTS[0]), dtype=torch.long)
    padding[0, :3] = 0
    assert as_sdpa(model, input_ids=ids, attention_mask=padding) < 1e-9


def test_a_mask_of_ones_says_that_rows_are_one_sequence():
    """As in transformers, which looks at positions only where there is no mask."""
    model, ids = build("qwen3", "dta"), torch.tensor([ROLLOUTS[0]])
    positions = torch.cat([torch.arange(9), torch.arange(len(ROLLOUTS[0]) - 9)])[None]
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "position_ids": positions, "use_cache": False}
    assert as_sdpa(model, **given) < 1e-6
    assert as_sdpa(model, **{**given, "attention_mask": None}) < 1e-6


def test_positions_that_leave_out_some_are_one_sequence():
    """With a cache, where transformers makes no mask of them."""
    model, ids = build("qwen3", "dta"), torch.tensor([ROLLOUTS[0]])
    positions = torch.arange(0, 2 * ids.shape[1], 2)[None]
    assert as_sdpa(model, input_ids=ids, position_ids=positions, use_cache=True) < 1e-6


def test_positions_read_in_inference_mode_serve_a_later_step():
    attend, query = ALL_ATTENTION_FUNCTIONS["dta"], torch.randn(1, 2, 7, 4, requires_grad=True)
    given = {"attention_mask": None, "position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2]])}
    with torch.inference_mode():
        expected = attend(nn.Module(), query, query, query, **given)[0]
    out = attend(nn.Module(), query, query, query, **given)[0]
    out.sum().backward()
    assert torch.equal(out, expected)


def test_dropout_is_refused():
    model = build("gemma2", "dta")
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    with pytest.raises(OptionError, match="attention dropout"):
        model(input_ids=torch.tensor([[1, 2, 3]]))


@pytest.mark.parametrize("name", ["bloom", "git", "gpt_neo"])
def test_models_with_attention_of_their_own_are_refused_by_name(name):
    config = transformers.AutoConfig.for_model(name, hidden_size=8, num_attention_heads=2)
    with pytest.raises(OptionError, match='ForCausalLM does not support attn_implementation="dta"'):
        transformers.AutoModelForCausalLM.from_config(config, attn_implementation="dta")


@pytest.mark.parametrize("first", ["dta_compile", pytest.param("transformers", marks=pytest.mark.slow)])
def test_importing_the_package_is_enough(first):
    second = {"dta_compile": "transformers", "transformers": "dta_compile"}[first]
    program = (
        f"import {first}, {second}\n"
        "from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS\n"
        "assert 'dta' in ALL_ATTENTION_FUNCTIONS.valid_keys()"
    )
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", program], cwd=root, check=True)


@pytest.mark.slow
def test_hand_written_attention():
    torch._dynamo.reset()
    model = StatedLM()
    compiled = torch.compile(model, backend="dta", options=SMALL_CHUNKS)

    def step(run):
        out = torch.where((SEGMENTS != 0)[..., None], run(PACKED_IDS, SEGMENTS), 0)
        weighted(out).backward()
        return out.detach()

    assert_same(after(model, lambda: step(compiled)), after(model, lambda: step(model)))
    plan = dta_compile.last_plan(compiled)
    assert (plan.stats.tokens, plan.stats.tree_tokens) == (16, 6)
    text = str(dta_compile.explain(model, PACKED_IDS, SEGMENTS))
    assert "causal, window 3, real tokens where" in text and "a sequence for each" in text


@pytest.mark.parametrize("learned", ["segments", "sinks"])
def test_what_depends_on_tokens_is_refused(learned):
    torch._dynamo.reset()
    compiled = torch.compile(StatedLM(), backend="dta")
    with pytest.raises(RefusalError, match=r"segments of attention are not|sinks depend on|mixed before"):
        compiled(PACKED_IDS, SEGMENTS, learned)
