"""How the page at / looks in a real browser, whatever stands on it: nothing is cut off, and code is code."""

from __future__ import annotations

from pathlib import Path

import httpx2

from tests.runtime.server.browser import Browser, needs_browser
from tests.runtime.server.test_page import CURSORS, ENTER, said

CODE = "Here:\n\n```python\nif a:\n    b = '" + "long" * 60 + "'\n```\nThat is `all`.\n~~~\n``` is no end\n~~~"


def opened(page: Browser, *answers: str) -> None:
    """A session in which these were answered."""
    turns = [({"role": "user", "content": "Say it."}, {"role": "assistant", "content": text}) for text in answers]
    body = {"title": "made", "messages": [message for turn in turns for message in turn]}
    url = str(page.run("return location.href"))
    session = httpx2.post(f"{url}v1/sessions", json=body).json()["id"]
    page.run("location.reload()")
    page.wait("document.querySelector(`[data-session=${arguments[0]}]`)", session)
    page.run("document.querySelector(`[data-session=${arguments[0]}]`).click()", session)
    page.wait("document.querySelectorAll('.said').length === arguments[0]", 2 * len(answers))


@needs_browser
def test_a_long_conversation_scrolls_by_itself_and_the_page_does_not(page: Browser) -> None:
    opened(page, *["long " * 100] * 20)
    assert page.run("return document.documentElement.scrollHeight <= innerHeight") is True
    page.be_phone()
    try:
        ends = "return document.documentElement.scrollHeight - document.querySelector('main').scrollHeight"
        below = page.run(ends)
        assert isinstance(below, int)
        assert below < 100, "nothing stands below the page"
        assert page.run("return document.documentElement.scrollWidth") == 390
    finally:
        page.be_window()


@needs_browser
def test_what_stands_between_fences_is_shown_as_code(page: Browser) -> None:
    opened(page, CODE)
    code = page.texts(".assistant pre code")
    assert code == ["if a:\n    b = '" + "long" * 60 + "'", "``` is no end"]
    assert page.texts(".assistant .body") == ["Here:\n" + code[0] + "That is `all`." + code[1]]
    named = page.run("return [...document.querySelectorAll('pre')].map((one) => one.getAttribute('aria-label'))")
    assert named == ["Code: python", "Code"]
    looks = "const look = getComputedStyle(document.querySelector('pre')); return [look.fontFamily, look.whiteSpace]"
    assert page.run(looks) == ['ui-monospace, "DejaVu Sans Mono", monospace', "pre"]
    wide = "return document.querySelector('pre').scrollWidth > document.querySelector('pre').clientWidth"
    assert page.run(wide) is True, "a long line goes on where it can be scrolled to"
    assert page.run("return document.querySelector('.assistant').scrollWidth < innerWidth") is True


@needs_browser
def test_code_is_code_before_its_fence_is_closed(page: Browser) -> None:
    shown = page.run(
        """
        const told = (one) => [one.nodeName, one.textContent, one.querySelector?.(".growing") != null];
        return import("/page/written.js").then(({ written }) => arguments[0].map((text) => written(text).map(told)));
        """,
        ["a\n``", "a\n```", "a\n```py\nx", "```py\nx\n```"],
    )
    assert shown == [
        [["#text", "a\n``", False]],
        [["#text", "a", False], ["PRE", "", True]],
        [["#text", "a", False], ["PRE", "x", True]],
        [["PRE", "x", False]],
    ]
    assert page.run(f"return {CURSORS}") == []


@needs_browser
def test_the_whole_tree_is_in_sight_beside_a_scroll_bar(page: Browser) -> None:
    url = str(page.run("return location.href"))
    for number in range(30):
        httpx2.post(f"{url}v1/completions", json={"prompt": f"{number} the cat sat", "max_tokens": 1})
    page.wait("document.querySelectorAll('#tree g').length > 20")
    frame = "const frame = document.querySelector('#tree-frame'); return "
    assert page.run(frame + "frame.scrollHeight > frame.clientHeight") is True
    assert page.run(frame + "frame.scrollWidth > frame.clientWidth") is False
    inside = "const frame = document.querySelector('#tree-frame').getBoundingClientRect();" + (
        "return [...document.querySelectorAll('#tree .count')]"
        ".every((one) => one.getBoundingClientRect().right < frame.right)"
    )
    assert page.run(inside) is True


@needs_browser
def test_branches_of_one_session_have_names_of_their_own(page: Browser) -> None:
    said(page, "the cat", 1)
    for title in ("the cat (branch)", "the cat (branch 2)", "the cat (branch 3)"):
        page.click(".turn:first-child .told button:first-of-type")
        page.wait("document.querySelector('#sessions [aria-current=true]')?.textContent === arguments[0]", title)
        assert page.texts("#talk-title") == [title]
    assert page.texts("#sessions button") == ["the cat (branch 3)", "the cat (branch 2)", "the cat (branch)", "the cat"]


@needs_browser
def test_a_refusal_leaves_the_end_of_the_conversation_in_sight(page: Browser) -> None:
    opened(page, *["long " * 100] * 8)
    page.click("#shaped")
    page.run("document.querySelector('#schema').value = '{'")
    page.type("#draft", "the cat" + ENTER)
    page.wait("!document.querySelector('#problem').hidden")
    left = "const it = document.querySelector('#turns'); return it.scrollHeight - it.scrollTop - it.clientHeight"
    assert abs(float(str(page.run(left)))) < 2


@needs_browser
def test_a_server_that_goes_away_is_told_and_so_is_its_return(page: Browser) -> None:
    assert page.run("return document.querySelector('#away').offsetHeight") == 0
    page.run("window.send = window.fetch; window.fetch = async () => { throw new TypeError('gone'); }")
    page.wait("document.querySelector('#away').offsetHeight")
    told = "The server cannot be reached. This page looks for it again every second."
    assert page.texts("#away") == [told]
    assert page.run("return document.querySelector('#away').role") == "status"
    page.run("window.fetch = window.send")
    page.wait("!document.querySelector('#away').offsetHeight")


@needs_browser
def test_what_the_engine_refuses_to_tell_is_said_where_the_server_is_missed(page: Browser) -> None:
    page.run(
        "window.send = window.fetch; window.fetch = async () =>"
        ' new Response(\'{"error": {"message": "it starts again"}}\', { status: 503 })'
    )
    page.wait("document.querySelector('#away').textContent === 'it starts again'")
    page.run("window.fetch = window.send")
    page.wait("document.querySelector('#away').textContent === ''")


def test_every_file_of_the_page_is_asked_for_by_it() -> None:
    folder = Path(__file__).parents[3] / "runtime" / "server" / "page"
    texts = "".join(path.read_text("utf-8") for path in folder.iterdir())
    for path in folder.iterdir():
        assert path.name == "index.html" or f"/{path.name}" in texts, path.name
