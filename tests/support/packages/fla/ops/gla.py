"""Linear attention with a decay by channel."""

from fla.ops.token_by_token import run


def chunk_gla(
    q,
    k,
    v,
    g,
    scale=None,
    initial_state=None,
    output_final_state=False,
    state_v_first=False,
    cu_seqlens=None,
    cu_seqlens_cpu=None,
):
    assert g.dim() == 4
    return run(q, k, v, g, None, scale, initial_state, output_final_state, cu_seqlens, cu_seqlens_cpu)
