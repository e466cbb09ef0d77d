"""A real browser, where there is one."""

import importlib.util
import shutil
from contextlib import contextmanager

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")

needs_browser = pytest.mark.skipif(
    CHROMIUM is None or importlib.util.find_spec("playwright") is None,
    reason="needs Chromium and playwright",
)


@contextmanager
def open_tab(**options):
    """Open a tab; at the end, no script in it may have failed."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as browsers:
        browser = browsers.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"]
        )
        tab = browser.new_page(**options)
        errors = []
        tab.on("pageerror", lambda error: errors.append(error))
        yield tab
        assert errors == []
        browser.close()
