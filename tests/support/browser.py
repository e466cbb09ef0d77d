"""A real browser, where there is one."""

import shutil
from contextlib import contextmanager

import pytest

try:
    from playwright.sync_api import expect, sync_playwright
except ImportError:  # what needs it is skipped
    expect = None

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")

needs_browser = pytest.mark.skipif(
    CHROMIUM is None or expect is None,
    reason="needs Chromium and playwright",
)


@contextmanager
def open_tab(**options):
    """Open a tab; at the end, no script in it may have failed."""
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
