"""prefix_key: cut the token region at its last mixer into trunk and head, and find the prefix key.

Later tokens depend on the trunk, never on the head. The prefix key consists of the values that determine the trunk's
inputs: tokens with equal keys of themselves and all tokens before are one token of the tree. Inputs that only the head
reads (labels) are not part of it, so they never split a prefix: one trunk row may have several head rows.
"""

from __future__ import annotations

from torch import fx

from dta_compile.errors import RefusalError
from dta_compile.executable.layouts import Layout
from dta_compile.ops.distances import BY_DEPTH
from dta_compile.passes.contracts import contract
from dta_compile.passes.graphs.nodes import is_uniform
from dta_compile.passes.graphs.source_lines import where
from dta_compile.passes.graphs.subgraph import bytes_per_token, cheapest_cut, is_per_token
from dta_compile.passes.program import ChunkInput, Program, ancestors


@contract(
    reads=[
        *("module", "placeholders", "folding", "values", "input_layouts", "parameter_dependent", "roots"),
        *("mixer_nodes", "region", "frontier"),
    ],
    fills=["trunk", "trunk_inputs", "head_inputs", "constant_inputs", "trunk_keys", "head_keys"],
)
def prefix_key(program: Program) -> None:
    """Fill `program.trunk`, the chunk inputs of trunk and head, and the prologue values that determine those."""
    nodes = [node for node in program.graph.nodes if node in program.region]
    seen_later = ancestors(program.mixer_nodes)
    inputs = _chunk_inputs(program, nodes)
    own = [item for item in inputs if any(user in seen_later for user in _users(program, item))]
    head_only = [item for item in inputs if item not in own]
    per_token = {node: None for node in nodes if is_per_token(program.values[node])}
    reads_head_inputs = {user for item in head_only for user in _users(program, item)}
    frontier = {value.node for value in program.frontier}
    trunk = cheapest_cut(
        per_token,
        lambda node: bytes_per_token(node, program.values[node]),
        first=seen_later & per_token.keys(),
        last=reads_head_inputs & per_token.keys(),
        leaving=frontier,
    )
    # Values of weights alone (a transposed matrix) may be used in both parts, so they belong to the trunk, the first.
    program.trunk = trunk | {node for node in nodes if node not in per_token}
    program.trunk_inputs = [item for item in inputs if any(user in program.trunk for user in _users(program, item))]
    program.head_inputs = [item for item in inputs if any(user not in program.trunk for user in _users(program, item))]
    program.constant_inputs = _constant_inputs(program, nodes)
    # Tokens of a tree row have one depth in common.
    program.trunk_keys = _keys(program, [item for item in program.trunk_inputs if item.node.target is not BY_DEPTH])
    known = {(key.node, key.layout) for key in program.trunk_keys}
    program.head_keys = [key for key in _keys(program, program.head_inputs) if (key.node, key.layout) not in known]


def _chunk_inputs(program: Program, nodes: list[fx.Node]) -> list[ChunkInput]:
    """Return the dense values with a batch or token axis that the region reads, once per layout that one is read in."""
    inputs: dict[tuple[fx.Node, Layout], ChunkInput] = {}
    for node in nodes:
        for arg in node.all_input_nodes:
            if arg in program.parameter_dependent or not isinstance(program.values.get(arg), Layout):
                continue
            layout = program.input_layouts.get((node, arg), program.layout(arg))
            if not layout.labelled or is_uniform(arg):
                continue
            if layout.frame is not None and layout.frame.start is None:
                raise RefusalError(
                    "the positions of the tokens in this value are unknown",
                    where=where(node),
                    expected="a value over all tokens, or one combined with token values of the same positions",
                    got=f"{arg.name} with {layout.frame.length} tokens",
                )
            if (arg, layout) not in inputs:
                inputs[arg, layout] = ChunkInput(arg, layout, f"input_{len(inputs)}")
    return list(inputs.values())


def _users(program: Program, item: ChunkInput) -> list[fx.Node]:
    return [
        user
        for user in item.node.users
        if user in program.region
        and program.input_layouts.get((user, item.node), program.values[item.node]) == item.layout
    ]


def _constant_inputs(program: Program, nodes: list[fx.Node]) -> list[fx.Node]:
    """Return the dense values without batch or token axis that the region reads: buffers, scales."""
    constants: dict[fx.Node, None] = {}
    for node in nodes:
        for arg in node.all_input_nodes:
            value = program.input_layouts.get((node, arg), program.values.get(arg))
            if arg not in program.parameter_dependent and isinstance(value, Layout) and not value.labelled:
                constants[arg] = None
    for chain in program.folding.chains if program.folding else ():
        buffers = dict.fromkeys(program.placeholders[index] for index in chain)
        constants |= {} if constants.keys().isdisjoint(buffers) else buffers  # also of copies that were left out
    return list(constants)


def _keys(program: Program, inputs: list[ChunkInput]) -> list[ChunkInput]:
    """Return the values that determine some inputs, position by position."""
    keys: dict[tuple[fx.Node, Layout], ChunkInput] = {}
    for item in inputs:
        for root in _key_roots(program, item):
            value = item.layout if root is item.node else program.values[root]
            if isinstance(value, Layout) and value.labelled:
                keys[root, value] = ChunkInput(root, value, f"key_{root.name}")
    return list(keys.values())


def _key_roots(program: Program, item: ChunkInput) -> list[fx.Node]:
    """Return the values that determine an input position by position; a shifted or per-sequence one is its own key.

    These are its roots, or nearer values with one number per token: sequences at different columns of a packed row have
    equal positions, but not the columns and segments from which positions are computed.
    """
    whole = item.layout == program.values[item.node] and item.layout.frame is not None
    if not whole:
        return [item.node]

    def is_root(node: fx.Node) -> bool:
        return program.roots.get(node, frozenset()) == {node} or _is_one_number_per_token(program, node, item.layout)

    sources = ancestors([item.node], stop=lambda node: node not in program.roots or is_root(node))
    roots = {node for node in sources if node in program.roots and is_root(node)}
    readable = all(isinstance(program.values[node], Layout) for node in roots)
    return sorted(roots, key=lambda node: node.name) if readable else [item.node]


def _is_one_number_per_token(program: Program, node: fx.Node, like: Layout) -> bool:
    value = program.values[node]
    if not isinstance(value, Layout) or value.frame != like.frame:
        return False
    features = [size for size, axis in zip(node.meta["val"].shape, value.dims, strict=True) if axis is None]
    return is_per_token(value) and all(size == 1 for size in features)
