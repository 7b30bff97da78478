"""A browser for each file of tests, and a tab for each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.view.browser import Browser, Tab, chromium


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as running:
        yield running


@pytest.fixture
def tab(browser: Browser) -> Iterator[Tab]:
    """A tab; whatever a test does, the page must have stayed silent, and asked for nothing but
    itself.
    """
    opened = browser.tab()
    yield opened
    opened.js("new Promise(r => setTimeout(r, 30))")
    assert opened.errors == []
    assert all(url.startswith(("file://", "blob:", "data:")) for url in opened.requests)
    assert len({url.partition("#")[0] for url in opened.requests if url.startswith("file:")}) <= 1
    opened.close()
