"""Pages in a real browser: what is drawn, pointed at, searched for and stepped through, offline and without an error.

Skipped where Chromium or the package playwright is missing; `make setup` installs the latter where it finds the former.
"""

import importlib
import shutil
import tempfile

import pytest

from dta_compile.data import bundled, load_rollouts, read
from dta_compile.divergence import find_losses
from dta_compile.plan import plan

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (the extra `browser`)")

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
SWITCHES = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")


class Words:
    def decode(self, ids):
        return "".join(f" word{one}" for one in ids)


@pytest.fixture(scope="module")
def chromium():
    with sync_api.sync_playwright() as playwright, tempfile.TemporaryDirectory() as profile:
        context = playwright.chromium.launch_persistent_context(
            profile, executable_path=CHROMIUM, headless=True, args=SWITCHES, viewport={"width": 1280, "height": 800}
        )
        yield context
        context.close()


@pytest.fixture
def show(chromium, tmp_path):
    """Opens the page of a plan; at the end of the test nothing may have been asked of a network, nor gone wrong."""
    wrong, pages = [], []

    def show(made, color_scheme="light", **known):
        path = tmp_path / f"{len(pages)}.html"
        made.to_html(path, **known)
        page = chromium.new_page()
        pages.append(page)
        page.emulate_media(color_scheme=color_scheme, reduced_motion="reduce")
        page.on("console", lambda message: wrong.append(message.text))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("request", lambda request: wrong.append(request.url) if request.url != path.as_uri() else None)
        page.goto(path.as_uri())
        page.wait_for_selector("body[data-ready=yes]")
        return page

    yield show
    for page in pages:
        page.close()
    assert not wrong


@pytest.fixture(scope="module")
def rollouts():
    return load_rollouts(bundled())


@pytest.fixture(scope="module")
def made(rollouts):
    return plan([one.tokens for one in rollouts], chunk_size=512)


def point(page, stage, x, y):
    """Move to a place of a stage, in shares of its size."""
    box = page.locator(stage).bounding_box()
    place = box["x"] + x * box["width"], box["y"] + y * box["height"]
    page.mouse.move(*place)
    return place


def pixel(page, x, y):
    """The colour of the tree at a place, in shares of its size: red, green, blue, and 0 where nothing is drawn."""
    return page.evaluate(
        """([x, y]) => {
            const canvas = document.querySelector("#tree-stage canvas");
            const copy = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
            copy.drawImage(canvas, -Math.round(x * canvas.width), -Math.round(y * canvas.height));
            return [...copy.getImageData(0, 0, 1, 1).data];
        }""",
        [x, y],
    )


def frames(page):
    """Wait until what was asked for is drawn."""
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


def test_a_plan_is_drawn(show, made):
    page = show(made, title="the tree & the schedule")
    assert page.title() == "the tree & the schedule"
    assert page.locator("#figures").inner_text().split("\n")[1] == "40"
    assert int(page.locator("#tree-stage").get_attribute("data-drawn")) > 0.9 * len(made.prefix_tree.stop)
    assert pixel(page, 0.2, 0.5)[3] == 255 and pixel(page, 0.97, 0.93)[3] == 0, "the root is there; short rows end"
    assert "forward" in page.locator("#timeline-stage").inner_text()
    assert "40 sequences" in page.locator("#details").inner_text()


def test_the_first_view_is_where_the_tokens_are(show, made, rollouts):
    page = show(made, loss_masks=[one.spans for one in rollouts])
    panel = page.locator("#details")
    assert panel.inner_text().startswith("Where the 10,267 tokens to run are") and "trained on" in panel.inner_text()
    sizes = sorted((made.prefix_tree.stop - made.prefix_tree.start).tolist(), reverse=True)
    assert panel.locator(".go span").all_inner_texts() == [f"{size:,}" for size in sizes[:12]]
    page.locator("#more").click()
    assert panel.locator(".go span").all_inner_texts() == [f"{size:,}" for size in sizes[:62]]
    page.locator("#sorts button").nth(2).click()
    assert panel.locator(".go span").first.inner_text() == f"{447 * 39:,}"
    panel.locator(".go").first.click()
    assert "[0:447]" in panel.inner_text()


def test_what_is_lost_and_what_a_device_holds(show, rollouts):
    tokens = [one.tokens for one in rollouts]
    made, losses = plan(tokens, bytes_per_token=10**6, memory_budget=10**9), find_losses(read(str(bundled())).sequences)
    first = losses.causes[0]
    page = show(made, title="a_long_name_" * 9, losses=losses, device=("H100", 80e9, 50e9), sequences=tokens)
    panel = page.locator("#details")
    rows = [row.split("\t") for row in panel.locator(".losses").inner_text().splitlines()[1:]]
    assert rows[0] == [
        first.name,
        str(first.places),
        f"{first.gained:,}",
        f"{first.compression:.2f}",
    ]
    assert "Memory on H100" in panel.inner_text() and "50 GB" in panel.inner_text() and "80 GB" in panel.inner_text()
    cut = """[...document.querySelectorAll("header *, .bar *, #details *")].filter((part) =>
        getComputedStyle(part).overflowX !== "visible" && part.scrollWidth > part.clientWidth + 1).length"""
    assert page.evaluate(cut) == 0
    page.locator(".losses button").first.click()
    assert page.locator("#modes [aria-checked=true]").inner_text() == "Lost"
    assert first.name in page.locator("#legend").inner_text()
    at = first.examples[0].at
    start, stop = panel.inner_text().split("[")[1].split("]")[0].replace(",", "").split(":")
    assert int(start) <= at < int(stop)
    page.set_viewport_size({"width": 390, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") == 390


def test_pointing_and_clicking(show, made):
    page = show(made, tokenizer=Words())
    place = point(page, "#tree-stage", 0.15, 0.5)
    card = page.locator("#tooltip").inner_text()
    assert "[0:447]" in card and "sequences through it: 40" in card and "word151644" in card
    page.mouse.click(*place)
    details = page.locator("#details").inner_text()
    assert "branches after it" in details and "Ops that run it" in details
    page.locator("#details .go").first.click()
    assert "Parts from its neighbour at token 447" in page.locator("#details").inner_text()
    assert page.locator("#details .differs").count() == 2
    point(page, "#timeline-stage", 0.5, 0.1)
    assert page.locator("#tooltip code").text_content() in str(made.schedule)


def test_stepping_by_keys(show, made):
    page, lines = show(made), made.schedule.lines()[1:]
    line, count = page.locator("#op-line"), len(lines)
    for key, number in (
        *(("ArrowRight", 1), ("ArrowRight", 2), ("Shift+ArrowRight", 12), ("ArrowLeft", 11)),
        *(("End", count), ("ArrowRight", count), ("Home", 1), ("ArrowLeft", 1)),
    ):
        page.keyboard.press(key)
        assert line.inner_text().split() == [str(number), "/", str(count), *lines[number - 1].split()]
        assert page.locator("#op-text").inner_text() == lines[number - 1]
    page.keyboard.press(" ")
    sync_api.expect(line).to_contain_text("3 /")
    page.keyboard.press(" ")


def test_search_dims_the_rest_and_goes_there(show, made):
    page = show(made, names=[f"rollout {number:02}" for number in range(40)])
    last = made.prefix_tree.order[-1]
    before = pixel(page, 0.15, 0.5), pixel(page, 0.45, 0.1)
    page.keyboard.press("/")
    page.keyboard.type(f"rollout {last:02}")
    page.wait_for_selector("#results:not([hidden])")
    assert "1 sequence;" in page.locator("#results").inner_text()
    frames(page)
    after = pixel(page, 0.15, 0.5), pixel(page, 0.45, 0.1)
    assert after[0] == before[0] and after[1][3] < before[1][3], "shared with it, and not"
    page.keyboard.press("Enter")
    assert f"Sequence s{last} · rollout {last:02}" in page.locator("#details").inner_text()
    page.keyboard.press("Escape")
    frames(page)
    page.keyboard.press("0")
    frames(page)
    assert (pixel(page, 0.15, 0.5), pixel(page, 0.45, 0.1)) == before
    page.keyboard.press("/")
    page.keyboard.type("151644 8948")
    sync_api.expect(page.locator("#results")).to_contain_text("40 sequences")


def test_colours(show, made, rollouts):
    page = show(made, rewards=[one.reward for one in rollouts], loss_masks=[one.spans for one in rollouts])
    seen = set()
    for number, name in enumerate(("Sharing", "Recompute", "Loss", "Reward", "Schedule"), 1):
        page.keyboard.press(str(number))
        frames(page)
        assert page.locator("#modes [aria-checked=true]").inner_text() == name
        seen.add((*pixel(page, 0.15, 0.9), page.locator("#legend").inner_text()))
    assert len(seen) == 5


def test_light_and_dark(show, made):
    page = show(made, color_scheme="dark")
    background = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(background), pixel(page, 0.15, 0.9)
    page.keyboard.press("d")
    light = page.evaluate(background), pixel(page, 0.15, 0.9)
    assert dark[0] == "rgb(12, 16, 22)" and light[0] == "rgb(238, 241, 245)" and dark[1] != light[1]
    page.evaluate("localStorage.clear()")


def test_wheel_drag_and_double_click(show, made):
    page = show(made)
    ticks = lambda: page.locator("#tree-stage .x text").all_text_contents()  # noqa: E731
    whole = ticks()
    place = point(page, "#tree-stage", 0.5, 0.5)
    page.mouse.wheel(0, -600)
    frames(page)
    near = ticks()
    assert near != whole
    page.mouse.down()
    page.mouse.move(place[0] - 200, place[1], steps=3)
    page.mouse.up()
    frames(page)
    assert ticks() not in (near, whole)
    page.keyboard.press("0")
    frames(page)
    assert ticks() == whole
    page.mouse.dblclick(*point(page, "#tree-stage", 0.45, 0.55))
    sync_api.expect(page.locator("#tree-stage .x text").first).not_to_have_text("0")


@pytest.mark.parametrize("sequences", [[], [[]], [[3, 4]], [[1, 2], [3], [4, 5]]], ids=str)
def test_small_plans(sequences, show):
    page = show(plan(sequences))
    for key in ("ArrowRight", "ArrowDown", ".", "End", "1", "2", "3", "+", "0", "?", "Escape"):
        page.keyboard.press(key)
    assert page.locator("#tree-stage .empty").count() == (not sequences)


def test_text_is_text(show):
    texts = ["</script><img src=x onerror=alert(1)>", "日本 😀", "\u202e<b>", "&amp;"]

    class Markup:
        def decode(self, ids):
            return "".join(texts[one] for one in ids)

    names = ["<img src=x onerror=alert(1)>", "</script>", "naïve 🦊"]
    page = show(plan([[0, 1, 2], [0, 1, 3], [1]]), tokenizer=Markup(), names=names, title="<b>&amp;</b></title>")
    assert page.locator("h1").inner_text() == page.title() == "<b>&amp;</b></title>"
    page.mouse.click(*point(page, "#tree-stage", 0.15, 0.15))
    details = page.locator("#details").inner_text()
    assert "</script><img src=x onerror=alert(1)>" in details and "日本 😀" in details
    assert page.locator("img").count() == 0


def test_a_cut_is_told(show, monkeypatch):
    monkeypatch.setattr(importlib.import_module("dta_compile.views.page_data"), "MOST_BYTES", 60)
    page = show(plan([list(range(300)), [*range(100), 7]]))
    assert "the first and last" in page.locator("#cut-note").inner_text()
    page.mouse.click(*point(page, "#tree-stage", 0.2, 0.5))
    assert "tokens …" in page.locator("#details .tokens .cut").first.inner_text()


def test_only_what_can_be_seen_is_drawn(show):
    page = show(plan([[0, number, number + 1] for number in range(4_000)]))
    drawn = int(page.locator("#tree-stage").get_attribute("data-drawn"))
    assert 200 < drawn < 800, "at most one rectangle for each line of pixels"
