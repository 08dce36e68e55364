"""The radix tree as people see it: as data, in a terminal, as a page, and from a server through the command line."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from niwaki.__main__ import main
from niwaki.runtime.api import ConfigError, RequestError, SamplingParams, Segment, TimedOut
from niwaki.runtime.engine import Engine
from niwaki.runtime.pictures.tree_page import draw
from niwaki.runtime.pictures.tree_terminal import Drawn, watching
from niwaki.runtime.pictures.tree_view import TreeNode, TreeView
from niwaki.runtime.server.config import ServerConfig, digests
from niwaki.runtime.server.serve import serving
from tests.lang.test_picture import NASTY, read
from tests.toy import make_model

ONE = {"max_new_tokens": 1, "temperature": 0.0}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with Engine(make_model(tmp_path_factory.mktemp("toy") / "toy"), kv_tokens=4096) as made:
        yield made


def node(text: str = "the cat", **changes: object) -> TreeNode:
    plain: dict[str, object] = {
        "parent": None, "text": text, "is_cut": False, "num_tokens": 16, "num_pages": 1, "num_children": 0,
        "num_locks": 0, "is_pinned": False, "hits": 0, "age": 0, "tier": "pool",
    }  # fmt: skip
    return TreeNode(**{**plain, **changes})  # type: ignore[arg-type]


def printed(view: TreeView, *, height: int | None = None, width: int = 110) -> str:
    console = Console(file=io.StringIO(), width=width, height=height, force_terminal=False)
    console.print(Drawn(view, fits=height is not None))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_tree_tells_what_is_shared_used_locked_and_pinned(engine: Engine) -> None:
    engine.flush_cache()
    shared = "the cat sat on the mat and the dog sat on the log " * 4
    engine.generate([shared + "yes", shared + "no"], ONE)
    engine.generate(shared + "maybe", ONE)
    branch = engine.backend.open()
    engine.backend.generate(branch, [Segment("a b c")], SamplingParams(max_new_tokens=1)).result(timeout=60)
    view = engine.tree()
    root = next(n for n in view.nodes if n.num_children)
    assert root.text.startswith("<|bos|>the cat sat")
    assert root.is_cut
    assert root.num_tokens >= 32
    assert root.num_tokens % 16 == 0
    assert root.num_pages * 16 == root.num_tokens
    assert root.hits >= 2
    below = [n for n in view.nodes if n.parent == view.nodes.index(root)]
    assert len(below) == root.num_children >= 2
    assert {n.tier for n in view.nodes} == {"pool"}
    assert [n.state for n in view.nodes if n.text.startswith("<|bos|>a b")] == ["pinned"]
    assert root.age > min(n.age for n in view.nodes) >= 0
    assert view.num_tokens == sum(n.num_tokens for n in view.nodes)
    assert sum(view.pages.values()) == 4096 / 16
    engine.backend.close(branch)
    running = engine.generate("the log", {"max_new_tokens": 400, "ignore_eos": True}, stream=True)
    assert isinstance(running, Iterator)
    next(running)
    assert any(n.state == "locked" and n.num_locks for n in engine.tree().nodes)
    running.close()  # type: ignore[attr-defined]  # a generator


def test_a_terminal_shows_every_node_or_as_many_as_fit() -> None:
    nodes = [
        node("a trunk\n\x1b[31m", num_children=3, hits=7),
        node("left", parent=0, num_locks=1),
        node("right", parent=0, is_pinned=True, age=1234),
        node("elsewhere", is_cut=True),
    ]
    view = TreeView("toy", nodes, {"pages_held": 1, "pages_tree": 4, "pages_free": 5, "tier_disk_pages": 9})
    text = printed(view)
    assert "a trunk⏎·[31m" in text, "control characters never reach the terminal"
    assert [re.sub(r" .*", "", line[4:]) for line in text.splitlines() if line[:4] in ("│ ├ ", "│ └ ")] == [
        "left",
        "right",
    ]
    assert "+1 children" in text
    assert re.search(r"left .* locked +pool", text)
    assert re.search(r"right .*1,234 +pinned", text)
    assert "pages: 1 held, 4 in the tree, 5 free" in text
    assert "9 pages in disk" in text
    assert "2 more nodes below" in printed(view, height=8)


def test_a_node_has_room_for_its_text_however_deep_it_stands() -> None:
    deep = [node(f"word{depth} and more", parent=depth - 1 if depth else None, num_children=1) for depth in range(60)]
    lines = printed(TreeView("toy", [*deep, node("left", parent=59), node("right", parent=59)], {}), width=80)
    assert [f"word{depth}" in line for depth, line in enumerate(lines.splitlines()[3:63])] == [True] * 60
    found = re.findall(r"^(\d*)⋯?([ │├└]+)(left|right|word59)", lines, re.MULTILINE)
    assert [(depth, guides.strip(), text) for depth, guides, text in found] == [
        ("60", "└", "word59"),
        ("61", "├", "left"),
        ("61", "└", "right"),
    ]
    assert len({len(depth) + len(guides) for depth, guides, _ in found}) == 1, "their texts stand below each other"


def test_a_live_picture_stands_while_the_engine_does_not_answer(capsys: pytest.CaptureFixture[str]) -> None:
    asked = 0

    def look() -> TreeView:
        nonlocal asked
        asked += 1
        if asked > 1:
            raise TimedOut("no result within 60 s")
        return TreeView("toy", [node("seen once")], {})

    with watching(look):
        pass
    assert asked > 1
    assert "seen once" in capsys.readouterr().out


def test_the_page_is_one_safe_file_with_every_node() -> None:
    nodes = [
        node(NASTY, num_children=1),
        node("below", parent=0, num_tokens=300, hits=3),
        node("apart", age=50, num_tokens=300, is_cut=True),
    ]
    usage = {"pages_held": 0, "pages_tree": 3, "pages_free": 1, "cached_tokens": 3, "prefilled_tokens": 1}
    html = draw(TreeView(NASTY, nodes, usage)).html
    page = read(html)
    assert "script" not in page.tags
    assert "img" not in page.tags
    assert "default-src 'none'" in html
    assert page.tags.count("rect") == 3
    assert page.tags.count("tr") == 1 + 3
    assert "<b>75%</b> of all prompt tokens were not computed again" in html
    assert not re.findall(r"https?://", html)
    assert html.count(">apart…<") == 2, "in its box and in the table"
    read(draw(TreeView("empty", [], {})).html)


def test_what_has_no_room_in_its_box_stands_behind_the_row() -> None:
    nodes = [
        node("trunk", num_tokens=900, num_children=2),
        node("thin & ", parent=0, num_tokens=1, num_children=1),
        node("thinner", parent=1, num_tokens=1),
        node("wide enough", parent=0, num_tokens=300),
    ]
    html = draw(TreeView("toy", nodes, {})).html
    assert re.findall(r'class="beside"[^>]*>([^<]*)<', html) == ["thin &amp; thinner"]


def test_boxes_start_where_their_parents_end(engine: Engine, tmp_path: Path) -> None:
    engine.show_tree(tmp_path / "tree.html")
    html = (tmp_path / "tree.html").read_text("utf-8")
    boxes = [
        tuple(map(float, found)) for found in re.findall(r'<rect x="([\d.]+)" y="([\d.]+)" width="([\d.]+)"', html)
    ]
    nodes = [place.node for place in engine.tree().places()]
    order = [place.index for place in engine.tree().places()]
    assert len(boxes) == len(nodes) > 1
    assert len({y for _, y, _ in boxes}) >= sum(n.num_children == 0 for n in nodes), "a row for each leaf"
    for (x, _, _), shown in zip(boxes, nodes, strict=True):
        if shown.parent is not None:
            parent_x, _, parent_width = boxes[order.index(shown.parent)]
            assert x >= parent_x + parent_width


def test_the_command_draws_the_tree_of_a_server(
    engine: Engine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(engine, ServerConfig(port=0, key_digests=digests(["first-key"]))) as address:
        assert main(["tree", address, "--once"]) == 1
        assert "give --api-key" in capsys.readouterr().err
        assert main(["tree", address, "--api-key", "first-key", "--once"]) == 0
        assert "in the tree" in capsys.readouterr().out
        assert main(["tree", address, "--api-key", "first-key", "--html", str(tmp_path / "t.html")]) == 0
        assert "<svg" in (tmp_path / "t.html").read_text("utf-8")
        assert main(["tree", address, "--api-key", "first-key", "--limit", "0"]) == 1
        assert "limit" in capsys.readouterr().err
    assert main(["tree", address, "--once"]) == 1
    assert "cannot be reached" in capsys.readouterr().err
    assert main(["tree", "here"]) == 1
    assert "no server's address" in capsys.readouterr().err


def test_what_is_no_tree_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="no niwaki server"):
        TreeView.from_json({"nodes": []})
    with pytest.raises(ConfigError, match="other things"):
        TreeView.from_json({"model": "m", "nodes": [{"text": "a"}], "usage": {}})


@pytest.mark.parametrize("limit", [0, -1])
def test_a_tree_of_no_nodes_is_refused(engine: Engine, limit: int) -> None:
    with pytest.raises(RequestError, match=f"limit must be at least 1, got {limit}"):
        engine.tree(limit=limit)
