"""What an installation promises: a light import, the command, and a backend that is found by its name alone."""

import importlib.metadata
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import dta_compile

ROOT = Path(__file__).parent.parent


def python(*arguments: str, **keywords) -> str:
    return subprocess.run(
        [sys.executable, *arguments], check=True, capture_output=True, text=True, timeout=120, **keywords
    ).stdout


@pytest.fixture
def distribution():
    found = importlib.metadata.distribution("dta-compile")
    if isinstance(found, importlib.metadata.PathDistribution):
        return found
    pytest.skip("dta-compile is used from its source tree, not installed")


def test_import_is_light():
    loaded = python("-c", "import sys, dta_compile; print(*sys.modules)", cwd=ROOT).split()
    assert "dta_compile" in loaded
    assert not {"torch", "transformers", "networkx", "rich"} & set(loaded)


@pytest.mark.parametrize("arguments", [["--help"], ["plan", "--help"], ["demo", "--help"]])
def test_python_m_shows_help_without_torch(arguments):
    assert "usage: dta" in python("-m", "dta_compile", *arguments, cwd=ROOT)


LOOKS_FOR_IT_IN_THREADS = """
import concurrent.futures, threading
{first}
import dta_compile
from torch._dynamo.backends.registry import lookup_backend
together = threading.Barrier(4)
def look(_):
    together.wait()
    return lookup_backend("dta")
with concurrent.futures.ThreadPoolExecutor(4) as pool:
    print(len(set(pool.map(look, range(4)))))
"""


@pytest.mark.slow
@pytest.mark.parametrize("first", [pytest.param("", marks=pytest.mark.slow), "import torch._dynamo"])
def test_threads_find_the_backend_at_the_same_time(first):
    assert python("-c", LOOKS_FOR_IT_IN_THREADS.format(first=first), cwd=ROOT) == "1\n"


def test_public_names_resolve():
    for name in ("plan", "last_plan", "explain", "balance", "streaming_step", "register_token_rule", "errors"):
        assert name in dta_compile.__all__
        assert getattr(dta_compile, name) is not None


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such_name"):
        dta_compile.no_such_name  # noqa: B018


@pytest.mark.parametrize("order", [pytest.param("dta_compile, torch", marks=pytest.mark.slow), "torch, dta_compile"])
def test_the_backend_is_registered_once_from_a_source_tree(order):
    code = f"import {order}; print(torch._dynamo.list_backends().count('dta'))"
    assert python("-c", code, cwd=ROOT).split() == ["1"]


def test_everything_registers_with_transformers_after_the_backend_is_loaded():
    """The package and the backend both wait for the same module."""
    program = """
        import dta_compile.backend, transformers
        from dta_compile.torch_compat import MARK
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
        assert "dta" in ALL_ATTENTION_FUNCTIONS
        assert hasattr(transformers.LlavaModel.get_image_features, MARK)
    """
    python("-c", textwrap.dedent(program))


def test_the_version_is_that_of_the_package(distribution):
    assert distribution.version == dta_compile.__version__


def test_the_entry_point_names_the_backend(distribution):
    points = [point for point in distribution.entry_points if point.group == "torch_dynamo_backends"]
    assert [(point.name, point.value) for point in points] == [("dta", "dta_compile.backend:dta")]
    assert callable(points[0].load())


def test_the_backend_is_found_by_name_alone(distribution, tmp_path):
    code = "import torch; print(torch._dynamo.list_backends().count('dta'))"
    assert python("-c", code, cwd=tmp_path).split() == ["1"]


def test_pages_come_with_the_licences_of_what_they_hold():
    assets = Path(dta_compile.__file__).parent / "views" / "assets"
    script = (assets / "d3" / "d3.min.js").read_text()
    licence = (assets / "d3" / "LICENSE").read_text()
    assert "LICENSE" in script.splitlines()[0]
    assert "Permission to use, copy, modify" in licence and "Redistribution and use" in licence
    assert {"page.html", "page.css", "main.js"} <= {path.name for path in assets.iterdir()}


def test_the_bundled_data_comes_with_its_licences():
    folder = Path(dta_compile.__file__).parent / "examples_data"
    assert {"airline_tiny.npz", "airline_tiny.json", "LICENSE.tau-bench", "LICENSE.tau2-bench"} <= {
        path.name for path in folder.iterdir()
    }
