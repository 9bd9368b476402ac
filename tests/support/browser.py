"""A real browser for pages: the Chromium that is installed, or the one that playwright brings."""

import shutil
from contextlib import contextmanager

import pytest


@contextmanager
def chromium():
    """A browser; skips, with the reason, where there is none."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright, of the dev extra")
    installed = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    with sync_api.sync_playwright() as playwright:
        try:
            browser = playwright.chromium.launch(executable_path=installed, args=["--no-sandbox"])
        except sync_api.Error as error:
            pytest.skip(f"no browser here: {str(error).splitlines()[0]}")
        yield browser
        browser.close()


@contextmanager
def opened(browser, path, width, *, dark=False):
    """A page of a file in a window so many pixels wide. It asks for nothing but itself, and its scripts do not fail."""
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme="dark" if dark else "light")
    errors, asked = [], []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(path.as_uri())
    yield page
    page.close()
    assert errors == []
    assert asked == [path.as_uri()]
