"""What is said to keep gradients flowing does so, by torch's own samples (OpInfo)."""

import itertools
import warnings

import pytest
import torch
from torch.utils._pytree import tree_leaves

from dta_compile.passes.lowering.gradient_flow import TRACKED_THROUGH

pytest.importorskip("expecttest", reason="torch's own samples need it")
from torch.testing._internal.common_methods_invocations import op_db

SPELLINGS = {"log_sigmoid": "logsigmoid", "type_as": "to", "getitem": "__getitem__", "truediv": "div"}


def tensors(value):
    leaves = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return [leaf for leaf in leaves if leaf.is_floating_point() or leaf.is_complex()]


@pytest.mark.parametrize("name", sorted(TRACKED_THROUGH))
def test_floats_are_tracked_if_an_argument_is(name):
    sampled, found = SPELLINGS.get(name, name), 0
    dtype = torch.complex128 if name == "view_as_real" else torch.float64
    for info in op_db:
        names = (info.name.rpartition(".")[2], *(alias.name for alias in info.aliases))
        if sampled not in names or dtype not in info.dtypes:
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for sample in itertools.islice(info.sample_inputs("cpu", dtype, requires_grad=True), 5):
                if any(value.requires_grad for value in tensors((sample.input, sample.args))):
                    results = tensors(info.op(sample.input, *sample.args, **sample.kwargs))
                    assert all(value.requires_grad for value in results)
                    found += len(results)
    assert found
