"""One thread for the tiny tensors of the tests (on shared cores, waiting for other threads outlasts the work), a folder
of their own for calibrations, programs analysed anew by every test but those of the cache of programs, and compilation
as fast as it is for models of one or two layers: the cache of fake tensors saves more than it costs only from about
eight on. What tests run in other processes has the defaults of torch and the package."""

import collections
import glob
import os
import tempfile

if not any(map(glob.glob, ("/dev/nvidia[0-9]*", "/dev/kfd", "/dev/dxg"))):  # no GPU: kernels run on a CPU
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before torch imports Triton, which from 3.7 on reads it then

import pytest
import torch
import torch._dynamo.config
from hypothesis import HealthCheck, settings

pytest.register_assert_rewrite("tests.support")  # asserts of harnesses explain themselves as those of tests do
from tests.support.sequences import BATCHES  # noqa: E402 - after the line above

settings.register_profile("tests", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")

torch.set_num_threads(1)
torch._dynamo.config.fake_tensor_cache_enabled = False
os.environ["DTA_CACHE_DIR"] = tempfile.mkdtemp(prefix="dta_compile_tests_")

from dta_compile.options import Options  # noqa: E402 - after the line above
from dta_compile.program_cache import cache  # noqa: E402
from tests.support.groups import in_groups  # noqa: E402


def pytest_addoption(parser):
    text = "run every compiled call that names no sweep with this one: chunks, stages, groups (stages over subtrees)"
    text += " or strides (stages that keep every other boundary)"
    parser.addoption("--sweep", help=text)


def pytest_configure(config):
    if sweep := config.getoption("--sweep"):
        parse, more = Options.parse, {}
        if sweep == "strides":
            sweep, more = "stages", {"stride": 2}
        if sweep == "groups":
            in_groups(pytest.MonkeyPatch())
            sweep = "stages"

        def parsed(mapping):
            over_ranks = {"mesh", "groups"} & {*(mapping or {})} or (mapping or {}).get("strategy") == "one_tree"
            return parse({"sweep": sweep, **({} if over_ranks else more), **(mapping or {})})

        Options.parse = parsed


@pytest.fixture(scope="session")
def batches():
    """Strategy for small batches of random trees, deep chains and wide fans."""
    return BATCHES


@pytest.fixture(scope="module")
def analysed_anew():
    """Programs are analysed by the tests of a module themselves: they watch passes, or change them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache, "open_folder", lambda folder: None)
        yield


@pytest.hookimpl(tryfirst=True)  # before tests are selected by their marks
def pytest_collection_modifyitems(items):
    """Make all but a few cases of a test with `sample(n)` slow ones; those that stay are spread over all of them."""
    cases = collections.defaultdict(list)
    for item in items:
        if item.get_closest_marker("sample") and not item.get_closest_marker("slow"):
            cases[item.function].append(item)
    for found in cases.values():
        (count,) = found[0].get_closest_marker("sample").args
        chosen = {round(i * (len(found) - 1) / max(count - 1, 1)) for i in range(count)}
        for number, item in enumerate(found):
            if number not in chosen:
                item.add_marker(pytest.mark.slow)
