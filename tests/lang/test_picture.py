"""A picture is one safe file that shows every call, and it works in a real browser."""

from __future__ import annotations

import itertools
import re
import time
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest

import niwaki as nw
from niwaki.lang.chart import LEFT, RIGHT, WIDTH, chart_of
from niwaki.lang.picture import SHOWN_LIMBS, _folded, picture_of
from niwaki.lang.state import State
from niwaki.lang.tree import Generated, Tree
from niwaki.runtime.engine import Engine
from niwaki.runtime.pictures.picture import LOOK
from tests.runtime.server.browser import browsing, needs_browser

VOID = {"meta", "circle", "line", "path", "rect"}
NASTY = "</script><script>alert(1)</script><img src=x onerror=alert(1)> & \" ' \u2028 {{x}}"


class Reader(HTMLParser):
    """Refuses elements that are not closed in order; collects tags, ids and links."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        self.ids += [value or "" for name, value in attrs if name == "id"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def read(html: str) -> Reader:
    reader = Reader()
    reader.feed(html)
    reader.close()
    assert reader.open == []
    return reader


@nw.function
def answer(s: State, question: str) -> None:
    s += nw.system("Be brief.") + nw.user(question)
    forks = s.fork(3)
    forks += nw.assistant(nw.gen("idea", return_logprob=True))
    forks.join()
    s += nw.assistant(nw.select("best", choices=["yes", "no"]))


def tree_for(question: str = "Really?", idea: str = "an idea") -> Tree:
    answers = itertools.chain([idea] * 3, ["yes"])
    return answer.run(question, backend=nw.ScriptedBackend(lambda prompt: next(answers))).tree()


def large_tree() -> Tree:
    """1,001 limbs and 1,001 calls."""

    @nw.function
    def f(s: State) -> None:
        s += "start"
        for _ in range(10):
            forks = s.fork(100)
            forks += lambda index: f" {index}" + nw.gen("x")
            forks.join()
        s += nw.gen("last")

    return f.run(backend=nw.ScriptedBackend(lambda prompt: "text")).tree()


def test_a_picture_is_one_well_formed_file_that_loads_nothing() -> None:
    html = picture_of([tree_for()]).html
    reader = read(html)
    assert len(reader.ids) == len(set(reader.ids))
    assert not {"link", "img", "iframe", "object", "embed", "base", "form"} & set(reader.tags)
    assert all(value is not None and value.startswith("#") for name, value in reader.attributes if name == "href")
    assert not [name for name, _ in reader.attributes if name in ("src", "srcset", "action") or name.startswith("on")]
    assert not re.search(r"https?:|@import|url\(", html)
    assert "default-src 'none'" in html


def test_every_call_stands_in_the_text_and_in_the_chart_and_has_details() -> None:
    html = picture_of([tree_for()]).html
    reader = read(html)
    calls = re.findall(r'class="call \w+" id="(n\d+)"', html)
    assert len(calls) == 4
    assert sorted(calls) == sorted(re.findall(r'<a href="#(n\d+)"', html))
    assert sorted(calls) == sorted(value or "" for name, value in reader.attributes if name == "data-for")
    for words in ("idea", "best", "log-probability", "prompt computed", "joined", "3 branches", "Be brief."):
        assert words in html


def test_text_of_a_run_cannot_become_markup() -> None:
    plain = read(picture_of([tree_for()]).html)
    nasty = picture_of([tree_for(NASTY, NASTY)]).html
    assert set(read(nasty).tags) == set(plain.tags)
    assert nasty.count("<script>") == 1
    assert "&lt;img src=x onerror=alert(1)&gt;" in nasty


def test_an_error_is_shown_where_it_happened() -> None:
    @nw.function
    def f(s: State) -> None:
        forks = s.fork(2)
        forks += ["ok ", "bad "]
        forks += nw.gen("x")
        forks.join()

    backend = nw.ScriptedBackend({"ok ": "fine", "bad ": nw.CapacityError("the pool <is> full")})
    html = f.run(backend=backend).show().html
    read(html)
    assert html.count("the pool &lt;is&gt; full") == 2  # on the branch, and on the trunk that waited for it
    assert 'class="limb failed"' in html.replace("  ", " ")
    assert "did not end" in html


def test_a_thousand_branches_are_one_quick_page_that_starts_folded() -> None:
    tree = large_tree()
    start = time.thread_time()
    html = picture_of([tree]).html
    assert time.thread_time() - start < 5  # about 0.2 s
    read(html)
    assert html.count('class="call ') == 1001
    assert html.count(f"{100 - SHOWN_LIMBS} more branches") == 10
    assert len(html) < 3_000_000


def test_lanes_are_used_again_after_a_join_and_bars_lie_inside_the_chart() -> None:
    chart = chart_of(large_tree())
    assert chart.height < 700
    assert all(bar.x >= LEFT and bar.x + bar.width <= WIDTH - RIGHT + 3 for bar in chart.bars)
    assert all(bar.y >= 0 and bar.y + bar.height <= chart.height for bar in chart.bars)
    assert 0 < chart.trunk < chart.height


def test_branches_that_grow_at_the_same_time_do_not_lie_on_each_other() -> None:
    @nw.function
    def f(s: State) -> None:
        groups = [s.fork(3) for _ in range(3)]
        for group in groups:
            inner = group[1].fork(2)
            inner += nw.gen("y")
            group += nw.gen("x")

    tree = f.run(backend=nw.ScriptedBackend(lambda prompt: "a b c", threads=4, delay=0.001)).tree()
    chart = chart_of(tree)
    assert len(chart.bars) == 15
    assert len({round(bar.y, 3) for bar in chart.bars}) == 15


def test_times_on_the_axis_are_round_and_in_order() -> None:
    chart = chart_of(tree_for())
    xs = [tick.x for tick in chart.ticks]
    assert xs == sorted(xs)
    assert 3 <= len(xs) <= 11
    assert chart.ticks[0].label == "0"
    assert all(re.fullmatch(r"0|[\d,.]+ (s|ms|µs)", tick.label) for tick in chart.ticks)


def test_show_writes_the_file_and_a_notebook_frames_it(tmp_path: Path) -> None:
    state = answer.run("Why?", backend=nw.ScriptedBackend(["a", "b", "c", "yes"]))
    picture = state.show(tmp_path / "run.html")
    assert (tmp_path / "run.html").read_text("utf-8") == picture.html
    frame = picture._repr_html_()
    assert frame.startswith("<iframe srcdoc=")
    assert "<script" not in frame
    assert 'sandbox="allow-scripts"' in frame
    assert repr(picture) == f"<Picture of {len(picture.html)} characters of HTML; save('run.html') writes it>"


def test_long_text_is_folded_and_whole() -> None:
    words = " ".join(f"word{index}" for index in range(1000))
    html = picture_of([tree_for(words)]).html
    assert "more characters</summary>" in html
    text = re.sub(r"<summary>[^<]*</summary>|<[^>]*>", "", html.partition('class="trunk"')[2])
    assert words in text


def test_what_a_constraint_left_no_choice_about_is_marked(bundled_engine: Engine) -> None:
    @nw.function
    def f(s: State) -> None:
        s += "Fields: name\nJSON: " + nw.gen("x", regex='\\{"name":"[A-Z][a-z]{2}"\\}', temperature=0)

    state = f.run(backend=bundled_engine)
    tree = state.tree()
    html = picture_of([tree]).html
    read(html)
    assert re.search('<i class="forced" title="[a-z ]+">[^<]*&quot;name&quot;:', html)
    totals = tree.totals()
    assert totals.forced > 0 < totals.sampled
    assert (state.usage.forced_tokens, state.usage.generated_tokens) == (totals.forced, totals.forced + totals.sampled)
    assert state.usage.seconds > 0
    assert f"forced by a constraint <b>{totals.forced}</b>" in html


def test_details_say_step_by_step_how_many_tokens_a_constraint_allowed(bundled_engine: Engine) -> None:
    @nw.function
    def f(s: State) -> None:
        s += "JSON: " + nw.gen("x", regex='\\{"name":"[A-Z][a-z]{2}"\\}', temperature=0, return_logprob=True)
        s += " and " + nw.gen("y", max_new_tokens=3, ignore_eos=True, temperature=0, return_logprob=True)

    tree = f.run(backend=bundled_engine).tree()
    first, second = (item for item in tree.trunk.items if isinstance(item, Generated))
    html = picture_of([tree]).html
    read(html)
    shown = re.findall(r"<span([^>]*)>([^<]*)<sub>([0-9,]+)</sub>", html)
    assert [unescape(text) for _, text, _ in shown] == [one.text for one in first.logprobs]
    assert [int(count.replace(",", "")) for _, _, count in shown] == list(first.allowed)
    assert all(("no choice" in tag) == (count == "1") for tag, _, count in shown)
    assert 1 in first.allowed
    assert max(count or 0 for count in first.allowed) > 1
    assert second.allowed == ()


def test_marks_keep_the_text_as_it_is_where_it_is_folded_too() -> None:
    text = "\n\n" + "".join(f"<{number}>" for number in range(400))
    html = _folded(
        text, [(0, 3, "forced"), (5, 9, "drafted"), (440, 460, "forced"), (len(text) - 5, len(text) + 3, "forced")]
    )
    assert len(re.findall(r"<i class=\"(forced|drafted)\"", html)) == 5  # the third lies on both sides of the fold
    assert unescape(re.sub(r'<summary>[^<]*</summary>|<span class="sign">[^<]*</span>|<[^>]*>', "", html)) == text


def contrast(first: str, second: str) -> float:
    """WCAG 2's contrast of two colours like #1a2b3c."""

    def luminance(color: str) -> float:
        parts = [int(color[index : index + 2], 16) / 255 for index in (1, 3, 5)]
        red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    high, low = sorted((luminance(first), luminance(second)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_keeps_its_contrast_in_both_schemes(scheme: str) -> None:
    light, dark = (block for block in re.findall(r":root \{(.*?)\}", LOOK, re.DOTALL))
    colors = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", light if scheme == "light" else dark))
    backgrounds = ["paper", "card", *(name for name in colors if name.endswith("-t"))]
    assert len(backgrounds) == 9
    for background in backgrounds:
        assert contrast(colors["ink"], colors[background]) >= 7, background
        assert contrast(colors["soft"], colors[background]) >= 4.5, background
    for name in ("sampled", "selected", "failed"):  # labels on bars; large enough to be bold, small enough to need care
        assert contrast(colors["on"], colors[name]) >= 4.0, name
    for name in ("cached", "prefilled", "sampled", "forced", "selected", "failed", "wood"):  # marks
        assert contrast(colors[name], colors["card"]) >= 2.7, name


@needs_browser
def test_a_browser_opens_it_without_a_complaint_and_shows_details_on_focus(tmp_path: Path) -> None:
    page = tmp_path / "run.html"
    page.write_text(picture_of([tree_for()]).html, "utf-8")
    with browsing(tmp_path) as browser:
        browser.open(page.as_uri())
        assert browser.run("return document.getElementById('tip').hidden")
        browser.run("document.getElementById('n0').focus()")  # as a reader's Tab key does
        browser.wait("!document.getElementById('tip').hidden")
        (told,) = browser.texts("#tip")
        assert "log-probability" in told
        assert browser.run("return document.getElementById('n0').getAttribute('aria-describedby')") == "tip"
        assert not browser.run("return document.querySelector('.tools').hidden")
        browser.be_phone()
        browser.open(page.as_uri())
        assert browser.run(f"return Math.min(...{HEIGHTS}) >= 11"), "letters that can be read; the chart scrolls"
        assert browser.run("return document.documentElement.scrollWidth") == 390
        assert browser.complaints() == []


@needs_browser
def test_a_thousand_calls_are_readable_and_tell_their_details_under_the_pointer(tmp_path: Path) -> None:
    page = tmp_path / "run.html"
    page.write_text(picture_of([large_tree()]).html, "utf-8")
    papers = set()
    with browsing(tmp_path) as browser:
        for scheme in ("light", "dark"):
            browser.prefer(scheme)
            browser.open(page.as_uri())
            papers.add(browser.run("return getComputedStyle(document.body).backgroundColor"))
            for spot in (".bar:nth-of-type(300)", ".call"):
                browser.hover(spot)
                browser.wait("!document.getElementById('tip').hidden")
                (told,) = browser.texts("#tip")
                assert re.search(r"gentime.*prompt2 tokens: . cached.*linetest_picture.py:\d+: forks \+=", told)
                assert browser.run(IS_SEEN, spot), "all of it, and beside what it is about"
                browser.hover("h1")
                browser.wait("document.getElementById('tip').hidden")
            browser.click("[data-open='1']")
            assert browser.run("return document.querySelectorAll('.limb .call').length") == 1000
            assert browser.run(OVERLAPS) == 0
            assert browser.run("return document.documentElement.scrollWidth <= innerWidth")
        assert browser.complaints() == []
    assert len(papers) == 2


HEIGHTS = "[...document.querySelectorAll('.chart text')].map((one) => one.getBoundingClientRect().height)"
IS_SEEN = """
const tip = document.getElementById("tip").getBoundingClientRect();
const spot = document.querySelector(arguments[0]).getBoundingClientRect();
return tip.left >= 0 && tip.right <= innerWidth && tip.top >= 0 && tip.bottom <= innerHeight
  && (spot.bottom < tip.top || tip.bottom < spot.top);
"""
OVERLAPS = """
const boxes = [...document.querySelectorAll(".limb")].map((limb) => limb.getBoundingClientRect());
return boxes.filter((box, at) => at > 0 && box.top < boxes[at - 1].bottom && box.left < boxes[at - 1].right).length;
"""
