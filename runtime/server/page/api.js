// The server as this page asks it: JSON in, JSON out, and streams of events. Knows nothing of the page.

export class Refusal extends Error {
  constructor(status, error) {
    super(error.message);
    this.status = status;
    this.code = error.code;
  }
}

const KEY = "niwaki-key";
export const keepKey = (key) => sessionStorage.setItem(KEY, key);

async function send(method, path, body, signal) {
  const headers = {};
  const key = sessionStorage.getItem(KEY);
  if (key) headers.authorization = `Bearer ${key}`;
  if (body !== undefined) headers["content-type"] = "application/json";
  const sent = body === undefined ? undefined : JSON.stringify(body);
  const answer = await fetch(path, { method, headers, signal, body: sent }).catch(unlessOurs("The server cannot be reached."));
  if (answer.ok) return answer;
  const told = await answer.json().catch(() => null); // what stands before the server may answer for it
  throw new Refusal(answer.status, told?.error?.message ? told.error : { message: `The server answered ${answer.status}.` });
}

// What a failed fetch is told as. Who stopped it himself needs no telling.
const unlessOurs = (message) => (error) => { throw error.name === "AbortError" ? error : new Error(message); };

export const get = async (path) => (await send("GET", path)).json();
export const post = async (path, body) => (await send("POST", path, body)).json();
export const remove = async (path) => (await send("DELETE", path)).json();

const CUT_OFF = "The connection was lost before the answer ended. Open the session anew to see whether it was kept.";

// The chunks of a streamed answer, as they come. An error in the stream is thrown, and one where it ends before its end.
export async function* stream(path, body, signal) {
  const answer = await send("POST", path, { ...body, stream: true }, signal);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read().catch(unlessOurs(CUT_OFF));
    if (done) throw new Error(CUT_OFF);
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const data = event.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Refusal(200, chunk.error);
      yield chunk;
    }
  }
}
