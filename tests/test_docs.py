"""Every code block of README and docs/ runs, and prints what stands below it.

The ```python blocks of a page share one namespace, as a reader would type them. A ```text block right behind one is
what it prints. In ```console blocks the lines that start with `$ niwaki` or `$ python` are run. What is not run, as it
starts servers, installs or measures, must at least name commands, options, modules and extras that there are.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import niwaki as nw
from niwaki.__main__ import parsed

if TYPE_CHECKING:
    from niwaki.runtime.engine import Engine

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class Block:
    line: int
    language: str
    code: str
    output: str | None  # of the ```text block that follows with nothing but blank lines between


def blocks(text: str) -> list[Block]:
    fences = list(FENCE.finditer(text))
    found = []
    for position, fence in enumerate(fences):
        following = fences[position + 1] if position + 1 < len(fences) else None
        is_answered = (
            following is not None and following[1] == "text" and not text[fence.end() : following.start()].strip()
        )
        output = following[2] if following is not None and is_answered else None
        found.append(Block(text.count("\n", 0, fence.start()) + 1, fence[1], fence[2], output))
    return found


def commands(block: Block) -> Iterator[list[str]]:
    """The words of each command in a shell block."""
    if block.language not in ("console", "sh", "bash"):
        return
    for line in block.code.replace("\\\n", " ").splitlines():
        if line.startswith("$ ") or block.language != "console":
            yield shlex.split(line.removeprefix("$ "), comments=True)


def run_python(page: Path, block: Block, namespace: dict[str, object]) -> str:
    printed = io.StringIO()
    code = compile("\n" * block.line + block.code, str(page), "exec")  # errors then name the page's own line
    with contextlib.redirect_stdout(printed):
        exec(code, namespace)
    return printed.getvalue()


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that looks like the checkout to a reader's commands, and may be written to."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def bundled_backend(bundled_engine: Engine) -> Iterator[None]:
    """Programs run on the bundled model, whatever default another page has set."""
    nw.set_default_backend(bundled_engine)
    yield
    nw.set_default_backend(None)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_python_block_runs_and_prints_what_the_page_says(
    page: Path, checkout: Path, bundled_backend: None
) -> None:
    namespace: dict[str, object] = {"__name__": "__doc__"}
    for block in blocks(page.read_text("utf-8")):
        if block.language == "python":
            printed = run_python(page, block, namespace)
            if block.output is not None:
                assert printed == block.output, f"{page.name}:{block.line}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_of_ours_succeeds(page: Path, checkout: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    for block in blocks(page.read_text("utf-8")):
        if block.language != "console":
            continue
        for words in commands(block):
            if words[0] not in ("niwaki", "python"):
                continue
            command = [sys.executable, *(["-m", "niwaki"] if words[0] == "niwaki" else []), *words[1:]]
            done = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)
            assert done.returncode == 0, f"{page.name}: {shlex.join(words)}\n{done.stderr}"


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_every_shell_line_names_what_there_is(page: Path) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    for block in blocks(page.read_text("utf-8")):
        for words in commands(block):
            where = f"{page.name}:{block.line}: {shlex.join(words)}"
            match [word for word in words if not re.match("[A-Z_]+=", word)]:
                case ["niwaki", *given]:
                    parsed(given)  # exits where an option is unknown
                case ["python", "-m", module, *_]:
                    assert importlib.util.find_spec(module), where
                case ["make", target, *_]:
                    assert target in targets, where
                case ["pip", "install", *required]:
                    assert set(re.findall(r"niwaki\[(\w+)\]", " ".join(required))) <= set(extras), where


def test_links_between_pages_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", page.read_text("utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_readme_starts_with_the_two_commands() -> None:
    commands = [
        line.removeprefix("$ ").split("#")[0].strip()
        for block in blocks((ROOT / "README.md").read_text("utf-8"))
        if block.language == "console"
        for line in block.code.splitlines()
    ]
    assert commands[:2] == ["make demo", "make test"]


def test_a_block_that_prints_something_else_is_seen() -> None:
    page = "```python\nprint(1 + 1)\n```\n\n```text\n3\n```\n\n```python\npass\n```\n"
    first, second, third = blocks(page)
    assert (first.line, first.output, third.output) == (1, "3\n", None)
    assert second.language == "text"
    assert run_python(Path("page"), first, {}) == "2\n"
