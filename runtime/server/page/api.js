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
  const answer = await fetch(path, { method, headers, signal, body: body === undefined ? undefined : JSON.stringify(body) });
  if (answer.ok) return answer;
  const told = await answer.json().catch(() => ({ error: { message: `the server answered ${answer.status}` } }));
  throw new Refusal(answer.status, told.error);
}

export const get = async (path) => (await send("GET", path)).json();
export const post = async (path, body) => (await send("POST", path, body)).json();
export const remove = async (path) => (await send("DELETE", path)).json();

// The chunks of a streamed answer, as they come. An error in the stream is thrown.
export async function* stream(path, body, signal) {
  const answer = await send("POST", path, { ...body, stream: true }, signal);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
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
