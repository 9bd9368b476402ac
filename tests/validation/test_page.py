"""The page of a validation, opened in a browser, on a phone and on a wide screen: what it says first, and that it is readable.

`--basetemp FOLDER` keeps its screenshots.
"""

import math
import re
import shutil
from contextlib import contextmanager
from dataclasses import replace

import pytest
from small_models import SMALL, random_tokens, resize_config, small_model
from validation_reports import validation_report

from haarkv.executors.reference import ReferenceExecutor
from haarkv.validation.faults.base import reordered_sum_ops
from haarkv.validation.faults.layer import published_faults
from haarkv.validation.layers.page import About, page

CONFIG = resize_config(SMALL, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=64)
MODEL = small_model(CONFIG)
ABOUT = About(
    model="/models/a-folder-with-a-very-long-name-of-which-nothing-can-be-broken-anywhere/Qwen3-0.6B",
    command="tq validate --model /models/a-folder-with-a-very-long-name-of-which-nothing-can-be-broken-anywhere --html a.html",
    prompts=["def main(argv):\n    return " + "x" * 150, "class Spam:"],
    versions={"haarkv": "1.2", "torch": "9", "commit": "0123456789abcdef" * 3},
    machine={"cpu": "A CPU of some name @ 2.70GHz", "threads": "1"},
    date="2026-11-22 10:00 UTC",
)  # fmt: skip
TABLES = {
    "passed": reordered_sum_ops(),
    "equal": ReferenceExecutor(MODEL).ops,
    "failed": next(fault for fault in published_faults(MODEL, 1) if fault.name == "zero output").table(),
    "nan": next(fault for fault in published_faults(MODEL, 1) if fault.name == "one NaN").table(),
}


def report_with(table):
    prompts = [random_tokens(CONFIG, 9), random_tokens(CONFIG, 4, seed=1)]
    return validation_report(ReferenceExecutor(MODEL, table), MODEL, prompts)


@pytest.fixture(scope="module")
def browser():
    """The Chromium that is installed, or the one that playwright brings."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright, of the dev extra")
    chromium_path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    with sync_api.sync_playwright() as playwright:
        try:
            chromium = playwright.chromium.launch(executable_path=chromium_path, args=["--no-sandbox"])
        except sync_api.Error as error:
            pytest.skip(f"no browser here: {str(error).splitlines()[0]}")
        yield chromium
        chromium.close()


@contextmanager
def open_page(browser, path, width, *, dark=False):
    """A file as a page, in a window of this width in pixels. It loads nothing but itself."""
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme="dark" if dark else "light")
    errors, requests = [], []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("request", lambda request: requests.append(request.url))
    page.goto(path.as_uri())
    yield page
    page.close()
    assert errors == []
    assert requests == [path.as_uri()]


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """A page of each kind, as a file."""
    folder = tmp_path_factory.mktemp("pages")
    for name, table in TABLES.items():
        named_report = replace(report_with(table), candidate="an-executor-of-a-long-name")
        (folder / f"{name}.html").write_text(page(named_report, ABOUT), encoding="utf-8")
    return folder


_OUTSIDE = """() => [...document.querySelectorAll("figure > svg text")].filter(text => {
    const words = text.getBoundingClientRect(), chart = text.closest("svg").getBoundingClientRect();
    return words.height < 9 || words.left < chart.left || words.right > chart.right || words.bottom > chart.bottom;
}).map(text => text.textContent)"""


@pytest.mark.parametrize("width", [400, 1400])
@pytest.mark.parametrize("name", TABLES)
def test_nothing_overflows_and_the_verdict_is_first(browser, pages, name, width):
    with open_page(browser, pages / f"{name}.html", width, dark=name == "failed") as view:
        view.screenshot(path=pages / f"{name}-{width}.png", full_page=True)
        assert view.evaluate("document.documentElement.scrollWidth") <= width
        words = view.inner_text("body")
        lines = [line for line in words.splitlines() if line.strip()]
        assert lines[0].endswith("passed" if name in ("passed", "equal") else "failed")
        first = {
            "passed": "No fault. First difference: layer 0, ", "equal": "No fault: every bit is equal.",
            "failed": "First fault: layer 1, paged_attention: fault", "nan": "First fault: layer 1, paged_attention: fault",
        }[name]  # fmt: skip
        assert lines[1].startswith(first)
        assert words.index(first) < words.index("Not exercised") < words.index("What was run") < words.index("By layer")
        for fact in (
            "an-executor-of-a-long-name, compared with reference",
            "A CPU of some name",
            "a second chunk of a prompt",
        ):
            assert fact in words
        # What is written in a chart can be read, and no part of it is cut off.
        assert view.evaluate(_OUTSIDE) == []
        assert view.locator("figure p").inner_text().startswith("The worst figure of each layer")


def test_the_tensors_nearest_to_a_fault_stand_first(pages):
    text = (pages / "failed.html").read_text(encoding="utf-8")
    _, table, _ = re.split("<h2>Tensors.*|<h2>Logits.*", text)
    rows = [re.findall("<td[^>]*>(.*?)</td>", row) for row in table.split("<tr")[2:]]
    assert sorted(row[0] for row in rows[:2]) == ["attention_mlp", "paged_attention"]
    assert [row[2] for row in rows[:3]] == ["fault", "fault", "equal"]
    assert {row[1] for row in rows} == {"0", "1", "–"}
    share_labels = [row[3].rpartition("</span> ")[2] for row in rows]
    shares = [math.inf if words == "beyond it" else float(words.removesuffix(" %")) for words in share_labels]
    assert shares == sorted(shares, reverse=True)


def test_the_page_stands_alone_escapes_what_it_shows_and_cuts_long_prompts():
    hostile = replace(ABOUT, command="tq '<script>", prompts=["<script>", "x" * 5000])
    named_report = replace(report_with(reordered_sum_ops()), candidate="<script>alert(1)</script>")
    text = page(named_report, hostile)
    assert text == page(named_report, hostile)
    assert "<script>alert" not in text
    assert text.count("<script") == 0
    assert "&lt;script&gt;" in text
    assert not [word for word in ("http", "src=", "@import", "url(") if word in text]
    assert text.count("<polyline") == 2
    assert "prefers-color-scheme: dark" in text
    assert "x" * 200 + "…" in text
    assert "x" * 201 not in text
