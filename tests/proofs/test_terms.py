"""Terms pickle: what is one object stays one, however deep a term is."""

import pickle

import pytest
import torch

from dta_compile.executable.masks import MaskProgram
from dta_compile.proofs.mask_class import MaskClass
from dta_compile.proofs.terms import Evaluation, Leaf, Terms, in_order, subterms

aten = torch.ops.aten


def test_terms_come_after_what_they_are_made_of():
    terms = Terms()
    key = terms.index("key")
    number = terms.entry(Leaf("ids", torch.int64, "L['ids']"), (terms.index("row"), key))
    both = terms.apply(
        aten.bitwise_and.Tensor, terms.apply(aten.ge.Scalar, number, 3), terms.apply(aten.lt.Scalar, key, 7)
    )
    found = in_order(both, number)
    assert set(found) == set(subterms(both)) and len(found) == len(set(found)) and found[-1] is both
    assert all(found.index(part) < place for place, term in enumerate(found) for part in set(subterms(term)) - {term})


@pytest.mark.parametrize("depth", [3, 5000])
def test_masks_pickle_however_deep_their_terms_are(depth):
    terms, leaf = Terms(), Leaf("ids", torch.int64, "L['ids']", ((0, "L['ids']"),))
    number = chain = terms.entry(leaf, (terms.index("row"), terms.index("key")))
    for step in range(depth):
        chain = terms.apply(aten.add.Tensor, chain, number) if step % 2 else terms.apply(aten.mul.Scalar, chain, 2)
    valid = terms.apply(aten.ne.Scalar, chain, 0)
    found = pickle.loads(pickle.dumps(MaskProgram(MaskClass(valid=valid, segments=(number,)), frozenset([leaf]))))
    assert found.leaves == {leaf} and [one.inputs for one in found.leaves] == [leaf.inputs]
    parts = in_order(found.constant.valid)
    assert [type(part) for part in parts] == [type(part) for part in in_order(valid)]
    assert found.constant.segments[0] is parts[2]
    assert Terms(parts).entry(leaf, parts[2].index) is parts[2]
    if depth == 3:
        ids = torch.arange(6).reshape(2, 3)
        indices = {"row": torch.arange(2)[:, None], "key": torch.arange(3)[None]}
        again, before = (Evaluation({"ids": ids}, int, indices)(term) for term in (parts[-1], valid))
        assert torch.equal(again, before)
