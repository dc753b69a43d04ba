"""What passes declare is held against what they do, and a program's invariants are checked between them."""

import copy
import dataclasses
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dta_compile.errors import OptionError, RefusalError
from dta_compile.options import SKIPPABLE_PASSES
from dta_compile.passes import PASSES, Program, run_passes
from dta_compile.passes.contracts import FIELDS, ContractError, contract
from dta_compile.passes.inspection.invariants import INVARIANTS, Snapshot
from dta_compile.passes.inspection.listing import listing
from tests.support.inside import inside

aten = torch.ops.aten
WIDTH, VOCABULARY = 8, 23


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.project = nn.Linear(WIDTH, 3 * WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids):
        x = self.embedding(ids)
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.project(x).chunk(3, -1))
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        logits = self.head(F.gelu(x))[:, :-1]
        return logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]


def compiled(**options):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Decoder().double()
    ids = torch.randint(0, VOCABULARY, (4, 9))
    ids[1:, :4] = ids[0, :4]
    function = torch.compile(model, backend="dta", options={"chunk_size": 4, **options})
    out = function(ids)
    out.sum().backward()
    return inside(function).only.program, out.detach(), [p.grad for p in model.parameters()]


@pytest.fixture(scope="module")
def result():
    return compiled()


@pytest.fixture
def program(result):
    """A program whose graphs may be spoiled: what is shallow is copied, graphs are given back as they were."""
    whole = result[0]
    modules = whole.stages.modules
    before = [copy.deepcopy(module.graph) for module in modules]
    yield dataclasses.replace(whole)
    for module, graph in zip(modules, before, strict=True):
        module.graph = graph


def test_every_field_is_filled_by_one_pass_and_read_after_it():
    filled = set(Program(None, True).filled)
    for step in PASSES:
        assert step.reads | step.rewrites <= filled, step.name
        assert not step.fills & filled, step.name
        filled |= step.fills
    assert filled == FIELDS


def test_a_pass_sees_and_writes_what_it_declares_only():
    def attempt(run, **declared):
        contract(**declared)(run)(Program(None, training=True))

    def reads(program):
        assert program.training

    def writes(program):
        program.training = False

    attempt(reads, reads=["training"])
    attempt(writes, rewrites=["training"])
    with pytest.raises(ContractError, match="reads reads 'training' without declaring it"):
        attempt(reads)
    with pytest.raises(ContractError, match="'training' is written by writes, who does not declare it"):
        attempt(writes, reads=["training"])
    with pytest.raises(ContractError, match="needs what no pass before it filled: values"):
        attempt(reads, reads=["training", "values"])
    with pytest.raises(ContractError, match="fills what is filled already: training"):
        attempt(writes, fills=["training"])
    with pytest.raises(ContractError, match="a program has no sequences"):
        contract(reads=["sequences"])(reads)


def test_helpers_of_a_pass_are_watched_too():
    def run(program):
        assert program.outputs

    with pytest.raises(ContractError, match="run reads 'module'"):
        contract(reads=["training"])(run)(Program(None, training=True))


def test_results_are_frozen(result):
    program = result[0]
    with pytest.raises(TypeError):
        program.values[None] = None
    for name in ("inputs", "mixers", "frontier", "region", "trunk", "constant_inputs"):
        assert isinstance(getattr(program, name), (tuple, frozenset)), name
    with pytest.raises(dataclasses.FrozenInstanceError):
        program.joint.working = {}
    with pytest.raises(dataclasses.FrozenInstanceError):
        program.stages.kinds[0].working = {}
    with pytest.raises(dataclasses.FrozenInstanceError):
        program.frontier[0].uses = ()


def test_a_pass_that_changes_a_graph_says_so():
    program, _, _ = compiled()

    def break_up(program):
        node = next(node for node in program.chunk.graph.nodes if node.target is aten.gelu.default)
        node.target = aten.relu.default
        node.kwargs = {}

    silent = contract(reads=["chunk"])(break_up)
    snapshot = Snapshot(program)
    silent(program)
    snapshot.take(silent)
    with pytest.raises(ContractError, match="break_up changed the graph 'chunk' without declaring it"):
        snapshot.compare()
    snapshot.take(contract(rewrites=["chunk"])(break_up))
    snapshot.compare()


def spoil_inputs(program):
    program.inputs = program.inputs[:-1]


def spoil_values(program):
    program.values = {node: value for node, value in program.values.items() if node.target is not aten.gelu.default}


def spoil_mixers(program):
    program.mixers = tuple(dataclasses.replace(layer, index=layer.index + 1) for layer in program.mixers)


def spoil_region(program):
    program.region = frozenset(node for node in program.region if node.target is not aten.gelu.default)


def spoil_frontier(program):
    inside = next(node for node in program.graph.nodes if node.op == "placeholder")
    program.frontier = tuple(dataclasses.replace(value, node=inside) for value in program.frontier)


def spoil_trunk(program):
    program.trunk = frozenset(node for node in program.trunk if node.target is not aten.embedding.default)


def spoil_chunk(program):
    program.head_inputs = ()


def spoil_joint(program):
    kinds = [dataclasses.replace(kind, kept=kind.kept[1:]) for kind in program.stages.kinds]
    program.stages = dataclasses.replace(program.stages, kinds=tuple(kinds))


def spoil_memory(program):
    graphs = [kind.forward.graph for kind in program.stages.kinds]
    nodes = [node for graph in graphs for node in graph.nodes]
    read_twice = next(n for n in nodes if n.op == "call_function" and len(n.users) > 1 and "val" in n.meta)
    with read_twice.graph.inserting_after(read_twice):
        read_twice.graph.call_function(aten.mul_.Tensor, (read_twice, 2)).meta = dict(read_twice.meta)


def spoil_functional(program):
    program.module = copy.copy(program.module)
    graph = copy.deepcopy(program.module.graph)
    node = next(node for node in graph.nodes if node.target is aten.gelu.default)
    node.target, node.kwargs = aten.relu_.default, {}
    program.module.graph = graph


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (spoil_inputs, "every input of the call is a placeholder"),
        (spoil_functional, "the lowered graph is functional"),
        (spoil_values, "every value of the lowered graph has been interpreted"),
        (spoil_mixers, "every mixer of this batch is a layer"),
        (spoil_region, "the token region reads itself"),
        (spoil_frontier, "frontier values leave it token by token"),
        (spoil_trunk, "the trunk has all mixers"),
        (spoil_chunk, "the chunk graph takes parameters"),
        (spoil_joint, "executable graphs take the path"),
        (spoil_memory, "what has been written over"),
    ],
)
def test_each_invariant_is_seen_to_be_broken(program, spoil, text):
    rule = next(rule for rule in INVARIANTS if text in rule.text)
    assert not list(rule.violations(program))
    spoil(program)
    assert list(rule.violations(program))


def test_every_invariant_is_spoiled_above():
    (mark,) = test_each_invariant_is_seen_to_be_broken.pytestmark
    texts = [text for _, text in mark.args[1]]
    assert all(any(text in rule.text for text in texts) for rule in INVARIANTS)


def test_passes_can_be_left_out(result):
    assert tuple(step.name for step in PASSES if step.may_be_skipped) == SKIPPABLE_PASSES
    program, out, grads = compiled(skip_passes=SKIPPABLE_PASSES)
    assert not program.timings.keys() & set(SKIPPABLE_PASSES)
    for mine, theirs in zip([out, *grads], [result[1], *result[2]], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
    with pytest.raises(OptionError, match="skip_passes"):
        compiled(skip_passes=["joint"])
    with pytest.raises(OptionError, match="a list of names"):
        compiled(skip_passes="in_place")


def test_passes_can_stop_early(result):
    whole = result[0]
    program = run_passes(Program(whole.captured, True), stop_after="regions")
    assert list(program.timings)[-1] == "regions" and program.frontier and not program.trunk
    with pytest.raises(ContractError, match="no pass before it filled"):
        PASSES[-1](program)


def test_a_broken_invariant_is_an_error_that_asks_for_a_report(monkeypatch):
    def violations(program):
        yield "anything"

    rule = dataclasses.replace(INVARIANTS[0], violations=violations)
    monkeypatch.setattr("dta_compile.passes.inspection.invariants.INVARIANTS", (rule,))
    with pytest.raises(RefusalError, match=r"(?s)a bug of dta_compile.*after lower.*not so: anything.*please report"):
        compiled()
    torch._dynamo.reset()
    model, ids = Decoder(), torch.randint(0, VOCABULARY, (3, 5))
    dense = torch.compile(model, backend="dta", options={"fallback": "dense"})(ids)
    torch.testing.assert_close(dense, model(ids))


def test_a_listing_names_the_pass_and_the_users_line(result):
    text = listing(result[0])
    parts = dict(re.findall(r"^# (\w+)\n(.*?)(?=^# |\Z)", text, re.DOTALL | re.MULTILINE))
    assert {"lowered", "chunk", "prologue", "epilogue", "forward_0", "backward_0"} <= parts.keys()
    (gelu,) = (line for line in parts["lowered"].splitlines() if "aten.gelu" in line)
    assert "[lower]" in gelu and "test_contracts.py" in gelu and "F.gelu(x)" in gelu
    assert re.search(r"float64\[s\d+, s\d+, 8\]", gelu)
    names = ("forward_", "backward_")
    lines = {
        name: [line for key in parts if key.startswith(name) for line in parts[key].splitlines()] for name in names
    }
    assert any("aten.addmm_" in line and "[accumulate]" in line for line in lines["backward_"])
    assert any("path.mix(" in line and "[joint]" in line for line in lines["forward_"])
