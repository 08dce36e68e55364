// The page: sessions on the left, the conversation in the middle, what shapes the answer on the right.
import { get, keepKey, post, Refusal, remove, stream } from "./api.js";
import { watch } from "./engine.js";
import { draw, element, parse } from "./growing.js";
import { written } from "./written.js";

const $ = (id) => document.getElementById(id);
const EXAMPLE = {
  type: "object",
  properties: { name: { type: "string" }, role: { type: "string" }, city: { type: "string" } },
  required: ["name", "role", "city"],
  additionalProperties: false,
};
const TITLE_LENGTH = 40;
const SESSIONS_A_PAGE = 100; // as many as the server gives at once
const OF_SESSIONS = ["rename", "export", "delete"]; // buttons that do something to the open one

let session = null; // the id of the open one, which is what stands on the page; null: it is made with its first message
let opening = 0; // how often one was clicked
let listing = 0; // how often the list was asked for
let listed = SESSIONS_A_PAGE; // of the sessions, the newest
let running = null; // the AbortController of the answer that is being written

// -- sessions --------------------------------------------------------------------------------------------------------

async function listSessions() {
  listing += 1;
  const mine = listing;
  const data = [];
  let more = true;
  while (more && data.length < listed) {
    const last = data.length ? `&after=${data.at(-1).id}` : "";
    const page = await get(`v1/sessions?limit=${SESSIONS_A_PAGE}${last}`);
    data.push(...page.data);
    more = page.has_more;
  }
  if (listing !== mine) return; // it was asked for again meanwhile, and may be another one since
  $("older").hidden = !more;
  $("sessions").replaceChildren(...data.map((one) => {
    const item = element("li");
    const button = element("button");
    button.append(element("span", "", one.title || "Untitled"));
    button.type = "button";
    button.dataset.session = one.id;
    button.title = button.textContent; // which may be cut off
    button.setAttribute("aria-current", String(one.id === session));
    button.addEventListener("click", guarded(() => open(one.id)));
    item.append(button);
    return item;
  }));
}

async function open(id) {
  running?.abort();
  opening += 1;
  const mine = opening;
  const told = id === null ? { title: "New session", turns: [] } : await found(id);
  if (opening !== mine) return; // another one was clicked meanwhile
  running?.abort(); // what was asked meanwhile, in the one before
  session = id;
  $("talk-title").textContent = told.title || "Untitled";
  for (const name of OF_SESSIONS) $(name).disabled = id === null;
  $("turns").replaceChildren(...told.turns.map(turnElement));
  scrollDown();
  await listSessions();
}

// A session; until it is there the one before stays open, and what is done is done to that.
async function found(id) {
  try {
    return await get(`v1/sessions/${id}`);
  } catch (error) {
    if (error.status === 404) await listSessions(); // deleted elsewhere: it is to be clicked no more
    throw error;
  }
}

function turnElement(turn) {
  const made = element("div", "turn");
  made.dataset.turn = turn.id;
  for (const message of turn.messages) made.append(messageElement(message.role, textOf(message)));
  made.append(toldElement(turn));
  return made;
}

// A client may have said it in parts.
function textOf({ content, refusal }) {
  const parts = Array.isArray(content) ? content : [{ text: content, refusal }];
  return parts.map((part) => part.text ?? part.refusal ?? "").join("");
}

function messageElement(role, content) {
  const made = element("div", `said ${role}`);
  made.append(element("span", "hidden", `${role}: `));
  const body = element("div", "body");
  made.append(body);
  show(body, content, false);
  return made;
}

// A JSON object is drawn as one; everything else is text, and code in it.
function show(body, content, isGrowing) {
  body.classList.toggle("growing", isGrowing);
  if (content.trimStart().startsWith("{")) {
    try {
      body.replaceChildren(draw(parse(content)));
      return;
    } catch { /* it only looked like JSON */ }
  }
  body.replaceChildren(...written(content));
}

function toldElement(turn) {
  const told = element("div", "told");
  if (turn.usage) {
    const { prompt_tokens: prompt, completion_tokens: written, prompt_tokens_details: details } = turn.usage;
    const ended = turn.finish_reason === "length" ? ", cut off" : "";
    told.append(element("span", "", `${written} tokens${ended}; ${details.cached_tokens} of ${prompt} before them from the cache`));
  }
  told.append(
    action("Branch here", () => branch(turn.id)),
    action("Rewind to here", () => rewind(turn.id)),
  );
  return told;
}

function action(name, work) {
  const button = element("button", "quiet", name);
  button.type = "button";
  button.addEventListener("click", guarded(work));
  return button;
}

async function branch(turn) {
  const twin = await post(`v1/sessions/${session}/branch`, { turn, title: branchTitle($("talk-title").textContent) });
  await open(twin.id);
}

// One that no session on the list has, whose end says that it is a branch, of a branch too.
function branchTitle(title) {
  const trunk = title.replace(/ \(branch( \d+)?\)$/, "");
  const taken = new Set([...$("sessions").querySelectorAll("button")].map((one) => one.title));
  let [number, found] = [1, `${trunk} (branch)`];
  while (taken.has(found)) found = `${trunk} (branch ${number += 1})`;
  return found;
}

async function rewind(turn) {
  const behind = [...$("turns").children].findIndex((one) => one.dataset.turn === turn);
  const count = $("turns").children.length - 1 - behind;
  if (count && !confirm(`Take back the ${count === 1 ? "turn" : `${count} turns`} behind this one?`)) return;
  await post(`v1/sessions/${session}/rewind`, { turn });
  await open(session);
}

async function deleteSession() {
  if (!confirm(`Delete the session "${$("talk-title").textContent}"?`)) return;
  await remove(`v1/sessions/${session}`);
  await open(null);
}

async function renameSession() {
  const title = prompt("Title of this session:", $("talk-title").textContent);
  if (title === null) return;
  const here = session;
  const changed = await post(`v1/sessions/${here}`, { title: title.trim() || null });
  if (session === here) $("talk-title").textContent = changed.title || "Untitled"; // else another one was clicked meanwhile
  await listSessions();
}

async function importSession() {
  const [file] = $("import-file").files;
  $("import-file").value = ""; // so that the same file may be chosen once more
  if (file === undefined) return;
  let found;
  try {
    found = JSON.parse(await file.text());
  } catch (error) {
    throw new Error(`${file.name} is not an exported session: ${error.message}`);
  }
  await open((await post("v1/sessions", found)).id);
}

async function exportSession() {
  const found = await get(`v1/sessions/${session}`);
  const link = element("a");
  link.href = URL.createObjectURL(new Blob([JSON.stringify(found, null, 2)], { type: "application/json" }));
  link.download = `${session}.json`;
  link.click();
  URL.revokeObjectURL(link.href);
}

// -- the conversation ------------------------------------------------------------------------------------------------

async function ask(text) {
  const asked = request(text); // before a session is made for what cannot be asked
  running = new AbortController(); // before anything is waited for: a second click asks nothing, another session ends it
  const { signal } = running;
  busy(true);
  $("draft").value = "";
  const shown = element("div", "turn");
  const answer = messageElement("assistant", "");
  shown.append(messageElement("user", text), answer);
  $("turns").append(shown);
  scrollDown();
  let told = "";
  try {
    const here = session ?? await begin(titleOf(text));
    signal.throwIfAborted();
    const turn = await answerInto(answer.querySelector(".body"), here, asked, signal);
    following(() => shown.append(toldElement(turn)));
    shown.dataset.turn = turn.id;
  } catch (error) {
    shown.remove(); // a turn that did not end was never said
    $("draft").value ||= text;
    if (error.name !== "AbortError") throw error;
    told = "Stopped; this turn was not kept.";
  } finally {
    running = null;
    busy(false);
  }
  $("state").textContent = told;
  await listSessions();
}

// A session for its first message; its id.
async function begin(title) {
  const { id } = await post("v1/sessions", { title });
  if (session === null) { // else another one was clicked meanwhile
    session = id;
    $("talk-title").textContent = title;
    for (const name of OF_SESSIONS) $(name).disabled = false;
  }
  await listSessions();
  return id;
}

// The first line, cut off behind a word.
function titleOf(text) {
  const [line] = text.split("\n");
  if (line.length <= TITLE_LENGTH) return line;
  const cut = line.slice(0, TITLE_LENGTH).replace(/\s+\S*$/, "");
  return `${cut}…`;
}

// What is sent for a message. Throws an Error that says what of it cannot be.
function request(text) {
  const asked = { messages: [{ role: "user", content: text }], stream_options: { include_usage: true }, ...sampling() };
  if ($("shaped").checked) asked.response_format = { type: "json_schema", json_schema: { name: "answer", schema: schema() } };
  return asked;
}

async function answerInto(body, here, asked, signal) {
  const turn = {};
  let content = "";
  let frame = 0; // what draws the next one: once for all that has come, or a quick answer leaves no time for a click
  const drawGrowing = () => {
    frame = 0;
    following(() => show(body, content, true));
  };
  for await (const chunk of stream(`v1/sessions/${here}/chat/completions`, asked, signal)) {
    content += chunk.choices[0]?.delta.content ?? "";
    turn.id = chunk.turn ?? turn.id;
    turn.usage = chunk.usage ?? turn.usage;
    turn.finish_reason = chunk.choices[0]?.finish_reason ?? turn.finish_reason;
    frame ||= requestAnimationFrame(drawGrowing);
  }
  cancelAnimationFrame(frame);
  following(() => show(body, content, false));
  return turn;
}

// What stands in its box. Throws an Error that says so where that is not JSON.
function schema() {
  try {
    return JSON.parse($("schema").value);
  } catch (error) {
    throw new Error(`The schema is not JSON yet: ${error.message}`);
  }
}

function sampling() {
  const said = {};
  for (const { name, type, value } of $("sampling").querySelectorAll("input"))
    if (value !== "") said[name] = type === "number" ? Number(value) : value;
  return said;
}

function busy(is) {
  $("send").disabled = is;
  $("stop").disabled = !is;
  $("state").textContent = is ? "Writing…" : "";
  $("turns").setAttribute("aria-busy", String(is));
}

function scrollDown() {
  $("turns").scrollTop = $("turns").scrollHeight;
}

// Draw something, and stay at the end if that is where the reader is: who reads further up is left there.
function following(work) {
  const { scrollHeight, scrollTop, clientHeight } = $("turns");
  work();
  if (scrollHeight - scrollTop - clientHeight < 40) scrollDown();
}

// -- the rest of the page --------------------------------------------------------------------------------------------

function guarded(work) {
  return async (event) => {
    following(() => { $("problem").hidden = true; });
    try {
      await work(event);
    } catch (error) {
      if (error instanceof Refusal && error.status === 401) return $("key-dialog").showModal();
      following(() => {
        $("problem").textContent = error.message;
        $("problem").hidden = false;
      });
    }
  };
}

function checkSchema() {
  let told = "";
  try {
    schema();
  } catch (error) {
    told = error.message;
  }
  $("schema-state").textContent = told;
  $("schema").setAttribute("aria-invalid", String(told !== ""));
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  $("theme").textContent = theme === "dark" ? "Light" : "Dark";
  $("theme").setAttribute("aria-label", `Switch to the ${theme === "dark" ? "light" : "dark"} theme`);
}

async function start() {
  const { data } = await get("v1/models");
  $("model").textContent = `${data[0].id}, ${data[0].max_model_len.toLocaleString("en")} tokens`;
  await listSessions();
}

const dark = matchMedia("(prefers-color-scheme: dark)"); // what the system asks for, until somebody chooses
const followSystem = () => setTheme(dark.matches ? "dark" : "light");
followSystem();
dark.addEventListener("change", followSystem);
$("schema").value = JSON.stringify(EXAMPLE, null, 1);
$("theme").addEventListener("click", () => {
  dark.removeEventListener("change", followSystem);
  setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark");
});
$("schema").addEventListener("input", checkSchema);
$("new").addEventListener("click", guarded(async () => { await open(null); $("draft").focus(); }));
$("older").addEventListener("click", guarded(async () => { listed += SESSIONS_A_PAGE; await listSessions(); }));
$("import").addEventListener("click", () => $("import-file").click());
$("import-file").addEventListener("change", guarded(importSession));
$("rename").addEventListener("click", guarded(renameSession));
$("export").addEventListener("click", guarded(exportSession));
$("delete").addEventListener("click", guarded(deleteSession));
$("stop").addEventListener("click", () => running?.abort());
$("ask").addEventListener("submit", guarded(async (event) => {
  event.preventDefault();
  const text = $("draft").value.trim();
  if (text && running === null) await ask(text);
}));
$("draft").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  $("ask").requestSubmit();
});
$("key-dialog").addEventListener("close", guarded(async () => { keepKey($("key").value); await start(); }));
guarded(start)();
watch(() => $("live").checked, (told) => {
  if (told === $("away").textContent) return;
  $("away").textContent = told;
  if (!told) guarded(start)(); // it is back, maybe another one
});
