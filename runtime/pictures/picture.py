"""The frame and the look of what niwaki draws: one HTML file that stands alone, light or dark as its reader likes.

Loads the standard library only: the language draws its runs with it, the engine its tree.
"""

# ruff: noqa: E501  # a rule of the style sheet reads best on one line

from __future__ import annotations

import base64
import hashlib
import os
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Final

# Colours keep their distance for colour-blind eyes, texts their contrast. What ends in -t is the tint behind a text.
LOOK: Final = """
:root {
  color-scheme: light dark;
  --paper: #faf9f5; --card: #ffffff; --ink: #23261f; --soft: #5f6357; --line: #e2dfd4; --wood: #8a7a66;
  --cached: #3f7fb5; --cached-t: #dbe9f5; --prefilled: #c98a1b; --prefilled-t: #f8e9c8;
  --sampled: #2e8b62; --sampled-t: #d3eedd; --forced: #7d7f78; --forced-t: #e6e6e0; --drafted: #98a71f; --drafted-t: #edf2c4; --selected: #9457a3; --selected-t: #eedcf3;
  --failed: #bf3b2b; --failed-t: #fbe0dc; --on: #ffffff; --shade: 0 1px 2px rgb(60 50 30 / .06), 0 6px 20px rgb(60 50 30 / .05);
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #161814; --card: #1e211c; --ink: #e6e5dc; --soft: #a3a698; --line: #33372f; --wood: #a08e76;
    --cached: #6fabdc; --cached-t: #1d3447; --prefilled: #dfa945; --prefilled-t: #433413;
    --sampled: #5cbd8e; --sampled-t: #173b2a; --forced: #989b90; --forced-t: #33362f; --drafted: #c2d452; --drafted-t: #363c14; --selected: #c08bd0; --selected-t: #3b2643;
    --failed: #ee7f70; --failed-t: #4a1f1a; --on: #10120e; --shade: none;
  }
}
* { box-sizing: border-box }
body { margin: 0; background: var(--paper); color: var(--ink); font: 15px/1.6 ui-sans-serif, system-ui, "Segoe UI", "Noto Sans", "DejaVu Sans", sans-serif; -webkit-text-size-adjust: 100% }
main { max-width: 1180px; margin: 0 auto; padding: 44px 28px 96px }
header { display: flex; flex-wrap: wrap; align-items: baseline; gap: 2px 18px }
h1 { font: 600 30px/1.25 ui-serif, Georgia, "Noto Serif", "DejaVu Serif", serif; letter-spacing: -.01em; margin: 0 }
header p { margin: 0; color: var(--soft) }
header .reuse { flex-basis: 100%; margin-top: 6px }
header .reuse b { color: var(--ink); font-weight: 650 }
.share { display: flex; gap: 2px; height: 8px; margin: 22px 0 12px; border-radius: 4px; overflow: hidden }
.share i { min-width: 3px }
.share i, .legend i { background: var(--soft) }
.legend { display: flex; flex-wrap: wrap; gap: 2px 26px; margin: 0; padding: 0; list-style: none; color: var(--soft); font-size: 14px }
.legend i { display: inline-block; width: 11px; height: 11px; border-radius: 3px; margin-right: 8px }
.legend b { color: var(--ink); font-weight: 600; font-variant-numeric: tabular-nums; margin-left: 4px }
.chart { margin: 26px 0 8px; overflow: auto; max-height: 700px; background: var(--card); border: 1px solid var(--line); border-radius: 14px; box-shadow: var(--shade) }
.chart svg { display: block; width: 100%; min-width: 1000px; height: auto }
:focus-visible { outline: 2px solid var(--cached); outline-offset: 2px }
@media (max-width: 640px) { main { padding: 26px 14px 60px } h1 { font-size: 24px } }
@media print { .chart { max-height: none } }
"""


@dataclass(frozen=True, slots=True)
class Picture:
    """A page that needs nothing beside itself. A notebook shows it; `html` is the whole file."""

    html: str

    def save(self, path: str | os.PathLike[str]) -> None:
        Path(path).write_text(self.html, "utf-8")

    def __repr__(self) -> str:
        return f"<Picture of {len(self.html)} characters of HTML; save('run.html') writes it>"

    def _repr_html_(self) -> str:
        # In a frame of its own: its styles must not touch the notebook, nor the notebook's touch it.
        page = escape(self.html, quote=True)
        return (
            f'<iframe srcdoc="{page}" sandbox="allow-scripts" title="niwaki" '
            'style="width:100%;height:640px;border:0;border-radius:12px"></iframe>'
        )


def page_of(title: str, body: str, *, style: str, script: str = "") -> Picture:
    """`body` in a page of that title, which loads nothing and whose policy lets nothing but `script` run.

    `title` is plain text; in `body` whatever comes from elsewhere has gone through `html.escape`.
    """
    policy = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'"
    if script:
        policy += f"; script-src 'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
        body += f"<script>{script}</script>"
    return Picture(
        "<!doctype html>\n"
        f'<html lang="en"><head><meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)} · niwaki</title><style>{LOOK}{style}</style></head>\n"
        f"<body>{body}</body></html>\n"
    )
