"""A headless Chromium, where one is installed."""

import pytest

from report import chromium
from undrift.report.page import write_page


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    program = chromium.find()
    if program is None:
        pytest.skip("no Chromium is installed")
    started = chromium.Chromium(program, tmp_path_factory.mktemp("browser"))
    yield started
    started.close()


@pytest.fixture
def visit(browser, tmp_path):
    """Opens a page, and afterwards checks that nothing was complained about or asked for."""
    tabs = []

    def open_page(made, **settings):
        tabs.append(browser.open(write_page(tmp_path / "report.html", made), **settings))
        return tabs[-1]

    yield open_page
    for tab in tabs:
        assert tab.complaints() == []
        assert [u for u in tab.requests() if not u.startswith("data:")] == [
            (tmp_path / "report.html").as_uri()
        ]
        tab.close()
