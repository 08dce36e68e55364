// JSON that is still being written: what of it is there, and how it is drawn.

// The value of a text that may stop anywhere. `open` is true on values that have not ended.
// A node is {kind, open, value} or {kind: "object" | "array", open, parts: [[name, node], ...]}; null before anything came.
// Throws a SyntaxError where no JSON begins like this, or something stands behind its end.
export function parse(text) {
  let at = 0;
  const blanks = () => { while (at < text.length && " \n\r\t".includes(text[at])) at += 1; };

  // Pass a sign that has to be here; false where the text stops before it.
  function passed(sign) {
    blanks();
    if (at >= text.length) return false;
    if (text[at] !== sign) throw new SyntaxError(`no ${sign} at ${at}`);
    at += 1;
    return true;
  }

  function string() {
    let end = at + 1;
    let whole = end; // behind the last sign or escape that is all there: what is there of the next means nothing yet
    while (end < text.length && text[end] !== '"') {
      end += text[end] !== "\\" ? 1 : text[end + 1] === "u" ? 6 : 2;
      if (end <= text.length) whole = end;
    }
    const open = end >= text.length;
    const inside = text.slice(at + 1, whole);
    at = Math.min(end + 1, text.length);
    return { kind: "string", open, value: JSON.parse(`"${inside}"`) };
  }

  function word() {
    const found = /^[^\s,\]}]*/.exec(text.slice(at))[0];
    const begins = found && ["true", "false", "null", "-"].some((one) => one.startsWith(found));
    if (!begins && !/^-?\d[\d.eE+-]*$/.test(found)) throw new SyntaxError(`no value at ${at}`);
    at += found.length;
    return { kind: "word", open: at >= text.length, value: found };
  }

  function group(kind, closing) {
    const node = { kind, open: true, parts: [] };
    at += 1;
    for (;;) {
      blanks();
      if (text[at] === closing) { at += 1; node.open = false; return node; }
      if (node.parts.length && !passed(",")) return node;
      blanks();
      if (at >= text.length) return node;
      if (kind === "array") { node.parts.push([null, value()]); continue; }
      if (text[at] !== '"') throw new SyntaxError(`no name at ${at}`);
      const name = string().value;
      node.parts.push([name, passed(":") ? value() : null]);
    }
  }

  function value() {
    blanks();
    if (at >= text.length) return null;
    if (text[at] === "{") return group("object", "}");
    if (text[at] === "[") return group("array", "]");
    return text[at] === '"' ? string() : word();
  }

  const found = value();
  blanks();
  if (at < text.length) throw new SyntaxError(`more at ${at}`);
  return found;
}

export function draw(node) {
  if (node === null) return element("span", "json-value growing", "");
  if (node.kind === "string" || node.kind === "word")
    return element("span", `json-value${node.open && node.kind === "string" ? " growing" : ""}`, node.value);
  const list = element("ul", `json${node.open ? " growing" : ""}`);
  node.parts.forEach(([name, part], index) => {
    const item = element("li");
    item.append(element("span", "name", name === null ? `${index + 1}. ` : `${name}: `), draw(part));
    list.append(item);
  });
  return list;
}

export function element(kind, className = "", text = null) {
  const made = document.createElement(kind);
  if (className) made.className = className;
  if (text !== null) made.textContent = text;
  return made;
}
