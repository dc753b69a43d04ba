"""The package's recurrences, one token after the other, with the demands that its functions make of their arguments."""

import torch


def run(q, k, v, g, beta, scale, initial_state, output_final_state, cu_seqlens, cu_seqlens_cpu):
    """Output `[1, T, H, V]`, final states `[N, H, K, V]` of N sequences in a row; g: `[1, T, H]` or `[1, T, H, K]`."""
    assert q.shape[0] == 1 and q.shape == k.shape and q.shape[:3] == v.shape[:3] == g.shape[:3]
    assert initial_state.shape == (len(cu_seqlens) - 1, *k.shape[2:], v.shape[-1])
    assert cu_seqlens.dtype == torch.int64 and torch.equal(cu_seqlens, cu_seqlens_cpu)
    assert g.dtype == initial_state.dtype != v.dtype or v.dtype == torch.float64
    g = g if g.dim() == 4 else g[..., None]
    outs, finals = [], []
    for number, (first, last) in enumerate(zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True)):
        assert first < last
        state = initial_state[number]
        for t in range(first, last):
            query, key, value = (tensor[0, t].to(state.dtype) for tensor in (q, k, v))
            state = state * g[0, t].exp()[..., None]
            if beta is not None:
                value = beta[0, t].to(state.dtype)[:, None] * (value - (key[..., None] * state).sum(1))
            state = state + key[..., None] * value[:, None]
            outs.append(scale * (query[..., None] * state).sum(1))
        finals.append(state)
    return torch.stack(outs)[None].to(q.dtype), torch.stack(finals) if output_final_state else None
