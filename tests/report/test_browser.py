"""The page in a browser, without a network."""

import os
import re
import shutil

import pytest
from report_runs import compared_run, figures_of, normalized, three_runs

import kmp
from kmp import report

LONG = "encoder/" + "block_with_a_very_long_layer_name_in_it_" * 3 + "/kernel"


@pytest.fixture(scope="module")
def browser():
    program = shutil.which("chromium")
    if program is None:
        without_browser = pytest.fail if os.environ.get("CI") else pytest.skip
        without_browser("Chromium is not installed. Try: apt-get install chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield chromium
        chromium.close()


def make_long_run():
    names, model = (LONG, LONG + "_2"), "<script>alert('x')</script>" + "model" * 30
    return compared_run(names, names=names, skipped=60, model=model)


PAGES = {"long": lambda: {"a_run_of_a_long_name_" * 6: make_long_run()}, "three": three_runs}
SCREENS = {"phone": ((360, 740), "dark"), "desk": ((1280, 800), "light")}


# Elements that extend beyond their card, except in a scrollable box.
OVERFLOWING_ELEMENTS = """() => [...document.querySelectorAll('.card')].flatMap(card => {
  const box = card.getBoundingClientRect();
  return [...card.querySelectorAll('*')].filter(element => {
    const inner = element.getBoundingClientRect();
    const overflows = inner.right > box.right + 1 || inner.left < box.left - 1;
    return inner.width && overflows && !element.parentElement.closest('.scroll');
  }).map(element => element.outerHTML.slice(0, 200));
})"""


SHOWN_DETAILS = """[...document.querySelectorAll('details')].every(
  details => details.scrollHeight > details.querySelector('summary').offsetHeight + 20
)"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "screen"), [("long", "phone"), ("three", "phone"), ("three", "desk")]
)
def test_page_is_readable_in_a_browser_without_network(browser, tmp_path, name, screen):
    runs, (size, scheme) = PAGES[name](), SCREENS[screen]
    path = report.write(runs, tmp_path / "report.html")
    requests, errors = [], []
    context = browser.new_context(
        viewport={"width": size[0], "height": size[1]}, color_scheme=scheme
    )
    context.set_offline(True)
    page = context.new_page()
    page.on("request", lambda request: requests.append(request.url))
    page.on("console", lambda message: errors.append(message.text))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("dialog", lambda dialog: errors.append(dialog.message))
    page.goto(path.as_uri())
    text = normalized(page.inner_text("body"))
    if os.environ.get("KMP_SCREENSHOTS"):
        page.screenshot(path=f"{os.environ['KMP_SCREENSHOTS']}/{name}-{screen}.png", full_page=True)
    for run_name, run in runs.items():
        advice = kmp.advise(run)
        for part in (run_name, advice.verdict, *(finding.evidence for finding in advice)):
            assert normalized(part) in text
    assert page.evaluate(
        "document.documentElement.scrollWidth <= document.documentElement.clientWidth"
    )
    assert page.evaluate(OVERFLOWING_ELEMENTS) == []
    if screen == "phone":  # nothing is hidden by a scroll bar
        page.evaluate(
            "document.querySelectorAll('details').forEach(details => details.open = true)"
        )
        assert page.evaluate(
            "[...document.querySelectorAll('.scroll')].every(e => e.scrollWidth <= e.clientWidth)"
        )
    images = page.evaluate(
        "[...document.images].map(i => [i.complete, i.naturalWidth > 0, i.alt.length > 0])"
    )
    figures = [figure for run in runs.values() for figure in figures_of(run).values()]
    assert len(images) == len([figure for figure in figures if figure.source])
    assert all(all(image) for image in images)
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    brightness = sum(map(int, re.findall(r"\d+", background)[:3])) / 3
    assert (brightness < 60) if scheme == "dark" else (brightness > 200)
    page.emulate_media(media="print")  # what is folded is printed
    assert page.evaluate(SHOWN_DETAILS)
    assert errors == []
    assert [url for url in requests if not url.startswith(("file:", "data:"))] == []
    context.close()
