// The engine as it works: numbers, rates over the last minute, and the caller's part of the radix tree.
import { get } from "./api.js";
import { element } from "./growing.js";

const SECOND = 1000;
const MINUTE = 60;
const RATES = [["generated", "generated_tokens"], ["cached", "cached_tokens"], ["computed", "prefilled_tokens"]];
const ROW = 26;
const COLUMN = 190;
const WIDTH = 170;

const history = []; // of rates, one a second
let before = null;

export function watch(isWanted) {
  const look = async () => {
    if (isWanted() && !document.hidden) {
      try {
        const { nodes, usage } = await get("debug/tree?limit=120");
        showNumbers(usage);
        showRates(usage);
        showTree(nodes);
      } catch { before = null; } // a server that is away: the next look tells
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
  const most = Math.max(10, ...history.flatMap((rates) => Object.values(rates)));
  const lines = RATES.map(([name]) => svg("polyline", {
    class: name,
    points: history.map((rates, second) =>
      `${300 - (history.length - 1 - second) * (300 / (MINUTE - 1))},${58 - 54 * (rates[name] / most)}`).join(" "),
  }));
  const picture = document.getElementById("rates");
  picture.replaceChildren(...lines);
  const last = history.at(-1);
  if (last) picture.setAttribute("aria-label",
    `Tokens a second, now: ${RATES.map(([name]) => `${name} ${Math.round(last[name])}`).join(", ")}`);
}

function showTree(nodes) {
  const children = nodes.map(() => []);
  const roots = [];
  nodes.forEach((node, index) => (node.parent === null ? roots : children[node.parent]).push(index));
  const longest = Math.max(1, ...nodes.map((node) => node.num_tokens));
  const drawn = [];
  let row = 0;
  let deepest = 0;

  function place(index, depth) { // a node stands beside its first child
    const y = row * ROW;
    const x = depth * COLUMN;
    deepest = Math.max(deepest, depth);
    children[index].forEach((child, order) => {
      if (order > 0) row += 1;
      const half = ROW / 2 - 2;
      drawn.push(svg("path", { d: `M${x + WIDTH} ${y + half}H${x + WIDTH + 10}V${row * ROW + half}H${x + COLUMN}` }));
      place(child, depth + 1);
    });
    drawn.push(box(nodes[index], x, y, longest));
  }

  roots.forEach((root, order) => { if (order > 0) row += 1; place(root, 0); });
  const tree = document.getElementById("tree");
  const [width, height] = [(deepest + 1) * COLUMN, nodes.length ? (row + 1) * ROW : 0];
  for (const [name, value] of [["width", width], ["height", height], ["viewBox", `-2 -2 ${width + 4} ${height + 4}`]])
    tree.setAttribute(name, value);
  tree.replaceChildren(...drawn);
  const tokens = nodes.reduce((sum, node) => sum + node.num_tokens, 0);
  const about = nodes.length ? `${nodes.length} nodes, ${tokens.toLocaleString("en")} tokens, the latest first` : "Nothing is cached yet.";
  document.getElementById("tree-about").textContent = about;
  tree.setAttribute("aria-label", `Radix tree: ${about}`);
}

function box(node, x, y, longest) {
  const kind = node.is_locked ? "locked" : node.is_pinned ? "pinned" : "idle";
  const group = svg("g", { class: kind, transform: `translate(${x} ${y})` });
  const text = node.text.replaceAll("\n", "↵");
  const title = svg("title");
  title.textContent = `${text}${node.is_cut ? "…" : ""}\n${node.num_tokens} tokens, ${node.num_pages} pages`;
  const label = svg("text", { x: 6, y: 14 });
  label.textContent = text.length > 23 ? `${text.slice(0, 22)}…` : text;
  group.append(title, svg("rect", { width: WIDTH, height: ROW - 4, rx: 4 }),
    svg("rect", { class: "bar", y: ROW - 7, x: 2, height: 2, width: (WIDTH - 4) * (node.num_tokens / longest) }), label);
  return group;
}

function svg(kind, attributes = {}) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", kind);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}
