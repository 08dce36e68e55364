// A message as it is shown: what stands between fences is code, everything else is text as it was written.
import { element } from "./growing.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})[ \t]*([^`\s]*)[^`]*$/;

// Nodes for a text that may stop anywhere: a fence that is still open is code, and has the class "growing".
export function written(text) {
  const nodes = [];
  let lines = [];
  let fence = null; // of the code that these lines are
  const end = (isOpen) => {
    if (fence) nodes.push(code(fence.language, lines.join("\n"), isOpen));
    else if (lines.length) nodes.push(document.createTextNode(lines.join("\n")));
    lines = [];
  };
  for (const line of text.split("\n")) {
    const [, signs, language] = FENCE.exec(line) ?? [];
    const isEnd = fence && signs?.[0] === fence.signs[0] && signs.length >= fence.signs.length && line.trim() === signs;
    if (isEnd || (signs && !fence)) {
      end(false);
      fence = isEnd ? null : { signs, language };
    } else lines.push(line);
  }
  end(true);
  return nodes;
}

function code(language, text, isOpen) {
  const block = element("pre", "code");
  block.tabIndex = 0; // long lines are scrolled to, by the keyboard too
  block.setAttribute("role", "group");
  block.setAttribute("aria-label", language ? `Code: ${language}` : "Code");
  block.append(element("code", isOpen ? "growing" : "", text));
  return block;
}
