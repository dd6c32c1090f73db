"""A report in a real Chromium: by axe's rules, light and dark, wide and on a phone, without JavaScript too.

The GPUs are made up, and the key that signed the verdicts is thrown away with the test.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, sync_playwright

from imagefactory.extras.site.action import write_report
from imagefactory.extras.site.pages import make_site
from tests.made.report import catalog_report, many_images, with_contents
from tests.made.verdicts import DAY, NOW

CHROMIUM = "/usr/bin/chromium"
# No sandbox: tests run as root. No GPU: there is none. Updates and signing in would ask the network.
FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update")
FLAGS += ("--disable-sync",)
# Axe would fetch style sheets anew, which the page's policy forbids.
OWN_STYLE = {"preload": False}
WIDE, PHONE = (1280, 900), (390, 844)
COUNT = 24


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    report = with_contents(catalog_report(folder, many_images(COUNT)))
    write_report(folder / "site", dict(make_site(report)))
    return folder / "site"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        yield started
        started.close()


@dataclass
class Seen:
    """A page, what it asked for and what it complained of."""

    page: Page
    asked: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


@contextmanager
def opened(
    browser: Browser,
    path: Path,
    size: tuple[int, int] = WIDE,
    scheme: Literal["light", "dark"] = "light",
    **options: Any,
) -> Iterator[Seen]:
    viewport = {"width": size[0], "height": size[1]}
    context = browser.new_context(viewport=viewport, color_scheme=scheme, **options)
    seen = Seen(page=context.new_page())
    seen.page.on("request", lambda request: seen.asked.append(request.url))
    seen.page.on("console", lambda said: seen.errors.append(said.text) if said.type == "error" else None)
    seen.page.on("pageerror", lambda error: seen.errors.append(str(error)))
    try:
        seen.page.goto(path.as_uri())
        yield seen
    finally:
        context.close()


def shown(page: Page) -> int:
    return page.locator("#matrix tbody tr[data-c]:visible").count()


@pytest.mark.parametrize(("scheme", "size"), [("light", WIDE), ("dark", PHONE)], ids=["light", "dark phone"])
@pytest.mark.parametrize("page", ["index.html", "images/pytorch-2.2-cu121.html", "gpus/8.0.html"])
def test_axe_finds_nothing_and_nothing_is_asked_for_outside(
    browser: Browser, site: Path, page: str, scheme: Literal["light", "dark"], size: tuple[int, int]
) -> None:
    with opened(browser, site / page, size, scheme) as seen:
        for details in seen.page.locator("details").all():
            details.evaluate("one => { one.open = true }")
        found = Axe().run(seen.page, options=OWN_STYLE)
        assert found.violations_count == 0, found.generate_report()
        wide = seen.page.evaluate(
            "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        )
        assert wide <= 0, "the page scrolls sideways"
        assert seen.errors == []
        assert [url for url in seen.asked if not url.startswith((site.as_uri(), "data:"))] == []
        assert any(url.endswith("style.css") for url in seen.asked)


def test_axe_would_find_what_is_wrong(browser: Browser, site: Path) -> None:
    """Else finding nothing would say nothing."""
    with opened(browser, site / "index.html") as seen:
        seen.page.evaluate("document.querySelector('main').append(document.createElement('select'))")
        seen.page.evaluate("document.documentElement.removeAttribute('lang')")
        rules = {one["id"] for one in Axe().run(seen.page).response["violations"]}
        assert {"select-name", "html-has-lang"} <= rules


def test_filters_show_what_they_say(browser: Browser, site: Path) -> None:
    with opened(browser, site / "index.html") as seen:
        page = seen.page
        assert shown(page) == COUNT
        page.select_option("[name=framework]", "pytorch")
        assert shown(page) == COUNT // 3
        page.select_option("[name=cuda]", "12.8")
        assert shown(page) == COUNT // 6
        assert page.locator("#shown").text_content() == f"{COUNT // 6} of {COUNT} images"
        page.select_option("[name=gpu]", "8.0")
        assert page.locator("#matrix thead th:visible").count() == 2
        verified = page.locator("#matrix td.v:visible").count()
        page.select_option("[name=outcome]", "v")
        assert shown(page) == verified
        link = page.url
        page.click("button[type=reset]")
        page.wait_for_function(f"document.getElementById('shown').textContent.startsWith('{COUNT} of')")
        assert shown(page) == COUNT
        page.clock.set_fixed_time(NOW)
        page.select_option("[name=age]", "7")
        fresh = shown(page)
        page.select_option("[name=age]", "30")
        assert 0 < fresh < shown(page) == COUNT
        page.clock.set_fixed_time(NOW + 40 * DAY)
        page.select_option("[name=age]", "7")
        assert shown(page) == 0
        assert seen.errors == []
    with opened(browser, Path(link.partition("#")[0].removeprefix("file://"))) as seen:
        seen.page.goto(link)
        seen.page.reload()
        assert shown(seen.page) == verified


def test_without_javascript_there_are_plain_tables(browser: Browser, site: Path) -> None:
    with opened(browser, site / "index.html", java_script_enabled=False) as seen:
        assert shown(seen.page) == COUNT
        assert not seen.page.locator("#filters").is_visible()
        words = seen.page.locator("#matrix td").all_text_contents()
        assert {"verified", "predicted", "not-tested"} <= {word.strip() for word in words}
        seen.page.click("text=pytorch-2.2-cu121")
        assert seen.page.locator("h1").text_content() == "pytorch-2.2-cu121"
        assert not seen.page.locator("button").first.is_visible()


def test_a_command_is_copied(browser: Browser, site: Path) -> None:
    with opened(
        browser, site / "images/pytorch-2.2-cu121.html", permissions=["clipboard-read", "clipboard-write"]
    ) as seen:
        button = seen.page.locator("[data-copy]").first
        button.click()
        seen.page.wait_for_function("document.querySelector('[data-copy]').textContent !== 'Copy'")
        chosen = seen.page.evaluate("getSelection().toString()")
        assert chosen.startswith("docker pull registry.example.org/gpu/pytorch@sha256:")
        assert seen.errors == []


def test_a_script_that_somebody_smuggled_in_would_not_run(
    browser: Browser, site: Path, tmp_path: Path
) -> None:
    """What is escaped is no script; were it one, the page's own policy would still forbid it."""
    text = (site / "index.html").read_text("utf-8")
    (tmp_path / "index.html").write_text(
        text.replace("</main>", "<script>document.title = 'in'</script></main>")
    )
    with opened(browser, tmp_path / "index.html") as seen:
        assert seen.page.title() == "Which image runs on which GPU"
        assert any("Content Security Policy" in error for error in seen.errors)
