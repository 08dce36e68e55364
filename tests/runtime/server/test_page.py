"""The page at /: clicked through in a real browser, which has nothing to complain about."""

from __future__ import annotations

import json
import re
from pathlib import Path

import httpx2
import pytest

from niwaki.runtime.engine import Engine
from niwaki.runtime.server.config import ServerConfig, digests
from niwaki.runtime.server.pages import FOLDER
from niwaki.runtime.server.serve import serving
from tests.lang.test_picture import contrast
from tests.runtime.server.browser import Browser, needs_browser
from tests.runtime.server.conftest import held, wait_until_idle

ENTER = "\ue007"
CURSORS = (  # the kinds of elements that show where an answer goes on
    "[...document.querySelectorAll('.growing')]"
    ".filter((one) => getComputedStyle(one, '::after').content !== 'none').map((one) => one.tagName)"
)
IDLE = "!document.querySelector('#send').disabled"


def said(page: Browser, text: str, turns: int) -> None:
    page.type("#draft", text + ENTER)
    page.wait(f"{IDLE} && document.querySelectorAll('.told').length === {turns}")


@needs_browser
def test_a_conversation_is_had_branched_rewound_and_deleted(page: Browser) -> None:
    said(page, "the cat", 1)
    said(page, "the dog", 2)
    assert page.texts("#sessions button") == ["the cat"]
    trunk = page.texts(".said .body")
    assert trunk[::2] == ["the cat", "the dog"]

    page.click(".turn:first-child .told button:first-of-type")
    page.wait("document.querySelector('#talk-title').textContent === 'the cat (branch)'")
    page.wait("document.querySelectorAll('.turn').length === 1")
    said(page, "a log", 2)
    assert page.texts("#sessions button") == ["the cat (branch)", "the cat"]
    assert page.texts("#sessions [aria-current=true]") == ["the cat (branch)"]
    titles = page.run("return [...document.querySelectorAll('#sessions button')].map((one) => one.title)")
    assert titles == ["the cat (branch)", "the cat"]

    page.click("#sessions li:last-child button")
    page.wait("document.querySelector('#talk-title').textContent === 'the cat'")
    page.wait("document.querySelectorAll('.turn').length === 2")
    assert page.texts(".said .body") == trunk, "what was stored is what was shown"
    page.click(".turn:last-child .told button:last-of-type")  # nothing stands behind it, and nothing is asked
    page.click(".turn:first-child .told button:last-of-type")
    page.ask("alert/dismiss")
    assert len(page.texts(".turn")) == 2
    page.click(".turn:first-child .told button:last-of-type")
    page.ask("alert/accept")
    page.wait("document.querySelectorAll('.turn').length === 1")

    page.click("#delete")
    page.ask("alert/accept")
    page.wait("document.querySelectorAll('#sessions button').length === 1")
    assert page.texts("#talk-title") == ["New session"]


@needs_browser
def test_sessions_that_do_not_fit_on_the_list_come_when_they_are_asked_for(browser: Browser, engine: Engine) -> None:
    with serving(engine) as address:
        for number in range(101):
            httpx2.post(f"{address}/v1/sessions", json={"title": f"number {number}"})
        browser.open(address)
        browser.wait("document.querySelectorAll('#sessions button').length === 100")
        browser.wait("!document.querySelector('#older').hidden")
        browser.click("#older")  # which scrolls down to it
        at = "(({left, top}) => document.elementFromPoint(left + 5, top + 5)?.id)"
        assert browser.run(f"return {at}(document.querySelector('#new').getBoundingClientRect())") == "new", "in sight"
        browser.wait("document.querySelectorAll('#sessions button').length === 101")
        assert browser.texts("#sessions button")[-1] == "number 0"
        assert browser.run("return document.querySelector('#older').hidden")
        assert browser.complaints() == []
        browser.open("about:blank")


@needs_browser
def test_a_session_is_renamed_and_an_export_is_read_back(page: Browser, tmp_path: Path) -> None:
    said(page, "the cat", 1)
    page.click("#rename")
    page.ask("alert/dismiss")
    assert page.texts("#talk-title") == ["the cat"]
    page.click("#rename")
    page.ask("alert/text", text="cats and dogs")
    page.ask("alert/accept")
    page.wait("document.querySelector('#sessions button').textContent === 'cats and dogs'")
    assert page.texts("#talk-title") == ["cats and dogs"]
    shown = page.texts(".said .body")

    fetched = "fetch(`v1/sessions/${arguments[0]}`).then(async (one) => { window.exported = await one.text(); })"
    page.run(fetched, *open_session(page))
    page.wait("window.exported")
    exported, wrong = tmp_path / "exported.json", tmp_path / "wrong.json"
    parts = '"content":[{"type":"text","text":"the "},{"type":"text","text":"cat"}]'  # as other clients say it
    exported.write_text(str(page.run("return window.exported")).replace('"content":"the cat"', parts))
    assert exported.read_text().count(parts) == 2, "among the messages and in the turn"
    wrong.write_text("{")
    page.type("#import-file", str(wrong))
    page.wait("document.querySelector('#problem').textContent.startsWith('wrong.json is not an exported session: ')")
    page.click("#new")
    page.wait("document.querySelectorAll('.turn').length === 0")
    assert page.run("return document.querySelector('#rename').disabled") is True
    page.type("#import-file", str(exported))
    page.wait("document.querySelectorAll('.turn').length === 1")
    page.wait("document.querySelectorAll('#sessions button').length === 2")  # listed behind the turns
    assert page.texts("#sessions button") == ["cats and dogs", "cats and dogs"]
    assert (page.texts("#talk-title"), page.texts(".said .body")) == (["cats and dogs"], shown)
    assert page.run("return document.querySelector('#problem').hidden") is True
    said(page, "the dog", 2)


@needs_browser
def test_a_new_title_stands_over_the_session_that_it_is_of(page: Browser) -> None:
    """Whatever is opened before the server answers."""
    said(page, "the cat", 1)
    page.run(
        "const send = window.fetch;"
        "window.fetch = async (path, how) => {"
        "  const answer = await send(path, how);"
        "  if (how.method === 'POST') await new Promise((go) => { window.letGo = go; });"
        "  return answer;"
        "};"
    )
    page.click("#rename")
    page.ask("alert/text", text="cats")
    page.ask("alert/accept")
    page.wait("window.letGo")
    page.click("#new")
    page.wait("document.querySelectorAll('.turn').length === 0")
    page.run("window.letGo()")
    page.wait("document.querySelector('#sessions button').textContent === 'cats'")
    assert page.texts("#talk-title") == ["New session"]


@needs_browser
def test_a_list_of_sessions_that_comes_late_does_not_stand_over_a_newer_one(page: Browser) -> None:
    page.run(
        "const send = window.fetch;"
        "window.fetch = async (path, how) => {"
        "  const answer = await send(path, how);"
        "  if (!path.startsWith('v1/sessions?') || window.letGo) return answer;"
        "  const told = await answer.json();"
        "  await new Promise((go) => { window.letGo = go; });"
        "  window.hasCome = true;"
        "  return { ok: true, json: async () => told };"
        "};"
    )
    page.click("#new")
    page.wait("window.letGo")
    said(page, "the cat", 1)
    page.run("window.letGo()")
    page.wait("window.hasCome")
    assert page.texts("#sessions button") == ["the cat"]


def open_session(page: Browser) -> list[object]:
    return [page.run("return document.querySelector('#sessions [aria-current=true]').dataset.session")]


@needs_browser
def test_an_answer_of_a_schema_is_drawn_while_it_grows(page: Browser, engine: Engine) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "string", "minLength": 200, "maxLength": 240}, "b": {"enum": [1, 2]}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    page.run(
        """
        const box = document.querySelector("#schema");
        box.value = "{"; box.dispatchEvent(new Event("input"));
        window.invalid = box.getAttribute("aria-invalid");
        box.value = arguments[0]; box.dispatchEvent(new Event("input"));
        document.querySelector("[name=max_tokens]").value = 400;
        """,
        json.dumps(schema),
    )
    assert page.run("return window.invalid") == "true"
    page.click("#shaped")
    page.run("document.querySelector('#schema').value = '{'")
    page.type("#draft", "fill it" + ENTER)
    page.wait("document.querySelector('#problem').textContent.startsWith('The schema is not JSON yet: ')")
    page.clear("#draft")
    page.run("document.querySelector('#schema').value = arguments[0]", json.dumps(schema))
    with held(engine, steps=20):
        page.type("#draft", "fill it" + ENTER)
        page.wait("document.querySelector('.assistant .json-value.growing')?.textContent")
        assert page.run("return document.querySelector('#draft').value") == "", "it stands in the conversation"
        assert page.texts(".assistant .json .name") == ["a: "]
        assert page.run(f"return {CURSORS}") == ["SPAN"], "the innermost value alone"
    page.wait(f"{IDLE} && document.querySelectorAll('.told').length === 1")
    assert page.texts(".assistant .json .name") == ["a: ", "b: "]
    assert len(str(page.texts(".assistant .json-value")[0])) >= 200


@needs_browser
def test_what_cannot_be_asked_makes_no_session_and_a_title_ends_behind_a_word(page: Browser) -> None:
    page.click("#shaped")
    page.run("document.querySelector('#schema').value = '{'")
    page.type("#draft", "the cat and the dog sat on the mat and on the log" + ENTER)
    page.wait("!document.querySelector('#problem').hidden")
    assert page.run("return document.querySelector('#rename').disabled") is True
    assert page.run("return document.querySelector('#draft').value") != ""
    page.click("#shaped")
    page.type("#draft", ENTER)
    page.wait(f"{IDLE} && document.querySelectorAll('.told').length === 1")
    assert page.texts("#talk-title") == page.texts("#sessions button") == ["the cat and the dog sat on the mat and…"]


@needs_browser
def test_a_message_goes_once_and_only_into_the_session_where_it_was_written(page: Browser) -> None:
    send = "const ask = document.querySelector('#ask'); ask.requestSubmit();"
    page.type("#draft", "the cat")
    page.run(f"{send} ask.requestSubmit()")
    page.wait(f"{IDLE} && document.querySelectorAll('.told').length === 1")
    assert page.texts("#sessions button") == ["the cat"]
    page.click("#new")
    page.wait("document.querySelectorAll('.turn').length === 0")
    page.type("#draft", "the dog")
    page.run(f"{send} document.querySelector('#sessions button').click()")
    page.wait(f"{IDLE} && document.querySelectorAll('#sessions button').length === 2")
    page.wait("document.querySelector('#sessions [aria-current=true]')?.textContent === 'the cat'")
    assert page.texts("#talk-title") == ["the cat"]
    assert len(page.texts(".turn")) == 1
    assert page.run("return document.querySelector('#draft').value") == "the dog"


FAILING = (  # the next answer to what begins like this is what stands behind it
    "const [send, beginning, status, text] = [window.fetch, ...arguments]; window.fetch = async (path, how) => {"
    "  if (!path.startsWith(beginning)) return send(path, how);"
    "  window.fetch = send; return new Response(text, { status }); };"
)


@needs_browser
def test_a_session_that_cannot_be_read_leaves_the_one_before_open(page: Browser) -> None:
    said(page, "the cat", 1)
    page.click("#new")
    page.wait("document.querySelectorAll('.turn').length === 0")
    said(page, "the dog", 1)
    page.run(FAILING, "v1/sessions/", 502, '{"detail": "of something between"}')
    page.click("#sessions li:last-child button")
    page.wait("document.querySelector('#problem').textContent === 'The server answered 502.'")
    assert page.texts("#sessions [aria-current=true]") == page.texts("#talk-title") == ["the dog"]
    said(page, "the bird", 2)
    page.click("#delete")
    page.ask("alert/accept")
    page.wait("document.querySelectorAll('#sessions button').length === 1")
    assert page.texts("#sessions button") == ["the cat"], "what is deleted is what stands there"


@needs_browser
def test_a_session_that_was_deleted_elsewhere_is_told_and_listed_no_more(page: Browser) -> None:
    said(page, "the cat", 1)
    gone = page.run("return document.querySelector('#sessions button').dataset.session")
    page.click("#new")
    page.wait("document.querySelectorAll('.turn').length === 0")
    said(page, "the dog", 1)
    page.run("fetch(`v1/sessions/${arguments[0]}`, { method: 'DELETE' }).then(() => { window.isGone = true; })", gone)
    page.wait("window.isGone")
    page.run("document.querySelector(`[data-session=${arguments[0]}]`).click()", gone)
    page.wait("document.querySelector('#problem').textContent.includes('was deleted')")
    assert page.texts("#sessions button") == page.texts("#talk-title") == ["the dog"]
    page.complaints()  # the browser notes every answer that is no success


@needs_browser
def test_an_answer_that_breaks_off_is_none(page: Browser) -> None:
    said(page, "the cat", 1)
    page.run(FAILING, "v1/sessions/", 200, 'data: {"choices": [{"delta": {"content": "half"}}]}\n\n')
    page.type("#draft", "the dog" + ENTER)
    page.wait(f"{IDLE} && document.querySelector('#problem').textContent.includes('connection was lost')")
    assert len(page.texts(".turn")) == 1
    assert page.run("return document.querySelector('#draft').value") == "the dog", "to be sent once more"


@needs_browser
def test_who_reads_further_up_is_left_there(page: Browser, engine: Engine) -> None:
    said(page, "the cat", 1)
    page.run("document.querySelector('#turns').style.maxHeight = '60px'")
    at = "return document.querySelector('#turns').scrollTop"
    for is_at_end in (False, True):
        with held(engine, steps=4):
            page.type("#draft", "the dog" + ENTER)
            page.wait("document.querySelector('.turn:last-child .assistant .body')?.textContent")
            assert page.run(at) != 0, "what was said stands in sight"
            if not is_at_end:
                page.run("document.querySelector('#turns').scrollTop = 0")
        page.wait(f"{IDLE} && document.querySelectorAll('.told').length === {2 + is_at_end}")
        left = page.run("const [it] = [document.querySelector('#turns')]; return it.scrollHeight - it.scrollTop")
        assert (page.run(at) == 0) is not is_at_end
        assert (left == 60) is is_at_end


@needs_browser
def test_what_only_begins_like_json_is_shown_as_it_was_written(page: Browser) -> None:
    for turns, text in enumerate(("{x} is a set", '{"a": 1} and more', '{"a": cat}'), 1):
        said(page, text, turns)
        assert page.texts(".turn:last-child .user .body") == [text]
    said(page, '{"a": [1, "b"], "c"', 4)
    assert page.texts(".turn:last-child .user .name") == ["a: ", "1. ", "2. ", "c: "]
    assert page.run(f"return {CURSORS}") == [], "what stays unfinished is written no further"
    for turns, text in enumerate(
        ('{"a": "b\\\\', '{"a": "b\\', '{"a": "b\\u00e', '{"a": "b\\u00e4"', '{"a": "\\\\"'), 5
    ):
        said(page, text, turns)
        assert page.texts(".turn:last-child .user .name") == ["a: "], text
    assert page.texts(".user .json-value")[-5:] == ["b\\", "b", "b", "bä", "\\"]


@needs_browser
def test_a_stopped_answer_ends_in_the_engine_and_was_never_said(browser: Browser, toy_folder: Path) -> None:
    with Engine(toy_folder, kv_tokens=2048) as engine, serving(engine) as address, held(engine) as release:
        browser.open(address)
        browser.wait("document.querySelector('#model').textContent.startsWith('toy')")
        browser.run("document.querySelector('[name=max_tokens]').value = 400")
        browser.type("#draft", "the cat" + ENTER)
        browser.wait("document.querySelector('.assistant .body')?.textContent")
        browser.click("#stop")
        browser.wait(f"{IDLE} && document.querySelectorAll('.turn').length === 0")
        browser.wait("document.querySelector('#state').textContent.includes('not kept')")
        release()
        wait_until_idle(engine)
        assert engine.stats()["generated_tokens"] < 16, "it was not waited for"
        sessions = httpx2.get(f"{address}/v1/sessions").json()["data"]
        assert [session["turn"] for session in sessions] == [None]
        assert browser.complaints() == []
        browser.open("about:blank")


@needs_browser
def test_what_is_refused_is_told_on_the_page(page: Browser) -> None:
    page.run("document.querySelector('[name=max_tokens]').value = 9999")
    page.type("#draft", "the cat" + ENTER)
    page.wait("!document.querySelector('#problem').hidden")
    assert "tokens" in page.texts("#problem")[0]
    assert page.texts(".turn") == []
    assert page.run("return document.querySelector('#draft').value") == "the cat", "to be sent once more"
    page.complaints()  # the browser notes every answer that is no success


@needs_browser
def test_an_answer_that_ran_out_of_tokens_says_so_now_and_when_it_is_read_again(page: Browser) -> None:
    page.run("document.querySelector('[name=seed]').value = 1")  # else an end token may come first
    said(page, "the cat", 1)
    assert page.texts(".told span")[0].startswith("12 tokens, cut off; ")
    page.click("#new")
    page.wait("document.querySelectorAll('.turn').length === 0")
    page.click("#sessions button")
    page.wait("document.querySelectorAll('.turn').length === 1")
    assert page.texts(".told span")[0].startswith("12 tokens, cut off; ")


@needs_browser
def test_the_tree_is_drawn_and_names_what_was_said(page: Browser) -> None:
    said(page, "the cat sat on the mat and the dog sat on the log", 1)
    page.wait("[...document.querySelectorAll('#tree title')].some((one) => one.textContent.includes('the cat'))")
    page.wait("document.querySelectorAll('#tree g.pinned').length > 0")
    page.wait("document.querySelectorAll('#rates polyline').length === 3")
    page.run(  # a rate is shown for a second
        """
        const legend = document.querySelector("#rate-generated").closest(".legend");
        const isShown = () => [...legend.querySelectorAll("b")].some((one) => one.textContent !== "0");
        const watcher = new MutationObserver(() => { window.isShown ||= isShown(); });
        watcher.observe(legend, { subtree: true, childList: true });
        """
    )
    said(page, "the dog", 2)
    page.wait("window.isShown")
    assert "running" in page.texts("#numbers dt")


@needs_browser
def test_both_themes_can_be_had_and_everything_has_a_name(page: Browser) -> None:
    def paper() -> object:
        return page.run("return getComputedStyle(document.body).backgroundColor")

    light = paper()
    page.click("#theme")
    assert paper() != light
    nameless = page.run(
        """
        return [...document.querySelectorAll("button, input, textarea, [role], section, nav")].filter((one) =>
          !one.textContent.trim() && !one.getAttribute("aria-label") && !one.getAttribute("aria-labelledby")
          && !one.labels?.length && !["status", "alert", "log"].includes(one.role)).map((one) => one.outerHTML);
        """
    )
    assert nameless == []


@needs_browser
def test_the_theme_is_the_systems_until_somebody_chooses(page: Browser) -> None:
    try:
        for scheme in ("dark", "light", "dark"):
            page.prefer(scheme)
            page.wait("document.documentElement.dataset.theme === arguments[0]", scheme)
        page.click("#theme")
        page.wait("document.documentElement.dataset.theme === 'light'")
        page.prefer("light")
        page.prefer("dark")
        assert page.run("return matchMedia('(prefers-color-scheme: dark)').matches") is True
        assert page.run("return document.documentElement.dataset.theme") == "light"
    finally:
        page.prefer("light")


@needs_browser
def test_on_a_phone_nothing_is_cut_off_and_a_branch_can_be_told_from_its_trunk(page: Browser) -> None:
    page.be_phone()
    try:
        said(page, "the cat sat on the mat with a dog and another dog", 1)
        page.click(".turn:first-child .told button:first-of-type")
        page.wait("document.querySelectorAll('#sessions button').length === 2")
        assert page.run("return document.documentElement.scrollWidth") == 390
        page.run("document.querySelector('#model').textContent = 'niwaki-tiny-instruct-v2, 131,072 tokens'")
        cut = page.run(
            "return [...document.querySelectorAll('#sessions button, #sessions span, #model, #talk-title')]"
            ".filter((one) => one.scrollWidth > one.clientWidth"
            " || one.scrollHeight > one.clientHeight).map((one) => one.textContent)"
        )
        assert cut == []
        assert page.texts("#sessions button")[0].endswith("(branch)")
        heights = page.run("return [...document.querySelectorAll('.told button')].map((one) => one.clientHeight)")
        assert isinstance(heights, list)
        assert 0 < max(heights) < 30, "of one line"
    finally:
        page.be_window()


@needs_browser
def test_on_a_phone_a_long_conversation_is_a_screen_at_most_and_its_end_is_in_sight(page: Browser) -> None:
    page.be_phone()
    try:
        for turns in range(1, 9):
            said(page, f"the cat {turns}", turns)
        assert page.run("return document.querySelector('#talk').clientHeight <= 844") is True
        ends = "(selector) => document.querySelector(selector).getBoundingClientRect().bottom"
        assert page.run(f"const end = {ends}; return end('.turn:last-child') <= end('#turns')") is True
    finally:
        page.be_window()


@needs_browser
def test_a_key_is_asked_for_once(browser: Browser, engine: Engine) -> None:
    with serving(engine, ServerConfig(port=0, key_digests=digests(["first-key"]))) as address:
        browser.open(address)
        browser.wait("document.querySelector('#key-dialog').open")
        browser.type("#key", "first-key" + ENTER)
        browser.wait("document.querySelector('#model').textContent.startsWith('toy')")
        browser.run("document.querySelector('[name=max_tokens]').value = 4")
        said(browser, "the cat", 1)
        browser.open("about:blank")
        browser.complaints()


def test_the_page_loads_nothing_from_elsewhere(client: httpx2.Client) -> None:
    answer = client.get("/")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    for path in sorted(FOLDER.iterdir()):
        text = client.get(f"/page/{path.name}").text
        assert text == path.read_text("utf-8")
        assert re.findall(r"https?://(?!www\.w3\.org/2000/svg)[^\s\"']+", text) == [], path.name
    assert client.get("/page/..%2Fconfig.py").status_code == 404
    assert client.get("/page/none.js").status_code == 404


def test_the_tree_is_told_only_to_whom_it_belongs(engine: Engine) -> None:
    with serving(engine, ServerConfig(port=0, key_digests=digests(["first-key", "second-key"]))) as address:

        def nodes(key: str) -> list[dict[str, object]]:
            headers = {"authorization": f"Bearer {key}"}
            return list(httpx2.get(f"{address}/debug/tree", headers=headers).json()["nodes"])

        body = {"prompt": "the cat sat on the mat", "max_tokens": 1}
        httpx2.post(f"{address}/v1/completions", json=body, headers={"authorization": "Bearer first-key"}, timeout=60)
        assert "the cat sat" in "".join(str(node["text"]) for node in nodes("first-key"))
        assert nodes("second-key") == []
        assert httpx2.get(f"{address}/debug/tree").status_code == 401


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_keeps_its_contrast(scheme: str) -> None:
    style = Path(FOLDER, "style.css").read_text("utf-8")
    light, dark = re.findall(r":root[^{]*\{(.*?)\}", style, re.DOTALL)
    colors = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", light if scheme == "light" else dark))
    for ground in ("paper", "card", "mine"):
        assert contrast(colors["ink"], colors[ground]) >= 7, ground
        assert contrast(colors["soft"], colors[ground]) >= 4.5, ground
    for text, ground in (("on-main", "main"), ("bad", "bad-paper"), ("name", "card"), ("value", "card")):
        assert contrast(colors[text], colors[ground]) >= 4.5, text
    for mark in ("idle", "generated", "cached", "computed", "locked", "pinned", "main"):
        assert contrast(colors[mark], colors["card"]) >= 3, mark
