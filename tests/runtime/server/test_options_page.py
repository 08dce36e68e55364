"""The page on the server lists every option of `niwaki serve` as the command line itself has it."""

from __future__ import annotations

import argparse
from pathlib import Path

from niwaki.__main__ import add_serve_options

PAGE = Path(__file__).parents[3] / "docs" / "server.md"
BEGIN, END = "<!-- options: made from the command line -->\n", "<!-- end of options -->\n"


def table() -> str:
    parser = argparse.ArgumentParser()
    add_serve_options(parser)
    rows = ["| option | default | meaning |", "|---|---|---|"]
    for action in parser._actions:
        if isinstance(action, argparse._HelpAction):
            continue
        name = " ".join(filter(None, (action.option_strings[0], _value(action))))
        default = "" if action.default in (None, [], False) else f"`{_short(action.default)}`"
        about = (action.help or "").replace(" (%(default)s)", "")
        rows.append(f"| `{name}` | {default} | {about} |")
    return "\n".join(rows) + "\n"


def _value(action: argparse.Action) -> str:
    if action.choices is not None:
        return "{" + ",".join(map(str, action.choices)) + "}"
    return str(action.metavar or "")


def _short(default: object) -> str:
    return str(default).replace(str(Path.home()), "~")


def test_the_options_page_is_the_command_lines_own() -> None:
    text = PAGE.read_text("utf-8")
    assert text.partition(BEGIN)[2].partition(END)[0] == table(), f"docs/server.md should have:\n{table()}"
