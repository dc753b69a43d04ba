"""Linear attention with a decay by head."""

from fla.ops.token_by_token import run


def chunk_simple_gla(
    q,
    k,
    v,
    g=None,
    g_gamma=None,
    scale=None,
    initial_state=None,
    output_final_state=False,
    state_v_first=False,
    cu_seqlens=None,
    cu_seqlens_cpu=None,
    **kwargs,
):
    assert g.dim() == 3
    return run(q, k, v, g, None, scale, initial_state, output_final_state, cu_seqlens, cu_seqlens_cpu)
