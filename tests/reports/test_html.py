"""The HTML report in a real browser, at the width of a laptop and of a phone."""

import dataclasses
import json
import re

import pytest

from metapeak.reports.html_report import module_tree, render_html
from metapeak.reports.sizes import gib
from tests.reports.browser import chromium, show, wait_for
from tests.reports.conftest import trace_llama


@pytest.fixture(scope="module")
def page():
    with chromium() as page:
        yield page


@pytest.fixture(scope="module")
def report(two_ranks, tmp_path_factory):
    path = tmp_path_factory.mktemp("html") / "report.html"
    path.write_text(render_html(two_ranks), encoding="utf-8")
    return path


def hover(page, x, y):
    page.execute_cdp_cmd("Input.dispatchMouseEvent", {"type": "mouseMoved", "x": x - 3, "y": y - 3})
    page.execute_cdp_cmd("Input.dispatchMouseEvent", {"type": "mouseMoved", "x": x, "y": y})


def centre(page, selector):
    box = page.execute_script(
        "const e = document.querySelector(arguments[0]); e.scrollIntoView({block: 'center'});"
        "const b = e.getBoundingClientRect(); return [b.x + b.width / 2, b.y + b.height / 2]",
        selector,
    )
    return box


LABEL = "return [...document.querySelectorAll('.hoverlayer .hovertext')].map(e => e.textContent).join(' ')"


@pytest.mark.parametrize("width", [1280, 390])
def test_no_errors_no_network_and_everything_is_on_the_page(page, report, two_ranks, width):
    page.get_log("performance")
    show(page, report, width=width)
    assert page.get_log("browser") == []
    requests = [json.loads(entry["message"])["message"] for entry in page.get_log("performance")]
    urls = [r["params"]["request"]["url"] for r in requests if r["method"] == "Network.requestWillBeSent"]
    assert report.as_uri() in urls  # what is asked for is seen
    assert [url for url in urls if not url.startswith(("file:", "data:", "blob:"))] == []
    assert page.execute_script("return document.documentElement.scrollWidth") <= width  # nothing sticks out
    text = page.execute_script("return document.body.innerText")
    worst = two_ranks.worst
    charts = page.execute_script("return document.getElementById('timeline').textContent")
    assert f"peak {gib(worst.requested_bytes)} GiB" in charts
    assert "operations in running order (not time)" in charts and "live bytes, GiB" in charts
    ranks = page.execute_script("return [...document.querySelectorAll('#ranks tbody tr')].map(r => r.innerText)")
    assert "rank 0 (3 alike; pp 0)" in ranks[0] and "rank 3 (3 alike; pp 1)" in ranks[1]
    assert f"{gib(worst.requested_bytes)}" in ranks[1]
    for words in (
        "Does not fit", "Phases", "backward (peak)", "Between steps", "Largest alive at the peak", "lm_head", "Options",
        "weights_dtype", "config torch_dtype", "Assumed", "Not modelled", *two_ranks.how.not_modelled,
    ):  # fmt: skip
        assert words in text, words


@pytest.mark.parametrize("width", [1280, 390])
def test_the_peak_label_lists_its_tensors_on_hover(page, report, two_ranks, width):
    show(page, report, width=width)
    hover(page, *centre(page, "#timeline .annotation[data-index='0'] rect"))
    label = wait_for(page, LABEL)
    assert "Peak" in label and gib(two_ranks.worst.requested_bytes) in label
    for tensor in two_ranks.worst.largest(3):
        assert (tensor.module or tensor.source_line or "(the model itself)")[-20:] in label


def test_hovering_over_the_curve_says_where_one_is(page, report, two_ranks):
    show(page, report, width=1280)
    x, y = centre(page, "#timeline .nsewdrag")
    hover(page, x, y)
    label = wait_for(page, LABEL)
    assert re.search(r"[\d.]+ GiB live, (forward|backward|optimizer) [12]", label)
    assert "aten." in label


def test_another_rank_can_be_chosen(page, report, two_ranks):
    show(page, report, width=1280)
    page.execute_script(
        "const s = document.getElementById('rank'); s.value = 'timeline-1'; s.dispatchEvent(new Event('change'))"
    )
    small = next(rank for rank in two_ranks.ranks if rank is not two_ranks.worst)
    charts = page.execute_script("return document.getElementById('timeline').textContent")
    assert f"peak {gib(small.requested_bytes)} GiB" in charts
    assert page.get_log("browser") == []


def test_modules_unfold(page, report):
    show(page, report, width=1280)
    visible = (
        "return [...document.querySelectorAll('.tree .name')].some("
        "  e => e.textContent == 'self_attn' && e.checkVisibility())"
    )
    assert page.execute_script(visible) is False
    for name in ("model", "layers", "0"):
        page.execute_script(
            "const d = [...document.querySelectorAll('.tree details')].find("
            "  d => d.querySelector('.name').textContent == arguments[0]);"
            "if (!d.open) d.querySelector('summary').click()",
            name,
        )
    assert page.execute_script(visible) is True


@pytest.mark.parametrize("dark", [False, True])
def test_text_can_be_read_on_its_background(page, report, dark):
    """Contrast of at least 4.5 to 1 for text (WCAG 2 AA), in the page and in the charts."""
    show(page, report, width=1280, dark=dark)
    colours = page.execute_script(
        "return [getComputedStyle(document.body).backgroundColor,"
        " ...['body', '.subtitle', '.verdict strong', '.note', 'th'].map("
        "   s => getComputedStyle(document.querySelector(s)).color),"
        " getComputedStyle(document.querySelector('#timeline .xtick text')).fill,"
        " getComputedStyle(document.querySelector('#timeline .legendtext')).fill]"
    )
    background, *texts = [luminance(*map(int, re.findall(r"\d+", colour)[:3])) for colour in colours]
    assert (background < 0.5) is dark
    for text in texts:
        low, high = sorted((text, background))
        assert (high + 0.05) / (low + 0.05) >= 4.5


def luminance(*rgb):
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in (v / 255 for v in rgb)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_charts_have_a_text_for_those_who_do_not_see_them(report):
    text = report.read_text(encoding="utf-8")
    for chart in re.findall(r'<div class="chart[^>]*>', text):
        assert 'role="img"' in chart and ("aria-label" in chart or "aria-describedby" in chart)
    assert '<html lang="en">' in text


def test_names_are_escaped_wherever_they_appear(traced):
    evil = "</script><script>alert(1)</script>"
    rank = traced.worst
    names = [evil if name == "lm_head" else name for name in rank.liveness.module_names]
    liveness = dataclasses.replace(rank.liveness, module_names=names)
    simulation = dataclasses.replace(
        traced,
        model=dataclasses.replace(traced.model, id=evil),
        ranks=(dataclasses.replace(rank, liveness=liveness),),
    )
    assert evil not in render_html(simulation)


def test_the_module_tree_adds_up(traced):
    root, left_out = module_tree(traced.worst)
    assert root.nbytes == traced.worst.requested_bytes and left_out == 0

    def check(node):
        for child in node.children.values():
            check(child)
        assert node.nbytes >= sum(child.nbytes for child in node.children.values())

    check(root)
    assert list(root.children["model"].children["layers"].children) == ["0", "1", "2", "3"]


def test_a_report_of_32_layers_stays_under_6_mb(tmp_path):
    size = len(render_html(trace_llama(tmp_path, 32)).encode())
    assert 4_000_000 < size < 6_000_000
    many = trace_llama(tmp_path, 1)
    (rank,) = many.ranks
    ranks = tuple(dataclasses.replace(rank, rank=number, coordinates={"pp": number}) for number in range(64))
    assert len(render_html(dataclasses.replace(many, ranks=ranks)).encode()) < 6_000_000
