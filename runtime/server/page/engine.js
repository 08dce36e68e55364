// The engine as it works: numbers, rates over the last minute, and the caller's part of the radix tree.
import { get, Refusal } from "./api.js";
import { element } from "./growing.js";

const SECOND = 1000;
const MINUTE = 60;
const RATES = [["generated", "generated_tokens"], ["cached", "cached_tokens"], ["computed", "prefilled_tokens"]];
const ROW = 24;
const INDENT = 12;
const MOST_NODES = 120; // that are asked for
const EDGE = 2; // around the drawing
const NARROWEST = 120; // of a box, however deep it stands
const LETTER = 6.7;

const history = []; // of rates, one a second
let before = null;

// Draws the engine once a second while `isWanted()`; `tell` is called with what is wrong with the server, or "".
export function watch(isWanted, tell) {
  const look = async () => {
    if (isWanted() && !document.hidden) {
      try {
        const { nodes, usage } = await get(`debug/tree?limit=${MOST_NODES}`);
        showNumbers(usage);
        showRates(usage);
        showTree(nodes);
        tell("");
      } catch (error) {
        before = null;
        if (!(error instanceof Refusal)) tell(`${error.message} This page looks for it again every second.`);
        else if (error.status !== 401) tell(error.message); // else a key is asked for
      }
    }
    setTimeout(look, SECOND);
  };
  look();
}

function showNumbers(usage) {
  const pages = usage.pages_free + usage.pages_tree + usage.pages_held;
  const prompt = usage.cached_tokens + usage.prefilled_tokens;
  const told = [
    ["running", usage.requests_running], ["waiting", usage.requests_waiting],
    ["prompt from cache", prompt ? `${Math.round((100 * usage.cached_tokens) / prompt)} %` : "–"],
    ["tokens generated", usage.generated_tokens.toLocaleString("en")],
    ["pages in the tree", usage.pages_tree.toLocaleString("en")],
    ["pages free", `${Math.round((100 * usage.pages_free) / pages)} %`],
  ];
  document.getElementById("numbers").replaceChildren(...told.map(([name, value]) => {
    const pair = element("div");
    pair.append(element("dt", "", name), element("dd", "", String(value)));
    return pair;
  }));
}

function showRates(usage) {
  const now = performance.now();
  if (before !== null) {
    const seconds = (now - before.now) / SECOND;
    history.push(Object.fromEntries(RATES.map(([name, counter]) => [name, (usage[counter] - before.usage[counter]) / seconds])));
    if (history.length > MINUTE) history.shift();
  }
  before = { now, usage };
  const highest = Math.max(0, ...history.flatMap((rates) => Object.values(rates)));
  const most = Math.max(10, highest);
  const lines = RATES.map(([name]) => svg("polyline", {
    class: name,
    points: history.map((rates, second) =>
      `${300 - (history.length - 1 - second) * (300 / (MINUTE - 1))},${58 - 54 * (rates[name] / most)}`).join(" "),
  }));
  const picture = document.getElementById("rates");
  picture.replaceChildren(...lines);
  const last = history.at(-1);
  if (!last) return;
  document.getElementById("rate-most").textContent = Math.round(highest).toLocaleString("en");
  for (const [name] of RATES) document.getElementById(`rate-${name}`).textContent = Math.round(last[name]).toLocaleString("en");
  picture.setAttribute("aria-label",
    `Tokens a second, now: ${RATES.map(([name]) => `${name} ${Math.round(last[name])}`).join(", ")}`);
}

function showTree(nodes) {
  const children = nodes.map(() => []);
  const roots = [];
  nodes.forEach((node, index) => (node.parent === null ? roots : children[node.parent]).push(index));
  const longest = Math.max(1, ...nodes.map((node) => node.num_tokens));
  const drawn = [];
  const all = document.getElementById("tree-frame").clientWidth - 2 * EDGE; // what a scroll bar leaves
  let row = 0;

  function place(index, depth) { // one row each, children below their parent
    const [x, y] = [Math.min(depth * INDENT, Math.max(0, all - NARROWEST)), row * ROW];
    row += 1;
    drawn.push(box(nodes[index], x, y, all - x, longest));
    for (const child of children[index]) {
      drawn.push(svg("path", { d: `M${x + 4} ${y + ROW - 4}V${row * ROW + ROW / 2 - 2}h${INDENT - 4}` }));
      place(child, depth + 1);
    }
  }

  for (const root of roots) place(root, 0);
  const tree = document.getElementById("tree");
  const [width, height] = [all + 2 * EDGE, row * ROW + 2 * EDGE];
  const size = { width, height, viewBox: `${-EDGE} ${-EDGE} ${width} ${height}` };
  for (const [name, value] of Object.entries(size)) tree.setAttribute(name, value);
  tree.replaceChildren(...drawn);
  const tokens = nodes.reduce((sum, node) => sum + node.num_tokens, 0);
  const order = `${tokens.toLocaleString("en")} tokens, the latest first`;
  const about = nodes.length ? `${nodes.length === MOST_NODES ? "The latest " : ""}${nodes.length} nodes, ${order}` : "Nothing is cached yet.";
  document.getElementById("tree-about").textContent = about;
  tree.setAttribute("aria-label", `Radix tree: ${about}`);
}

function box(node, x, y, width, longest) {
  const kind = node.num_locks ? "locked" : node.is_pinned ? "pinned" : "idle";
  const group = svg("g", { class: kind, transform: `translate(${x} ${y})` });
  const text = node.text.replaceAll("\n", "↵");
  const title = svg("title");
  title.textContent = `${text}${node.is_cut ? "…" : ""}\n${node.num_tokens} tokens, ${node.num_pages} pages`;
  const label = svg("text", { x: 6, y: 13 });
  const count = String(node.num_tokens);
  const room = Math.floor((width - 12) / LETTER) - count.length - 2;
  label.textContent = text.length > room ? `${text.slice(0, room - 1)}…` : text;
  const tokens = svg("text", { x: width - 6, y: 13, "text-anchor": "end", class: "count" });
  tokens.textContent = count;
  group.append(title, svg("rect", { width, height: ROW - 4, rx: 4 }),
    svg("rect", { class: "bar", y: ROW - 7, x: 2, height: 2, width: (width - 4) * (node.num_tokens / longest) }), label, tokens);
  return group;
}

function svg(kind, attributes = {}) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", kind);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}
