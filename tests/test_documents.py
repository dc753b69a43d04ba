"""What the documents promise: an example that runs as it stands, the plan that it prints, links that lead somewhere."""

import re
from pathlib import Path

import pytest

import dta_compile

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
LINK = re.compile(r"\]\(([^)\s]+)\)")
TIMED = ("reason", "time", "memory", "self-check")  # lines of a plan that differ between machines


def blocks(language):
    return [text for name, text in re.findall(r"^```(\w*)\n(.*?)^```$", README, re.M | re.S) if name == language]


def labels(plan):
    return [line.split()[0] for line in plan.splitlines()[1:] if line[2] != " "]


@pytest.fixture(scope="module")
def printed_plan():
    """What the README says that its example prints."""
    (plan,) = [block for block in blocks("") if block.startswith("dta plan: ")]
    return plan


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 150


def test_the_example_of_the_readme_prints_its_plan(printed_plan, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("DTA_CACHE_DIR", str(tmp_path))
    (example,) = blocks("python")
    exec(compile(example, "README.md", "exec"), {"__name__": "readme"})
    printed = capsys.readouterr().out
    assert labels(printed) == labels(printed_plan)
    fixed = [line for line in printed_plan.splitlines() if line[:2] != "  " or line.split()[0] in labels(printed_plan)]
    assert not [line for line in fixed if line.split()[0] not in TIMED and line not in printed]


def test_every_line_of_the_plan_is_explained(printed_plan):
    told = " ".join(re.findall(r"^\| (`[^|]*) \|", README, re.M))
    assert not [label for label in labels(printed_plan) if f"`{label}`" not in told]


def test_links_of_the_readme_lead_somewhere():
    targets = [target.partition("#") for target in LINK.findall(README) if ":" not in target]
    assert len(targets) > 20
    for path, _, anchor in targets:
        assert (ROOT / path).exists(), path
        headings = re.findall(r"^#+ (.*)$", (ROOT / path).read_text(), re.M) if anchor else []
        slugs = [re.sub(r"[^\w-]", "", heading.lower().replace(" ", "-")) for heading in headings]
        assert not anchor or anchor in slugs, f"{path}#{anchor}"


def test_the_version_has_its_changes():
    assert f"## {dta_compile.__version__}\n" in (ROOT / "CHANGELOG.md").read_text()
