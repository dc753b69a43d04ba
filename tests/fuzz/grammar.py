"""The grammar: what drawn decoders are made of. Common pieces are drawn often, odd ones keep a healthy part."""

from __future__ import annotations

from hypothesis import strategies as st

from tests.fuzz.batches import FORMATS, Batch
from tests.fuzz.masks import CAUSAL, masks
from tests.fuzz.operators import MIXING, OPERATORS, RESHAPED, SHIFTS, UNUSUAL, several_results
from tests.fuzz.program import Finish, Layer, Part, Positions, Program
from tests.support.spellings import SPELLINGS

EMBEDDINGS = [
    Part("x = self.embed(ids)"),
    Part("x = self.embed(ids) * 2 + self.second(ids % 5)", "self.second = nn.Embedding(5, D)"),
    Part("x = self.embed(ids) + self.second(ids.roll(1, 1))", "self.second = nn.Embedding(V, D)"),
    Part(
        "hashed = (ids * 7 + F.pad(ids[:, :-1], (1, 0)) * 3) % 11\nx = self.embed(ids) + self.second(hashed)",
        "self.second = nn.Embedding(11, D)",
    ),
    Part("x = self.embed(self.remap[ids])", 'self.register_buffer("remap", torch.randperm(V))'),
    Part("x = self.embed(torch.where(ids > 6, ids - 6, ids))"),
    Part("x = self.embed(codes).sum(2)"),
    Part(
        "x = sum(table(codes[..., k]) for k, table in enumerate(self.tables))",
        "self.tables = nn.ModuleList([nn.Embedding(V, D) for _ in range(2)])",
    ),
    Part("x = F.one_hot(ids, V).to(self.embed.weight.dtype) @ self.embed.weight"),
    Part("x = F.embedding(ids, self.embed.weight, padding_idx=0) * math.sqrt(D)"),
    Part("x = self.embed(ids) + self.second(advantage[..., None])", "self.second = nn.Linear(1, D)"),
    Part("x = F.normalize(self.embed.weight, dim=-1)[ids]"),
    Part("x = self.embed(ids.t()).transpose(0, 1)"),
    Part(
        "x = torch.cat([self.front.expand(B, -1, -1), self.embed(ids[:, 1:])], 1)",
        "self.front = nn.Parameter(torch.randn(1, D))",
    ),
    Part(
        "x = self.embed(ids)\nx = torch.cat([self.front.repeat(B, 1, 1), x[:, 2:]], 1) if S > 2 else x",
        "self.front = nn.Parameter(torch.randn(1, 2, D))",
    ),
]

_TABLE = "self.table = nn.Parameter(torch.randn(LONGEST, D))"
_ANGLES = "cos, sin = (torch.cat([f(angles), f(angles)], -1) for f in (torch.cos, torch.sin))"
_ROTARY = 'self.register_buffer("rates", 10.0 ** -torch.arange(2))'
POSITIONS = [
    Positions("x = x + self.table[:S]", _TABLE),
    Positions("x = x + self.places(torch.arange(S))", "self.places = nn.Embedding(LONGEST, D)"),
    Positions(f"angles = torch.arange(S)[:, None] * self.rates\n{_ANGLES}", _ROTARY, rotary=True),
    Positions(f"angles = pos[:, None, :, None] * self.rates\n{_ANGLES}", _ROTARY, rotary=True),
    Positions(f"angles = torch.outer(torch.arange(LONGEST), self.rates)[:S]\n{_ANGLES}", _ROTARY, rotary=True),
    Positions("x = x + self.table[pos]", _TABLE),
    Positions("x = x + self.table[pos.clamp(max=3)]", _TABLE),
    Positions(""),
    Positions(
        "angle = torch.arange(S)[:, None] / 10 ** torch.linspace(0, 1, D // 2)\n"
        "x = x + torch.stack([angle.sin(), angle.cos()], -1).flatten(1)"
    ),
    Positions("x = x + self.table[(pad.long().cumsum(1) - 1).clamp(min=0)]", _TABLE),
    Positions("x = x + self.table[: 2 * S : 2]", _TABLE),
    Positions("x = x + self.table[1 : S + 1]", _TABLE),
    Positions("x = x + self.table[:S].flip(0)", _TABLE),
    Positions("x = x + self.table.flip(0)[:S]", _TABLE),
    Positions("x = x + self.table[-S:]", _TABLE),
    Positions("x = x + self.table[S - 1 - torch.arange(S)]", _TABLE),
    Positions("x = x + self.table[torch.arange(B * S).view(B, S) % 7]", _TABLE),
    Positions("x = x + self.table[torch.arange(S) + torch.arange(B)[:, None]]", _TABLE),
    Positions("x = x + (torch.arange(S) / S)[:, None]"),
    Positions("x = x + torch.linspace(0, 1, S).view(1, S, 1)"),
    Positions("x = x + self.table[pad.long().sum(1)][:, None]", _TABLE),
    Positions("x = x + self.table[torch.ones(S, dtype=torch.int64).cumsum(0)]", _TABLE),
    Positions("x = x + self.table.T[:, :S].T", _TABLE),
    Positions("x = x + self.table[:S].repeat(B, 1, 1)", _TABLE),
    Positions("x = x + self.table[:S].unsqueeze(0).expand(B, S, D)", _TABLE),
]

_QKV = "self.qkv$ = nn.Linear(D, 3 * D)"
PROJECTIONS = [
    Part("q, k, v = self.qkv$(x).view(B, S, 3, H, D // H).permute(2, 0, 3, 1, 4).unbind(0)", _QKV),
    Part("q, k, v = (t.view(B, S, H, -1).transpose(1, 2) for t in self.qkv$(x).chunk(3, -1))", _QKV),
    Part(
        "q, k, v = (t.unflatten(-1, (H, -1)).transpose(1, 2) for t in self.qkv$(F.layer_norm(x, (D,))).split(D, -1))",
        _QKV,
    ),
    Part(
        "q = self.q$(x).view(B, S, H, -1).transpose(1, 2)\n"
        "k, v = self.kv$(x).view(B, S, 2, 1, D // H).permute(2, 0, 3, 1, 4).expand(2, B, H, S, D // H).unbind(0)",
        "self.q$, self.kv$ = nn.Linear(D, D), nn.Linear(D, D)",
    ),
    Part("q, k, v = self.qkv$(x.transpose(0, 1)).view(S, B, 3, H, D // H).permute(2, 1, 3, 0, 4)", _QKV),
    Part("q, k, v = self.qkv$(x.reshape(B * S, D)).view(B, S, 3, H, D // H).permute(2, 0, 3, 1, 4)", _QKV),
    Part(
        "q, k = self.qk$(x).view(B, S, 2, H, D // H).permute(2, 0, 3, 1, 4)\n"
        "q, k, v = F.rms_norm(q, (D // H,)), F.rms_norm(k, (D // H,)), x.view(B, S, H, -1).transpose(1, 2)",
        "self.qk$ = nn.Linear(D, 2 * D, bias=False)",
    ),
    Part(
        "q, k, v = torch.einsum('bsd,tdhe->tbhse', x, self.qkv$)",
        "self.qkv$ = nn.Parameter(torch.randn(3, D, H, D // H) / 3)",
    ),
]
_DISTANCE = "d = torch.arange(S)[:, None] - torch.arange(S)\n"
_REL = "self.rel$ = nn.Embedding(6, H)"
_OF_PAIRS = "numbers = torch.arange(LONGEST)\nd = numbers[:, None] - numbers\n"
BIASED = [
    Part(f"{_DISTANCE}y = biased(self.rel$(d.clamp(0, 5)).permute(2, 0, 1))(q, k, v, SEEN_BY)", _REL),
    Part(
        f"{_DISTANCE}d = -torch.min(-d, torch.zeros_like(d))\n"
        "far = torch.min(2 + (d.float() / 2).log().mul(2).long(), torch.full_like(d, 5))\n"
        "bias = F.embedding(torch.where(d < 2, d, far), self.rel$.weight)\n"
        "y = biased(bias.permute(2, 0, 1).unsqueeze(0))(q, k, v, SEEN_BY)",
        _REL,
    ),
    Part(
        f"{_DISTANCE}bias = -self.rate$.exp()[:, None, None] * torch.log1p(d.abs())\n"
        "y = biased(bias)(q, k, v, SEEN_BY)",
        "self.rate$ = nn.Parameter(torch.linspace(-1, 1, H))",
    ),
    Part(
        f"{_DISTANCE}y = biased(self.rel$(d[..., None] / 3.0).movedim(-1, 0))(q, k, v, SEEN_BY)",
        "self.rel$ = nn.Sequential(nn.Linear(1, 5), nn.Tanh(), nn.Linear(5, H))",
    ),
    Part(
        f"{_DISTANCE}y = biased(self.rel$[:, :S][:, d.abs()])(q, k, v, SEEN_BY)",
        "self.rel$ = nn.Parameter(torch.randn(H, LONGEST))",
    ),
    Part(f"{_DISTANCE}y = biased(-0.1 * d * d)(q, k, v, SEEN_BY)"),
    Part(
        "y = biased(self.alibi$[:, :S, :S])(q, k, v, SEEN_BY)",
        f'{_OF_PAIRS}self.register_buffer("alibi$", -d.abs() * torch.rand(H, 1, 1))',
    ),
    Part(
        "y = biased(self.rel$.T[:, self.index$[:S, :S]])(q, k, v, SEEN_BY)",
        f'{_OF_PAIRS}self.register_buffer("index$", d.clamp(-2, 3) + 2)\nself.rel$ = nn.Parameter(torch.randn(6, H))',
    ),
]
ATTENTION = [
    *BIASED,
    *[Part("y = F.scaled_dot_product_attention(q, k, v, SEEN_BY)")] * 12,
    *[Part("y = F.scaled_dot_product_attention(q, k, v, SEEN_BY, scale=0.3)")] * 2,
    *[Part("y = F.scaled_dot_product_attention(q, k[:, :1], v[:, :1], SEEN_BY, enable_gqa=True)")] * 3,
    *[Part(f"y = SPELLINGS['{name}'](q, k, v, SEEN_BY)") for name in SPELLINGS],
    Part("y = F.scaled_dot_product_attention(q.contiguous(), k.contiguous(), v.contiguous(), SEEN_BY)"),
    Part("y = F.scaled_dot_product_attention(q, k, torch.cat([v, v * v], -1), SEEN_BY)[..., : D // H]"),
    Part("y = SPELLINGS['plain'](q, torch.zeros_like(k).index_copy(2, torch.arange(S), k), v, SEEN_BY)"),
    Part(
        "attend = lambda *qkv: F.scaled_dot_product_attention(*qkv, SEEN_BY)\n"
        "y = torch.utils.checkpoint.checkpoint(attend, q, k, v, use_reentrant=False)"
    ),
]
MERGES = [
    Part("x = x + self.out$(y.transpose(1, 2).reshape(B, S, D))", "self.out$ = nn.Linear(D, D)"),
    Part("x = x + y.permute(0, 2, 1, 3).flatten(2)"),
    Part("x = self.out$(torch.cat(y.unbind(1), -1)) - x", "self.out$ = nn.Linear(D, D)"),
    Part("x = x + y.permute(2, 0, 1, 3).reshape(S, B, D).transpose(0, 1)"),
    Part(
        "x = x + self.out$(y.transpose(1, 2).reshape(-1, D)).view(B, S, D)", "self.out$ = nn.Linear(D, D, bias=False)"
    ),
]

_HEAD = "self.head = nn.Linear(D, V)"
HEADS = [
    Part("logits = self.head(x)", _HEAD),
    Part("logits = F.linear(F.layer_norm(x, (D,)), self.embed.weight)"),
    Part("logits = x @ self.embed.weight.T"),
    Part(
        "logits = torch.cat([self.head(x), self.more(x)], -1)",
        "self.head, self.more = nn.Linear(D, 5), nn.Linear(D, V - 5, bias=False)",
    ),
    Part("logits = torch.tanh(self.head(x) / 3) * 3", _HEAD),
    Part("logits = self.head(x.reshape(-1, D)).view(B, S, V) / 0.7", _HEAD),
    Part("logits = torch.cat([self.head(part) for part in x.chunk(2, 1)], 1)", _HEAD),
    Part("logits = self.head(x.transpose(0, 1)).transpose(0, 1)", _HEAD),
    Part("logits = self.head(x)\nlogits = logits - logits.logsumexp(-1, keepdim=True)", _HEAD),
]

_NEXT = "real[:, :-1] & real[:, 1:]"
_LP = "lp = logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]\n"
_SUMS = f"{_LP}counts = ({_NEXT}).to(lp.dtype)\nsums = torch.where({_NEXT}, lp, 0).sum(1)\n"
_FLAT = "flat = logits.reshape(-1, V)\n"
_CLEAN = "h = torch.where(real[..., None], x, 0)\n"
PER_TOKEN = [
    Finish("return logits"),
    Finish(f"{_LP}return lp", seen=(_NEXT,)),
    Finish("return logits.logsumexp(-1), x", seen=("real", "real")),
    Finish("p = logits.softmax(-1)\nreturn -(p * logits.log_softmax(-1)).sum(-1)"),
    Finish("return logits[:, -1:]", seen=("real[:, -1:]",)),
    Finish("return logits[:, ::2]", seen=("real[:, ::2]",)),
    Finish("return logits[:, 1:].exp(), logits.argmax(-1)", seen=("real[:, 1:]", "real")),
    Finish("best = logits.topk(3, -1)\nreturn best.values, best.indices", seen=("real", "real")),
    Finish("return logits, logits", seen=("real", "real")),
    Finish("return ids, logits * 2", seen=("whole", "real")),
    Finish("return self.value(x)[..., 0], logits", "self.value = nn.Linear(D, 1)", seen=("real", "real")),
    Finish("return F.cross_entropy(logits.transpose(1, 2), labels, ignore_index=-100, reduction='none')"),
    Finish("return logits.transpose(0, 1)", seen=("real.t()",)),
    Finish("return logits.permute(2, 0, 1).amax(0)"),
]
MIXED = [
    Finish(f"{_SUMS}return sums / counts.sum(1).clamp(min=1)", seen=("whole",)),
    Finish(f"{_SUMS}return (sums - sums.mean()) / (sums.std() + 1)", seen=("whole",)),
    Finish(f"{_SUMS}return sums.sum() / B, sums.sum() / ids.shape[0]", seen=("whole", "whole")),
    Finish(f"{_SUMS}return sums.sum() / ids.numel() * math.sqrt(S)", seen=("whole",)),
    Finish(f"{_SUMS}return (sums * factor).mean(), lp", seen=("whole", _NEXT)),
    Finish(f"{_LP}w = ({_NEXT}) * advantage[:, 1:]\nreturn (lp * w).sum() / w.sum()", seen=("whole",)),
    Finish(f"{_FLAT}return F.cross_entropy(flat, torch.where(real, labels, -100).reshape(-1))", seen=("whole",)),
    Finish(
        "return F.cross_entropy(logits[:, :-1].flatten(0, 1), torch.where(real, ids, -100)[:, 1:].flatten(), "
        "reduction='sum') / B",
        seen=("whole",),
    ),
    Finish(
        f"{_FLAT}return F.cross_entropy(flat, labels.flatten(), reduction='none').view(B, S), logits",
        seen=("real", "real"),
    ),
    Finish(f"{_CLEAN}return h.cumsum(1)", seen=("whole",)),
    Finish(
        f"{_CLEAN}return F.conv1d(h.transpose(1, 2), self.kernel, padding=1)",
        "self.kernel = nn.Parameter(torch.randn(3, D, 3))",
        seen=("whole",),
    ),
    Finish(f"{_CLEAN}pooled = h.mean(1)\nreturn pooled @ pooled.T", seen=("whole",)),
    Finish(f"{_CLEAN}return h.flip(1).diff(dim=1), logits", seen=("whole", "real")),
    Finish(f"{_CLEAN}last = pad.long().sum(1) - 1\nreturn h[torch.arange(B), last]", seen=("whole",)),
    Finish(f"{_CLEAN}return h.amax(1), h.sum(0)", seen=("whole", "whole")),
    Finish(f"{_CLEAN}return h.reshape(B, S * D).sort(-1)[0]", seen=("whole",)),
]
OPTIONS = [
    (("chunk_size", 3),),
    (("chunk_size", 1),),
    (("chunk_size", 2048),),
    (("chunk_size", 3), ("memory_budget", 0)),
    (("chunk_size", 4), ("strategy", "dfs")),
    (("chunk_size", 3), ("strategy", "vanilla")),
    (("chunk_size", 5), ("strategy", "packed")),
    (("chunk_size", 3), ("sweep", "stages"), ("memory_budget", 0)),
    (("chunk_size", 2048), ("sweep", "stages"), ("memory_budget", 20_000)),
    (("chunk_size", 4), ("sweep", "stages"), ("strategy", "dfs"), ("memory_budget", 10_000)),
]


def favouring(common: list, odd: list, percent: int) -> st.SearchStrategy:
    """From `common`, but in so many cases out of a hundred from `odd`."""
    return st.integers(0, 99).flatmap(lambda n: st.sampled_from(odd if n >= 100 - percent else common))


def operators() -> st.SearchStrategy[Part]:
    """One operator between attentions: per token, with several results, reshaped, or (seldom) refused for its kind."""
    usual = [st.sampled_from(OPERATORS)] * 16 + [several_results()] * 12
    odd = [st.sampled_from(parts) for parts in (SHIFTS, SHIFTS, UNUSUAL, MIXING)]
    kinds = [*usual, *[st.sampled_from(RESHAPED)] * 7, *odd]
    return st.integers(0, len(kinds) - 1).flatmap(kinds.__getitem__)


@st.composite
def layers(draw: st.DrawFn) -> Layer:
    return Layer(
        tuple(draw(st.lists(operators(), max_size=2))),
        draw(favouring(PROJECTIONS[:4], PROJECTIONS, 40)),
        draw(st.sampled_from(ATTENTION)),
        draw(favouring(MERGES[:3], MERGES, 40)),
        tuple(draw(st.lists(operators(), max_size=1))),
    )


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    rows = draw(st.sampled_from([3, 4, 2, 3, 4, 3, 2, 1]))
    tokens = draw(st.sampled_from([7, 9, 12, 4, 3, 8, 5, 11, 2]))
    rows, tokens = draw(st.sampled_from([(rows, tokens), (rows, tokens), (rows, tokens), (4, 4)]))
    return Batch(rows, tokens, draw(st.sampled_from(FORMATS)), draw(st.integers(0, 10_000)))


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """A decoder, two batches for it, and options."""
    mask = draw(masks())
    finish = draw(favouring(PER_TOKEN, MIXED, 45))
    first, second = draw(batches()), draw(batches())
    if draw(st.integers(0, 3)):  # trainers keep to one format
        second = Batch(second.rows, second.tokens, first.format, second.seed)
    return Program(
        draw(favouring(EMBEDDINGS[:2], EMBEDDINGS, 40)),
        draw(favouring(POSITIONS[:6], POSITIONS, 40)),
        mask,
        tuple(draw(st.lists(layers(), min_size=1, max_size=2))),
        draw(st.sampled_from(HEADS)),
        finish,
        (first, second),
        draw(st.sampled_from(["", "", "", "", "self.embed.requires_grad_(False)"])),
        draw(st.sampled_from(["torch.int64", "torch.bool", "torch.float64", "torch.int64"])),
        draw(st.sampled_from(OPTIONS)),
    )


# The plainest of everything, for the minimiser.
PLAIN = {
    "embedding": EMBEDDINGS[0],
    "positions": Positions(""),
    "mask": CAUSAL,
    "head": Part("logits = x"),
    "finish": PER_TOKEN[0],
    "frozen": "",
    "pad_dtype": "torch.int64",
    "options": OPTIONS[0],
}
PLAIN_LAYER = {"before": (), "project": PROJECTIONS[0], "attend": ATTENTION[0], "merge": MERGES[1], "after": ()}
