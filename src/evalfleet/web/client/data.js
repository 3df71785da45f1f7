// Where data come from: inside the file, if it is the one to send, else the server.
import { embedded, encoded } from "./route.js";

export const api = (...parts) => `/api/${parts.map(encoded).join("/")}`;

/** What the server, or the file, refuses or does not have: one line for people. */
class Missing extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

let inside = null;

async function unpacked() {
  const text = document.getElementById("data").textContent.trim();
  const packed = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const data = JSON.parse(await new Response(stream).text());
  document.getElementById("data").textContent = "";
  return data;
}

function documents() {
  inside ??= unpacked();
  return inside;
}

const LEFT_OUT = "This file does not hold it: it was left out for size. The run's home has it.";

export async function get(path) {
  if (embedded) {
    const data = await documents();
    if (path in data.documents) return data.documents[path];
    throw new Missing(LEFT_OUT, 404);
  }
  let response;
  try {
    response = await fetch(path); // without headers of its own: one that was preloaded is taken then
  } catch {
    throw new Missing("The server cannot be reached; it is tried again.", 0);
  }
  const reply = await response.json().catch(() => null);
  if (response.ok) return reply;
  if (response.status === 401 || response.status === 403) throw new Missing("This page may not see it: open the link that `evalfleet serve` has printed.", response.status);
  throw new Missing(reply?.error ?? `The server answers ${response.status}.`, response.status);
}

export async function post(path, body) {
  const response = await fetch(path, {
    method: "POST",
    headers: { "Content-Type": "application/json", "X-Evalfleet": "1" },
    body: JSON.stringify(body),
  }).catch(() => null);
  const reply = await response?.json().catch(() => null);
  if (!response) throw new Missing("The server cannot be reached: nothing was changed.", 0);
  if (!response.ok) throw new Missing(reply?.error ?? `The server answers ${response.status}: nothing was changed.`, response.status);
  return reply ?? {};
}

const urls = new Map();

/** A URL of an image, for `src`; null if the file does not hold it. */
export async function picture(path) {
  if (!embedded) return path;
  if (!urls.has(path)) {
    const image = (await documents()).images[path];
    if (!image) return null;
    if (image.url) return image.url;
    const raw = Uint8Array.from(atob(document.getElementById(image.id).textContent.trim()), (c) => c.charCodeAt(0));
    urls.set(path, URL.createObjectURL(new Blob([raw], { type: image.type })));
  }
  return urls.get(path);
}

/** What the file says of itself: when it was made, what was left out. Null where a server answers. */
export async function about() {
  return embedded ? (await documents()).about : null;
}

let known = null;

/** What this server allows: asked once. A file, or a server that does not tell, allows nothing. */
export function session() {
  known ??= embedded ? Promise.resolve({ read_only: true }) : get("/api/session").catch(() => ({ read_only: true }));
  return known;
}
