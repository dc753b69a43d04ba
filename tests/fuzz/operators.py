"""Operators between attentions: from `x` of shape `[B, S, D]` to the next `x`."""

from __future__ import annotations

from hypothesis import strategies as st

from tests.fuzz.program import Part

_GAIN = "self.gain$ = nn.Parameter(torch.rand(D) + 0.5)"
_WIDE = "self.wide$ = nn.Linear(D, 2 * D)"
_NARROW = "self.narrow$ = nn.Linear(D, 1)"

OPERATORS = [
    Part("x = F.rms_norm(x, (D,), self.gain$)", _GAIN),
    Part("self.gain$.data.clamp_(0.7, 1.2)\nx = x * self.gain$", _GAIN),
    Part("x = F.layer_norm(x, (D,), self.gain$)", _GAIN),
    Part("x = x / (x.norm(dim=-1, keepdim=True) + 1)"),
    Part("x = F.group_norm(x.reshape(B * S, D), 2, self.gain$).view(B, S, D)", _GAIN),
    Part("x = x + F.glu(self.wide$(x), -1)", _WIDE),
    Part("first, second = self.wide$(x).chunk(2, -1)\nx = x + F.silu(first) * second", _WIDE),
    Part("x = x * torch.sigmoid(self.narrow$(x))", _NARROW),
    Part(
        "weights = self.router$(x).softmax(-1)\nbest, which = weights.topk(2, -1)\n"
        "gates = torch.zeros_like(weights).scatter(-1, which, best)\n"
        "x = x + torch.einsum('bse,edf,bsd->bsf', gates, self.experts$, x)",
        "self.router$, self.experts$ = nn.Linear(D, 3), nn.Parameter(torch.randn(3, D, D) / 3)",
    ),
    Part(
        "best, which = self.router$(x).softmax(-1).topk(2, -1)\n"
        "rows = dta_compile.expert_linear(x, which, self.experts$, self.bias$).tanh()\n"
        "x = x + dta_compile.expert_sum(rows, which, best, self.experts$, transposed=True)",
        "self.router$, self.bias$ = nn.Linear(D, 4), nn.Parameter(torch.randn(4, D))\n"
        "self.experts$ = nn.Parameter(torch.randn(4, D, D) / 3)",
    ),
    Part(
        "flat = x.reshape(B * S, D)\nwhich = torch.where(self.router$(flat) > 0, torch.arange(3), 3)\n"
        "x = x + dta_compile.expert_linear(flat, which, self.experts$, transposed=True).sum(1).view(B, S, D)",
        "self.router$, self.experts$ = nn.Linear(D, 3), nn.Parameter(torch.randn(3, D, D) / 3)",
    ),
    Part(
        "flat = x.reshape(B * S, D)\nbest, which = self.router$(flat).softmax(-1).topk(2, -1)\n"
        "mixed = torch.zeros_like(flat)\n"
        "for e in range(3):\n"
        "    rows, places = torch.where(which == e)\n"
        "    mixed.index_add_(0, rows, self.experts$[e](flat[rows]).tanh() * best[rows, places, None])\n"
        "x = x + mixed.view(B, S, D)",
        "self.router$, self.experts$ = nn.Linear(D, 3), nn.ModuleList(nn.Linear(D, D) for _ in range(3))",
    ),
    Part(
        "flat = x.reshape(B * S, D)\nbest, which = self.router$(flat).softmax(-1).topk(2, -1)\n"
        "mixed = torch.zeros_like(flat)\n"
        "for e in range(3):\n"
        "    some = which == e\n"
        "    if some.any():\n"
        "        rows, places = torch.where(some)\n"
        "        mixed[rows] += (flat[rows] @ self.experts$[e]).tanh() * best[rows, places, None]\n"
        "x = x + mixed.view(B, S, D)",
        "self.router$, self.experts$ = nn.Linear(D, 3), nn.Parameter(torch.randn(3, D, D) / 3)",
    ),
    Part(
        "which = self.router$(x).argmax(-1)\nmixed = torch.zeros_like(x)\n"
        "for e in range(3):\n"
        "    mixed[which == e] = F.layer_norm(F.silu(x[which == e] @ self.experts$[e]), (D,))\n"
        "x = x + mixed",
        "self.router$, self.experts$ = nn.Linear(D, 3), nn.Parameter(torch.randn(3, D, D) / 3)",
    ),
    Part(
        "flat = x.reshape(B * S, D)\nbest, which = self.router$(flat).softmax(-1).topk(2, -1)\n"
        "with torch.no_grad():\n"
        "    self.load$ += F.one_hot(which, 3).sum((0, 1))\n"
        "order = which.view(-1).argsort(stable=True)\n"
        "counts = torch.bincount(which.view(-1), minlength=3)[:3].tolist()\n"
        "parts = flat[order // 2].split(counts)\n"
        "y = torch.cat([expert(part).tanh() for expert, part in zip(self.experts$, parts)])\n"
        "y = y * best.view(-1)[order, None]\n"
        "x = x + torch.zeros_like(flat).index_add(0, order // 2, y).view(B, S, D)",
        "self.router$, self.experts$ = nn.Linear(D, 3), nn.ModuleList(nn.Linear(D, D) for _ in range(3))\n"
        'self.register_buffer("load$", torch.zeros(3))',
    ),
    Part(
        "flat = x.reshape(B * S, D)\nbest, which = self.router$(flat).softmax(-1).topk(2, -1)\n"
        "keys, order = which.flatten().sort()\nends = F.one_hot(keys, 3).sum(0).cumsum(0).tolist()\n"
        "rows = flat.repeat_interleave(2, 0)[order]\n"
        "parts = [F.silu(rows[a:b] @ w) for w, a, b in zip(self.experts$, [0, *ends], ends)]\n"
        "y = torch.cat(parts)[order.argsort()].view(-1, 2, D)\n"
        "x = x + torch.einsum('nkd,nk->nd', y, best).view(B, S, D)",
        "self.router$, self.experts$ = nn.Linear(D, 3), nn.Parameter(torch.randn(3, D, D) / 3)",
    ),
    Part("x = torch.where(x > 0, x, 0.1 * x)"),
    Part("x = x.clone()\nx[..., :4] = x[..., 4:] * 2\nx[..., 5] = 1.0"),
    Part("x = x * self.gain$\nx += 1\nx *= 0.5", _GAIN),
    Part("x = torch.tanh(x).clone().masked_fill_(x > 1, 0.5)"),
    Part("both = x.new_zeros(B, S, 2 * D)\nboth[..., :D], both[..., D:] = x, x.sin()\nx = both[..., ::2]"),
    Part("x = x * factor[:, None, None]"),
    Part("x = (x.transpose(0, 1) * factor[None, :, None]).transpose(0, 1)"),
    Part("x = (x.flatten(0, 1) * factor.repeat_interleave(S)[:, None]).view(B, S, D)"),
    Part("x = x * advantage[..., None]"),
    Part("x = x + self.embed(ids).detach()"),
    Part("x = torch.where((ids > 6)[..., None], x * 2, x)"),
    Part("x = x.masked_fill((pad == 0)[..., None], 0.0)"),
    Part("x = x / math.sqrt(S)"),
    Part("x = x / B"),
    Part("x = x + 0.1 * Cube.apply(x.tanh())"),
    Part("x = torch.utils.checkpoint.checkpoint(lambda t: F.gelu(t) + t, x, use_reentrant=False)"),
    Part("x = x.cumsum(-1) / D"),
    Part("x = x.flip(-1) + x.roll(1, -1)"),
    Part(
        "x = F.conv1d(x.transpose(1, 2), self.point$).transpose(1, 2)",
        "self.point$ = nn.Parameter(torch.randn(D, D, 1) / 3)",
    ),
    Part("with torch.no_grad():\n    gate = torch.sigmoid(x)\nx = x * gate"),
    Part("x = x - x.logsumexp(-1, keepdim=True)"),
    Part("x = x + torch.sigmoid(limit) * x.sin()"),
    Part("x = x * window"),
    Part("x = x.softmax(-1) * D"),
    Part(
        "pairs = x.view(B * S, 2, 4)\n"
        "x = x + torch.bmm(pairs, pairs.transpose(1, 2)).flatten(1).view(B, S, 4).repeat(1, 1, 2).tanh()"
    ),
    Part("x = torch.lerp(x, x.sin(), 0.25)"),
]

RESHAPED = [
    Part("x = x.transpose(0, 1).contiguous().sin().transpose(0, 1)"),
    Part("x = x.reshape(B * S, D).sin().reshape(B, S, D)"),
    Part("x = x.transpose(0, 1).reshape(S * B, D).sin().view(S, B, D).transpose(0, 1)"),
    Part("x = x.permute(2, 0, 1).sin().permute(1, 2, 0)"),
    Part("x = x.unflatten(-1, (2, 4)).transpose(-1, -2).flatten(2)"),
    Part("x = x.view(B, 1, S, D).squeeze(1)"),
    Part("x = torch.stack(x.unbind(-1), -1)"),
    Part("x = x.reshape(B * S * 2, 4).tanh().view(B, S, D)"),
    Part("x = x.unfold(-1, 4, 4).flatten(2)"),
    Part("x = x[..., torch.tensor([7, 6, 5, 4, 3, 2, 1, 0])]"),
    Part("x = x.view(B, S, 4, 2).sum(-1).repeat_interleave(2, -1)"),
    Part("x = x.movedim(1, 0).flatten(1).view(S, B, D).movedim(0, 1)"),
    Part("x = x.expand(2, B, S, D).sum(0) / 2"),
    Part("x = x.mT.contiguous().mT"),
    Part("x = x.swapaxes(0, 1).reshape(-1, D).sin().reshape(S, B, -1).swapaxes(0, 1)"),
    Part("x = F.pad(x, (1, 1))[..., 2:].sin()"),
    Part("x = x.narrow(1, 0, S)"),
]

# What hardly any model does, and what is refused although nothing is wrong with it.
UNUSUAL = [
    Part("x = x * 1.5\nwith torch.no_grad():\n    x.mul_(2)\nx = x.sin()"),
    Part("x = x * 1.5\nx.detach().mul_(2)\nx = x.sin()"),
    Part("x = x.reshape(B, S * D).sin().view(B, S, D)"),
    Part("x = torch.cat([x[:, :1], x[:, 1:]], 1)"),
    Part("x = x.reshape(-1, D).view(S, B, D).view(B, S, D)"),
    Part("x = x[torch.arange(B)]"),
    Part("x = x[:, torch.arange(S)]"),
]

# Values of the tokens before, and Python code that makes the number of tokens a constant.
SHIFTS = [
    Part("x = x + F.pad(x, (0, 0, 1, 0))[:, :-1]"),
    Part("x = torch.cat([x[:, :1], x[:, 1:] + self.gain$ * x[:, :-1]], 1)", _GAIN),
    Part("before = torch.roll(x, 1, 1)\nbefore[:, 0] = 0\nx = x + self.gain$ * before", _GAIN),
    Part("before = F.pad(x, (0, 0, 1, -1))\nx = x + (before - x) * self.gain$.sigmoid()", _GAIN),
    Part("before = torch.zeros_like(x)\nbefore[:, 1:] = x[:, :-1]\nx = x + before.tanh()"),
    Part("for _ in range(S):\n    x = x * 0.95"),
]

# Tokens or rows that see each other outside of attention: refused, or exact.
MIXING = [
    Part(code, mixes=True)
    for code in (
        "x = x.cumsum(1) / S",
        "x = x + x.roll(1, 1)",
        "x = x - x.mean(1, keepdim=True)",
        "x = x + x.flip(1)",
        "x = x - x.mean(0, keepdim=True)",
        "x = x.reshape(S, B, D).sin().reshape(B, S, D)",
        "x = x + x.reshape(B * S, D).view(S, B, D).transpose(0, 1)",
        "x = x + x.transpose(0, 1).reshape(B, S, D)",
        "x = x / x.detach().abs().max()",
        "x = x + x[:, :1]",
        "x = x.sort(1)[0]",
    )
]

# From `x` to `r`, which broadcasts with it.
RESULTS = [
    "r, _ = x.max(-1, keepdim=True)",
    "_, which = x.min(-1, keepdim=True)\nr = which.to(x.dtype) / D",
    "r = x.topk(2, -1)[0].sum(-1, keepdim=True)",
    "values, places = x.sort(-1)\nr = values.gather(-1, places.argsort(-1)) + values",
    "r = x.kthvalue(3, -1, keepdim=True)[0]",
    "r = x.median(-1, keepdim=True).values",
    "low, high = torch.aminmax(x, dim=-1, keepdim=True)\nr = high - low",
    "variance, mean = torch.var_mean(x, -1, keepdim=True)\nr = mean / (variance + 1)",
    "deviation, r = torch.std_mean(x, -1, keepdim=True)",
    "mantissa, exponent = torch.frexp(x)\nr = mantissa",
    "a, b = x.chunk(2, -1)\nr = torch.cat([b, a.sin()], -1)",
    "a, b, c = x.split([2, 2, 4], -1)\nr = torch.cat([c, a, b], -1)",
    "parts = x.unbind(-1)\nr = parts[3][..., None]",
    "r = x.cummax(-1)[0]",
    "r = x.mode(-1, keepdim=True)[0]",
    "r = torch.stack(torch.max(x, x.sin()).tensor_split(2, -1)).sum(0).repeat(1, 1, 2)",
    "r = x.logsumexp(-1, keepdim=True)",
    "r = F.layer_norm(x, (D,))",
    "r = x.amax(-1, keepdim=True)",
]
COMBINED = ["x = x - r", "x = x * torch.sigmoid(r)", "x = x.logsumexp(-1, keepdim=True) - r + x", "x = x + r.sin() * x"]
FLOWS = ["{0}", "with torch.no_grad():\n{1}", "{0}\nr = r.detach()", "kept, x = x, x.detach()\n{0}\nx = kept"]


def several_results() -> st.SearchStrategy[Part]:
    """An operator with several results, whose gradient flows, or is stopped in one of several ways."""

    def put_together(result: str, flow: str, combined: str) -> Part:
        inside = "\n".join(f"    {line}" for line in result.splitlines())
        return Part(flow.format(result, inside) + "\n" + combined)

    return st.builds(put_together, *map(st.sampled_from, (RESULTS, FLOWS, COMBINED)))
