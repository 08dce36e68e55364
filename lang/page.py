"""What the page of a run adds to the look of all pages, and its script."""

# ruff: noqa: E501  # a rule of the style sheet reads best on one line

from __future__ import annotations

from typing import Final

STYLE: Final = """
html { scroll-padding: 6rem }
.run + .run { margin-top: 88px }
.strip i { background: var(--soft) }
i.cached { background: var(--cached) !important } i.prefilled { background: var(--prefilled) !important }
i.sampled { background: var(--sampled) !important } i.forced { background: var(--forced) !important }
i.drafted { background: var(--drafted) !important } i.selected { background: var(--selected) !important }
.tick line { stroke: var(--line); stroke-width: 1 } .tick text { fill: var(--soft); font-size: 11px; text-anchor: middle; font-variant-numeric: tabular-nums }
.wood, .wait { fill: none; stroke: var(--wood); stroke-linecap: round } .wait { opacity: .38 }
.bar rect { fill: var(--sampled) } .bar.selected rect { fill: var(--selected) } .bar.failed rect { fill: var(--failed) }
.bar text { fill: var(--on); font-size: 11.5px; font-weight: 550; pointer-events: none }
.bar:hover rect, .bar.near rect { stroke: var(--ink); stroke-width: 2 }
.bud { fill: var(--sampled) } .bud.failed { fill: var(--failed) } .bud.open { fill: var(--paper); stroke: var(--wood); stroke-width: 1.5 }
.tools { display: flex; gap: 8px; justify-content: flex-end; margin: 10px 0 0 } .tools[hidden] { display: none }
button { font: inherit; font-size: 13px; color: var(--soft); background: none; border: 1px solid var(--line); border-radius: 999px; padding: 2px 14px; cursor: pointer }
button:hover { color: var(--ink); border-color: var(--soft) }
.trunk { margin-top: 18px; padding-left: 22px; border-left: 4px solid var(--wood); border-radius: 2px }
.turn { margin: 0 0 10px }
.role { display: block; font-size: 11.5px; letter-spacing: .08em; text-transform: uppercase; color: var(--soft); margin: 14px 0 2px }
.flow { white-space: pre-wrap; overflow-wrap: anywhere }
.t, .call { border-radius: 3px; padding: 1px 0; -webkit-box-decoration-break: clone; box-decoration-break: clone }
.t.cached { background: var(--cached-t) } .t.prefilled { background: var(--prefilled-t) }
.t.mixed { -webkit-box-decoration-break: slice; box-decoration-break: slice; background: linear-gradient(90deg, var(--cached-t) var(--cut), var(--prefilled-t) var(--cut)) }
.t.unread { color: var(--soft); background: none; border-bottom: 1px dotted var(--soft) }
.control { font: 12px/1.5 ui-monospace, "DejaVu Sans Mono", monospace; color: var(--soft); margin-right: 4px; padding: 1px 3px; display: inline-block; max-width: 100% }
.flow > .control:last-child:not(:first-child) { margin: 0 0 0 4px }
.call { background: var(--sampled-t); border-bottom: 2px solid var(--sampled); cursor: help }
.call i.forced { font-style: normal; background: var(--forced-t) !important; box-shadow: 0 2px var(--forced) }
.call i.drafted { font-style: normal; background: var(--drafted-t) !important; box-shadow: 0 2px var(--drafted) }
.call.selected { background: var(--selected-t); border-bottom-color: var(--selected) }
.call.failed { background: var(--failed-t); border-bottom-color: var(--failed) }
.call > b { font-size: 11.5px; font-weight: 600; color: var(--on); background: var(--sampled); border-radius: 4px; padding: 1px 6px; margin: 0 5px 0 0; vertical-align: 1px; white-space: nowrap }
.call.selected > b { background: var(--selected) } .call.failed > b { background: var(--failed) }
.call:hover, .call:target, .call.near { box-shadow: 0 0 0 2px var(--ink) }
.sign { display: none; color: var(--soft); font-size: 12px; margin-right: 3px }
.flow > :first-child > .sign { display: inline } .flow > :first-child > .break { display: none }
.set { font: 12px/1.5 ui-monospace, "DejaVu Sans Mono", monospace; color: var(--soft); border: 1px solid var(--line); border-radius: 4px; padding: 0 6px; margin: 0 4px }
.rest { display: inline } .rest > summary { display: inline-block; margin: 0 6px; padding: 0 9px; border: 1px solid var(--line); border-radius: 999px; list-style: none }
summary { cursor: pointer; color: var(--soft); font-size: 13px }
.fork { margin: 14px 0 14px -22px } .fork > summary { padding: 3px 0 3px 22px; color: var(--ink); font-weight: 550 }
summary small, .join small, h2 small { font-weight: 400; color: var(--soft); font-size: 12.5px }
.limbs { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 250px), 1fr)); gap: 14px; padding: 14px 0 2px 22px; position: relative }
.trunk > .fork > .limbs::before { content: ""; position: absolute; left: 0; top: 0; width: 22px; height: 30px; border-left: 0; border-bottom: 3px solid var(--wood); border-bottom-left-radius: 18px; margin-left: -4px }
.limb { min-width: 0; background: var(--card); border: 1px solid var(--line); border-top: 3px solid var(--wood); border-radius: 10px; padding: 10px 14px 8px; box-shadow: var(--shade); content-visibility: auto; contain-intrinsic-size: auto 160px }
.limb.wide { grid-column: 1 / -1 } .limb.failed { border-top-color: var(--failed) }
.limb .fork { margin-left: -8px } .limb .fork > summary { padding-left: 8px }
h2 { display: flex; justify-content: space-between; gap: 10px; font-size: 13px; font-weight: 600; margin: 0 0 4px; font-variant-numeric: tabular-nums }
.strip { position: relative; height: 4px; background: var(--line); border-radius: 2px; margin: 0 0 9px; overflow: hidden }
.strip i { position: absolute; top: 0; bottom: 0; min-width: 2px }
.more { grid-column: 1 / -1 } .more > .limbs { padding-left: 0 }
.join { margin: 6px 0 14px; font-size: 13px; font-weight: 550 }
.join::before { content: ""; display: inline-block; width: 22px; height: 3px; margin: 0 8px 4px -25px; border-radius: 2px; background: var(--wood) }
.limb .join::before { width: 10px; margin-left: -10px }
.error { margin: 8px 0; padding: 8px 12px; background: var(--failed-t); border-left: 3px solid var(--failed); border-radius: 6px; font-size: 14px; overflow-wrap: anywhere }
.error small { display: block; color: var(--soft) }
#tip { position: absolute; z-index: 9; width: max-content; max-width: min(460px, calc(100vw - 24px)); max-height: 70vh; overflow: auto; background: var(--card); color: var(--ink); border: 1px solid var(--line); border-radius: 12px; padding: 12px 16px; font-size: 13px; line-height: 1.5; box-shadow: 0 2px 6px rgb(0 0 0 / .12), 0 14px 40px rgb(0 0 0 / .18) }
#tip[hidden], #details { display: none }
#tip h3 { margin: 0 0 6px; font-size: 14px } #tip h3 small { font-weight: 400; color: var(--soft) } #tip h4 { margin: 8px 0 0; font-size: 12.5px; color: var(--soft); font-weight: 500 }
#tip dl { display: grid; grid-template-columns: auto 1fr; gap: 1px 14px; margin: 0 } #tip dt { color: var(--soft) } #tip dd { margin: 0; overflow-wrap: anywhere; font-variant-numeric: tabular-nums }
#tip ol { margin: 2px 0 0; padding-left: 20px } #tip p { margin: 6px 0 0 }
.tokens { white-space: pre-wrap } .tokens span { border-bottom: 3px solid color-mix(in srgb, var(--sampled) calc(var(--p) * 100%), var(--failed)); margin-right: 2px }
.masked { display: flex; flex-wrap: wrap; gap: 4px 2px } .masked span { display: inline-block; min-width: 1.6em; text-align: center } .masked .only { border-bottom-color: var(--forced); background: var(--forced-t) }
.masked sub { display: block; font-size: 9.5px; line-height: 1.3; color: var(--soft); font-variant-numeric: tabular-nums }
.choices { list-style: none; margin: 8px 0 0; padding: 0 } .choices li { position: relative; display: flex; justify-content: space-between; gap: 18px; padding: 1px 6px; margin-bottom: 2px }
.choices i { position: absolute; inset: 0 auto 0 0; background: var(--selected-t); border-radius: 4px } .choices span, .choices b { position: relative; font-weight: 400 } .choices .chosen span { font-weight: 650 }
@media (max-width: 640px) { .trunk { padding-left: 14px } }
@media print { .tools { display: none } }
@media (prefers-reduced-motion: no-preference) { .bar rect, .call { transition: stroke .12s, box-shadow .12s } }
"""

# Everything works without it, save the details: they open under the pointer or the focus. Arrows go from call to call.
SCRIPT: Final = """
"use strict";
(() => {
  const tip = document.getElementById("tip");
  const details = new Map([...document.querySelectorAll("#details > div")].map((d) => [d.dataset.for, d]));
  const calls = [...document.querySelectorAll(".call")];
  const bars = new Map();
  for (const bar of document.querySelectorAll(".bar")) bars.set(bar.getAttribute("href").slice(1), bar);
  let shown = null;
  const hide = () => {
    if (!shown) return;
    document.getElementById(shown).classList.remove("near");
    document.getElementById(shown).removeAttribute("aria-describedby");
    bars.get(shown)?.classList.remove("near");
    tip.hidden = true;
    shown = null;
  };
  const show = (name, at) => {
    if (shown === name) return;
    hide();
    const from = details.get(name);
    if (!from) return;
    tip.replaceChildren(...[...from.childNodes].map((node) => node.cloneNode(true)));
    tip.hidden = false;
    const call = document.getElementById(name);
    call.classList.add("near");
    call.setAttribute("aria-describedby", "tip");
    bars.get(name)?.classList.add("near");
    const box = at.getBoundingClientRect(), width = tip.offsetWidth, height = tip.offsetHeight;
    const left = Math.max(12, Math.min(box.left, innerWidth - width - 12));
    const below = box.bottom + 10 + height < innerHeight || box.top < height + 10;
    tip.style.left = `${left + scrollX}px`;
    tip.style.top = `${(below ? box.bottom + 10 : box.top - height - 10) + scrollY}px`;
    shown = name;
  };
  const reveal = (node) => {
    for (let up = node.parentElement; up; up = up.parentElement) if (up.tagName === "DETAILS") up.open = true;
  };
  const go = (call) => {
    reveal(call);
    call.focus();
    call.scrollIntoView({ block: "center" });
    hide();
    show(call.id, call);
  };
  const target = (event) => {
    const call = event.target.closest?.(".call");
    if (call) return [call.id, call];
    const bar = event.target.closest?.(".bar");
    return bar ? [bar.getAttribute("href").slice(1), bar] : null;
  };
  for (const type of ["pointerover", "focusin"]) {
    document.addEventListener(type, (event) => {
      const found = target(event);
      if (found) show(...found);
      else if (!tip.contains(event.target)) hide();
    });
  }
  document.addEventListener("click", (event) => {
    const bar = event.target.closest?.(".bar");
    if (bar) {
      event.preventDefault();
      go(document.getElementById(bar.getAttribute("href").slice(1)));
      return;
    }
    const button = event.target.closest?.("[data-open]");
    if (!button) return;
    for (const fold of button.closest(".run").querySelectorAll(".fork, .more")) fold.open = button.dataset.open === "1";
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") hide();
    const here = calls.indexOf(document.activeElement);
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (here < 0 || !step || !calls[here + step]) return;
    event.preventDefault();
    go(calls[here + step]);
  });
  for (const tools of document.querySelectorAll(".tools")) {
    tools.hidden = !tools.closest(".run").querySelector(".fork");
  }
  for (const chart of document.querySelectorAll(".chart")) {
    const svg = chart.querySelector("svg");
    const scale = svg.getBoundingClientRect().width / svg.viewBox.baseVal.width;
    chart.scrollTop = chart.dataset.middle * scale - chart.clientHeight / 2;
  }
  if (location.hash.length > 1) {
    const call = document.getElementById(location.hash.slice(1));
    if (call) reveal(call);
  }
})();
"""
