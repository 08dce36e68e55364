"""Every code block of README and docs/ runs, and prints what stands below it.

The ```python blocks of a page share one namespace, and its ```console and ```sh blocks one folder, as a reader would
type them. A ```text block right behind one is what it prints. `niwaki serve` runs while the lines behind it ask it.
`make` alone is not run from here: its targets have tests of their own, and CI types those of the README.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import pkgutil
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest

import niwaki as nw
from niwaki.__main__ import parsed
from niwaki.lang.endpoint import Endpoint

if TYPE_CHECKING:
    from niwaki.lang.program import Program
    from niwaki.runtime.engine import Engine

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
TEXTS = [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
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


def lines(block: Block) -> Iterator[str]:
    """The commands of a shell block."""
    if block.language not in ("console", "sh"):
        return
    for line in block.code.replace("\\\n", " ").splitlines():
        if line.startswith("$ ") or block.language == "sh":
            yield line.removeprefix("$ ")


class Reader:
    """Types the shell lines of one page, in one folder. A server that was started runs until the next one, or the end.

    The ports of the page are ports that are free here.
    """

    def __init__(self) -> None:
        self._server: subprocess.Popen[str] | None = None
        self._port = ""
        # As `niwaki` and `python` of the environment that the tests run in.
        names = f'niwaki() {{ {sys.executable} -m niwaki "$@"; }}; python() {{ {sys.executable} "$@"; }}; '
        self._start = f"set -o pipefail; {names}"
        self._environment = {**os.environ, "PYTHONPATH": str(ROOT), "KEY": "a-key-of-our-team"}

    def types(self, line: str) -> tuple[str, int]:
        """What it prints, and its exit status."""
        words = shlex.split(line, comments=True)
        if words[:2] == ["niwaki", "serve"]:
            self._serve(words[2:])
            return "", 0
        command = self._start + line.replace(":30000", f":{self._port}").replace(
            "curl ", "curl --no-progress-meter --fail "
        )
        done = subprocess.run(
            ["bash", "-c", command], env=self._environment, stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
        return done.stdout + done.stderr, done.returncode

    def _serve(self, options: list[str]) -> None:
        self.ends_the_server()
        command = [sys.executable, "-m", "niwaki", "serve", "--port", "0", *options]
        self._server = subprocess.Popen(command, env=self._environment, stdout=subprocess.PIPE, text=True)
        assert self._server.stdout is not None
        url = self._server.stdout.readline().split()[-1]
        self._port = url.rpartition(":")[2]

    def ends_the_server(self) -> None:
        if self._server is not None:
            with self._server as server:
                server.terminate()
                assert server.wait(timeout=60) == 0
            self._server = None


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


SERVED = re.compile(r"`niwaki serve --program \w+\.py:(\w+)`")


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
    for name in SERVED.findall(page.read_text("utf-8")):  # a program of the page, said to be ready for it
        Endpoint(cast("Program", namespace[name]))


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if any(lines(block) for block in blocks(page.read_text("utf-8")))],
    ids=lambda page: page.name,
)
def test_every_shell_line_does_what_the_page_says(page: Path, checkout: Path) -> None:
    reader = Reader()
    try:
        for block in blocks(page.read_text("utf-8")):
            printed, status = "", 0
            for line in lines(block):
                assert status == 0, f"{page.name}:{block.line}: {printed}"
                program = line.split()[0]
                if program in ("curl", "openssl") and shutil.which(program) is None:
                    pytest.skip(f"needs {program}")
                if program != "make":
                    printed, status = reader.types(line)
            if block.output is not None and block.language != "python":
                assert printed == block.output, f"{page.name}:{block.line}"
            else:
                assert status == 0, f"{page.name}:{block.line}: {printed}"
    finally:
        reader.ends_the_server()


def test_all_code_is_in_a_language_that_is_run() -> None:
    used = {block.language for page in PAGES for block in blocks(page.read_text("utf-8"))}
    assert used == {"python", "console", "sh", "text", "yaml"}  # text is printed, yaml configures a cluster


def test_make_lines_are_those_of_ci() -> None:
    typed = {
        line.split("#")[0].strip()
        for page in PAGES
        for block in blocks(page.read_text("utf-8"))
        for line in lines(block)
    }
    steps = re.findall("^step (make .*)", (ROOT / ".ci" / "run").read_text("utf-8"), re.MULTILINE)
    assert {line for line in typed if line.startswith("make ")} <= set(steps)


INLINE = re.compile(r"`((?:niwaki|python|make|pip install) [^`]+)`")


def options_of(module: str) -> set[str]:
    """The options in the text of what `python -m module` runs."""
    spec = importlib.util.find_spec(module)
    assert spec is not None, module
    if spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{module}.__main__")
    assert spec is not None, module
    assert spec.origin is not None, module
    return set(re.findall(r"\"(--[a-z0-9-]+)\"", Path(spec.origin).read_text("utf-8")))


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: page.name)
def test_every_command_in_a_sentence_names_what_there_is(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    for command in INLINE.findall(page.read_text("utf-8")):
        match shlex.split(command):
            case ["niwaki", name, *given]:
                with pytest.raises(SystemExit, match="0"):
                    parsed([name, "--help"])
                assert {word for word in given if word.startswith("--")} <= set(
                    re.findall("--[a-z-]+", capsys.readouterr().out)
                )
            case ["python", "-m", module, *given]:
                options = {word.partition("=")[0] for word in given if word.startswith("--")}
                assert not options - options_of(module), command
            case ["python", script, *_] if script != "-m":
                assert (ROOT / script).exists(), command
            case ["make", target, *_]:
                assert target in targets, command
            case ["pip", "install", *required]:
                assert set(re.findall(r"niwaki\[(\w+)\]", " ".join(required))) <= set(extras), command


def anchors(page: Path) -> set[str]:
    """The places in a page that a link may name: its headings, spelt as GitHub spells them."""
    text = FENCE.sub("", page.read_text("utf-8"))
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: page.name)
def test_links_lead_to_a_file_and_to_a_heading_of_it(page: Path) -> None:
    text = FENCE.sub("", page.read_text("utf-8"))
    for target, place in re.findall(r"\]\(([^)#:\s]*)(?:#([^)\s]*))?\)", text):
        other = page.parent / target if target else page
        assert other.exists(), f"{page.name} links to {target}"
        assert not place or place in anchors(other), f"{page.name} links to {target}#{place}"


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: page.name)
def test_tables_are_whole(page: Path) -> None:
    """Each has its head, the line below it and as many cells in each row; an empty line would cut it in two."""
    text = re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        rows = [re.sub(r"`[^`]*`", "", row) for row in table.splitlines()]
        assert re.match(r".*\n\|(?:[ :-]+\|)+$", table, re.MULTILINE), f"no head: {table}"
        assert len({len(re.findall(r"(?<!\\)\|", row)) for row in rows}) == 1, f"another number of cells: {table}"


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_module_and_file_that_a_page_names_is_there(page: Path) -> None:
    text = page.read_text("utf-8")
    for name in re.findall(r"\bniwaki\.(?:lang|runtime|radix|kernels)(?:\.\w+)*", text):
        assert pkgutil.resolve_name(name), name
    for path in re.findall(r"`((?:niwaki|lang|runtime|radix|kernels|tests)/[\w/.-]+)`", text):
        assert (ROOT / path).exists(), path


def test_bars_in_the_code_of_tables_have_no_backslash_on_the_site() -> None:
    spec = importlib.util.spec_from_file_location("site_hooks", ROOT / ".ci" / "site.py")
    assert spec is not None
    assert spec.loader is not None
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)
    page = r"<td><code>X \| None</code></td><p><code>a\|b</code></p>"
    assert hooks.on_page_content(page, page=None) == r"<td><code>X | None</code></td><p><code>a\|b</code></p>"


def test_the_reference_has_every_public_name() -> None:
    page = (ROOT / "docs" / "reference.md").read_text("utf-8")
    assert {name for name in nw.__all__ if not re.search(rf"[.`]{name}\b|- {name}$", page, re.MULTILINE)} == set()


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
