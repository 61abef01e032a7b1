"""The report in a browser: it draws, answers, follows the theme and fits a phone."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hdet.report import build as report
from tests.sample_record import HOSTILE, write_hostile, write_sample

NEEDED = os.environ.get("HDET_BROWSER") == "required"
FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]
BUTTONS = ["Download plot", "Zoom", "Pan", "Reset axes"]


def refuse(reason: str) -> None:
    if NEEDED:
        pytest.fail(f"HDET_BROWSER=required, but {reason}", pytrace=False)
    pytest.skip(reason)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """One Chromium for all tests of this file."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        refuse("no chromium was found on the PATH")
    try:
        from playwright.sync_api import sync_playwright
    except ModuleNotFoundError:
        refuse("playwright is not installed")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        yield browser
        browser.close()


class Visit:
    """A page of the report and everything suspicious that happened while it was open."""

    def __init__(self, browser: Any, path: Path, **options: Any) -> None:
        size = {"width": 1280, "height": 900}
        self.page = browser.new_page(**{"viewport": size, **options})
        self.page.set_default_timeout(300_000)  # a busy machine is no failure
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("dialog", lambda dialog: self.complaints.append(dialog.message))
        self.page.on("popup", lambda popup: self.complaints.append(popup.url))
        self.page.goto(path.as_uri())
        self.path = path

    def plot(self, title: str) -> Any:
        """The drawn plot below a title; it is drawn when it comes into view."""
        heading = self.page.get_by_text(title, exact=True)
        place = self.page.locator("figure").filter(has=heading).first.locator(".plot")
        place.scroll_into_view_if_needed()
        place.locator(".main-svg").first.wait_for()
        return place

    def draw_all(self) -> None:
        for place in self.page.locator(".plot:visible").all():
            place.scroll_into_view_if_needed()
            place.locator(".main-svg").first.wait_for()

    def point_at(self, plot: Any, across: float, down: float) -> str:
        box = plot.locator(".nsewdrag").first.bounding_box()
        x, y = box["x"] + across * box["width"], box["y"] + down * box["height"]
        self.page.mouse.move(x - 3, y)
        self.page.mouse.move(x, y)
        plot.locator(".hoverlayer text").first.wait_for()
        return str(plot.locator(".hoverlayer").first.text_content())

    def overflow(self) -> int:
        root = "document.documentElement"
        return int(self.page.evaluate(f"{root}.scrollWidth - {root}.clientWidth"))

    def check(self) -> None:
        asked = [url for url in self.requests if not url.startswith(("data:", "blob:"))]
        assert asked == [self.path.as_uri()]
        assert self.complaints == []
        assert self.page.evaluate("window.harmed === undefined")
        self.page.close()


def written(folder: Path, *runs: Path) -> Path:
    path = folder / "report.html"
    report.write(runs, path)
    return path


@pytest.fixture(scope="module")
def one_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("one")
    return written(folder, write_sample(folder / "a", excluded={3: 1}))


def test_page_draws_its_plots_without_network_requests(browser: Any, one_run: Path) -> None:
    visit = Visit(browser, one_run)
    visit.draw_all()
    for title in ("Learning rate: blocks", "accuracy", "Excluded replicas"):
        assert visit.plot(title).locator(".point").count() > 0
    losses = visit.plot("Loss of every replica and of the consensus")
    assert losses.locator(".scatterlayer .trace").count() == 5
    titles = visit.page.locator(".modebar-btn").evaluate_all("b => b.map(b => b.dataset.title)")
    assert set(titles) == set(BUTTONS)
    visit.check()


def test_hovering_shows_values_and_reasons(browser: Any, one_run: Path) -> None:
    visit = Visit(browser, one_run)
    results = visit.point_at(visit.plot("Loss of every replica and of the consensus"), 0.5, 0.5)
    assert "replica 3" in results
    assert "± 0.02" in results
    results = visit.point_at(visit.plot("Learning rate: embedding"), 0.5, 0.5)
    assert "spread" in results
    assert "lowest loss in replica" in results
    visit.check()


def test_plots_follow_the_light_or_dark_theme(browser: Any, one_run: Path) -> None:
    from playwright.sync_api import expect

    visit = Visit(browser, one_run, color_scheme="light")
    line = visit.plot("Learning rate: embedding").locator(".js-line").last
    light = line.evaluate("e => getComputedStyle(e).stroke")
    visit.page.emulate_media(color_scheme="dark")
    visit.page.wait_for_function("getComputedStyle(document.body).backgroundColor < 'rgb(2'")
    # Plots are drawn again a moment after the page has turned dark.
    expect(line).not_to_have_css("stroke", light, timeout=300_000)
    visit.check()


def test_comparison_shows_both_runs(browser: Any, tmp_path: Path) -> None:
    runs = [write_sample(tmp_path / name, seed=seed) for seed, name in enumerate(("a", "b"))]
    visit = Visit(browser, written(tmp_path, *runs))
    for title in ("Training loss", "Learning rate: embedding", "accuracy"):
        names = visit.plot(title).locator(".legendtext").all_text_contents()
        assert names == ["a", "b"]
    assert visit.page.locator("tbody th[scope=row]").all_text_contents()[:2] == ["a", "b"]
    visit.page.locator("details.run summary").first.click()
    assert visit.plot("Loss of every replica and of the consensus").locator(".js-line").count()
    visit.check()


@pytest.mark.parametrize("num_runs", [1, 3])
def test_page_fits_a_phone(browser: Any, tmp_path: Path, num_runs: int) -> None:
    knobs = [f"transformer.layers.{i}.attention.weight" for i in range(6)]
    runs = [write_sample(tmp_path / ("long" * 20 + str(i)), knobs=knobs) for i in range(num_runs)]
    visit = Visit(browser, written(tmp_path, *runs), viewport={"width": 390, "height": 844})
    visit.draw_all()
    for details in visit.page.locator("details > summary").all():
        if details.is_visible():
            details.click()
    visit.draw_all()
    assert visit.overflow() == 0
    visit.check()


def test_picking_a_knob_shows_its_panel(browser: Any, tmp_path: Path) -> None:
    run = write_sample(tmp_path / "a", knobs=[f"layer{i}" for i in range(12)])
    visit = Visit(browser, written(tmp_path, run))
    assert visit.page.get_by_text("Learning rate: layer0", exact=True).is_visible()
    visit.page.locator("select").select_option("layer7")
    assert visit.plot("Learning rate: layer7").locator(".js-line").count()
    assert not visit.page.get_by_text("Learning rate: layer0", exact=True).is_visible()
    visit.check()


def test_hostile_texts_run_no_script(browser: Any, tmp_path: Path) -> None:
    run = write_hostile(tmp_path / "<img src=x onerror='window.harmed=1'>", knobs=HOSTILE[:4])
    other = write_sample(tmp_path / "<b>b")
    visit = Visit(browser, written(tmp_path, run, other))
    for summary in visit.page.locator("details > summary").all():
        summary.click()
    visit.draw_all()
    assert visit.page.locator("figure a, img, figure b, iframe").count() == 0
    names = visit.plot("Training loss").locator(".legendtext").all_text_contents()
    assert names == ["<img src=x onerror='window.harmed=1'>", "<b>b"]
    plot = visit.page.locator("details.run").first.locator(".plot").nth(1)
    plot.scroll_into_view_if_needed()
    results = visit.point_at(plot, 0.5, 0.5)
    assert "<script>window.harmed = 1</script>" in results
    assert "<b>bold</b>" in results
    assert 'href="javascript:window.harmed=1">link</a>' in results
    visit.check()
