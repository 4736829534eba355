"""The report's page in a browser: sorted, filtered, a run opened, a table downloaded, on a phone, by keyboard.

`make test-page` runs these; they need Chromium and nothing else.
"""

import re
from dataclasses import replace

import pytest
from chromium import Page
from made_sets import HOSTILE, hostile, made, run

from thinpipe.harness import condense
from thinpipe.harness.report import page as pages
from thinpipe.harness.report.pictures import Picture
from thinpipe.harness.report.svg import inline

pytestmark = pytest.mark.chromium

FIGURE = (
    '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" viewBox="0 0 600 300"><defs>'
    '<clipPath id="c"><rect width="600" height="300"/></clipPath></defs><g clip-path="url(#c)">'
    '<path d="M 0 0 L 600.123456 300" style="stroke: #000000"/></g><script>window.hacked=1</script></svg>'
)
COLUMN = "[...document.querySelectorAll('.runs tbody tr')].map((row) => row.cells[{}].textContent)"


def written(folder, *sets):
    shown = [
        pages.Shown(found, [Picture(f"figure {HOSTILE}", HOSTILE, inline(FIGURE, f"e{n}g0"))], {HOSTILE: HOSTILE})
        for n, found in enumerate(sets)
    ]
    path = folder / "page.html"
    path.write_text(pages.html_of(shown, "today"), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def browser():
    with Page() as page:
        yield page


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return written(tmp_path_factory.mktemp("page"), hostile(), replace(hostile(), name="other"))


@pytest.fixture
def page(browser, file):
    browser.errors.clear()
    browser.size(1280, 900)
    browser.open(file)
    browser.js("document.querySelector('[data-runs]').scrollIntoView()")
    browser.wait("document.querySelectorAll('[data-runs=e0] tbody tr').length === 4")
    yield browser
    assert browser.errors == []
    assert browser.js("window.hacked === undefined")


def place(page, name):
    heads = page.js("[...document.querySelectorAll('[data-runs=e0] thead th')].map((head) => head.textContent)")
    return next(number for number, text in enumerate(heads) if text.startswith(name))


def test_runs_are_sorted_by_click_and_by_key(page):
    column = place(page, "step_time_s")
    head = f"[data-runs=e0] thead th:nth-child({column + 1})"
    values = f"[...document.querySelectorAll('[data-runs=e0] tbody tr')].map((row) => row.cells[{column}].textContent)"
    page.click(f"{head} button")
    assert [float(text) for text in page.js(values)] == [1e-05, 0.125, 0.25, 10.0]
    assert page.js(f"document.querySelector('{head}').getAttribute('aria-sort')") == "ascending"
    page.press("Enter")
    assert [float(text) for text in page.js(values)] == [10.0, 0.25, 0.125, 1e-05]
    assert page.js("document.querySelectorAll('[data-runs=e0] [aria-sort=descending]').length") == 1


def test_runs_are_filtered_by_words_and_by_column(page):
    shown = "document.querySelectorAll('[data-runs=e0] tbody tr').length"
    page.js("document.querySelector('#e0-filter').focus()")
    page.type("cpu-bound")
    assert page.js(shown) == 1
    assert page.js("document.querySelector('[data-runs=e0] output').textContent") == "1 of 4 runs"
    page.js("document.querySelector('#e0-filter').value = ''")
    page.type("seed=3")
    assert page.js(shown) == 1
    page.type(" seed=2")
    assert page.js(shown) == 0


def test_a_run_is_opened_and_closed_by_key(page):
    page.js("document.querySelector('[data-runs=e0] tbody tr:nth-child(3) button').focus()")
    page.press("Enter")
    page.wait("document.getElementById('run').open")
    text = page.js("document.getElementById('run').textContent")
    assert "cpu-bound" in text
    assert f"fidelity_reason {HOSTILE}" in text
    assert "task.corpus" in text
    assert "Set 30.0 Mbit/s; worst link measured 29.7 Mbit/s" in text.replace("30 Mbit/s", "30.0 Mbit/s")
    assert f"no: {HOSTILE}" in text
    assert "c" * 40 in text
    page.press("Escape")
    page.wait("!document.getElementById('run').open")
    assert page.js("document.activeElement.closest('tr').rowIndex") == 3


def test_a_row_is_opened_by_a_click(page):
    page.click("[data-runs=e0] tbody tr:nth-child(2) td:nth-child(3)")
    page.wait("document.getElementById('run').open")
    assert "seed 1" in page.js("document.getElementById('run-title').textContent")


def test_a_table_is_downloaded_as_it_is(page, tmp_path):
    page.call("Page.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
    page.click('button[data-blob="e0-runs"]')
    expected = condense.to_csv(hostile().tables["runs"], "runs")
    for _ in range(100):
        page.js("new Promise((done) => setTimeout(done, 50))")
        files = [path for path in tmp_path.iterdir() if path.suffix == ".csv"]
        if files and files[0].stat().st_size >= len(expected.encode()):
            break
    (found,) = files
    assert re.fullmatch(r"[\w.-]+\.runs\.csv", found.name)
    assert found.read_bytes() == expected.encode()


def test_figures_are_drawn_and_no_two_elements_share_an_id(page):
    page.js("dispatchEvent(new Event('beforeprint'))")
    page.wait("document.querySelectorAll('figure svg').length === 2")
    ids = page.js("[...document.querySelectorAll('[id]')].map((element) => element.id)")
    assert len(ids) == len(set(ids))
    assert page.js("document.querySelectorAll('figure script').length") == 0
    assert page.js("getComputedStyle(document.querySelector('figure svg path')).stroke") == "rgb(0, 0, 0)"


@pytest.mark.parametrize("width", [360, 768])
def test_a_narrow_window_is_not_overflowed(page, width):
    page.size(width, 740, phone=width == 360)
    page.js("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    page.js("dispatchEvent(new Event('beforeprint'))")
    page.wait("document.querySelectorAll('figure svg').length === 2")
    assert page.js("document.documentElement.scrollWidth") <= width
    page.click("[data-runs=e0] tbody tr:nth-child(2) button")
    page.wait("document.getElementById('run').open")
    page.js("document.querySelectorAll('dialog details').forEach((one) => { one.open = true; })")
    assert page.js("document.getElementById('run').scrollWidth <= document.getElementById('run').clientWidth")
    assert page.js("document.documentElement.scrollWidth") <= width


def test_the_first_tab_skips_to_the_results(page):
    page.js("scrollTo(0, 0)")
    page.press("Tab")
    assert page.js("document.activeElement.className") == "skip"
    assert page.js("document.activeElement.getBoundingClientRect().left") >= 0
    page.press("Enter")
    assert page.js("location.hash") == "#results"


def test_claims_are_counted_sorted_and_chosen_by_state(page):
    rows = "[...document.querySelectorAll('#overview tbody tr')]"
    assert page.js(f"{rows}.length") == 6
    page.click("button[data-state=fails]")
    assert page.js(f"{rows}.filter((row) => !row.hidden).map((row) => row.dataset.state)") == ["fails", "fails"]
    page.click("button[data-state=fails]")
    page.click("#overview thead th:nth-child(1) button")
    assert page.js(f"{rows}.map((row) => row.dataset.state)") == [
        s for s in ("fails", "undecided", "holds") for _ in "ab"
    ]


def test_every_text_is_shown_as_it_is(page):
    assert page.js("document.querySelectorAll('img, iframe, object, embed, link, base').length") == 0
    assert HOSTILE in page.js("document.querySelector('#e0-claim-0').textContent")
    assert f"made {HOSTILE}" in page.js("document.querySelector('#overview').textContent")
    assert page.js("[...document.querySelectorAll('figcaption')].every((one) => one.textContent.includes('名'))")


def test_columns_can_be_chosen(page):
    names = "[...document.querySelectorAll('[data-runs=e0] thead th')].map((head) => head.textContent)"
    assert not any("error" in name for name in page.js(names))
    page.js("document.querySelector('[data-runs=e0] details').open = true")
    page.js("[...document.querySelectorAll('[data-runs=e0] label')].find((l) => l.textContent === ' error').click()")
    assert any(name == "error" for name in page.js(names))


def test_two_thousand_runs_stay_quick(browser, tmp_path):
    browser.errors.clear()
    browser.size(1280, 900)
    browser.open(written(tmp_path, made([run(n, seed=n, step_time_s=float(-n)) for n in range(2000)])))
    browser.js("document.querySelector('[data-runs]').scrollIntoView()")
    browser.wait("document.querySelectorAll('.runs tbody tr').length > 0")
    drawn = "document.querySelectorAll('.runs tbody tr').length"
    assert browser.js(drawn) <= 300
    column = place(browser, "step_time_s") + 1
    head = f"document.querySelector('.runs thead th:nth-child({column}) button')"
    took = browser.js(f"(() => {{ const at = performance.now(); {head}.click(); return performance.now() - at; }})()")
    assert took < 2000, "milliseconds"
    assert float(browser.js(COLUMN.format(column - 1))[0]) == -1999
    assert browser.errors == []
