// Figures in words, as the terminal writes them: a number here never differs from `show`.
export const DASH = "–";

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return DASH;
  if (seconds < 9.95) return `${Math.max(0, seconds).toFixed(1)}s`;
  const whole = Math.floor(Math.max(0, seconds) + 0.5);
  const minutes = Math.floor(whole / 60);
  const hours = Math.floor(minutes / 60);
  if (hours) return `${hours}h${String(minutes % 60).padStart(2, "0")}m`;
  return minutes ? `${minutes}m${String(whole % 60).padStart(2, "0")}s` : `${whole}s`;
}

/** Commas between thousands. The browser's own way loads all that it knows of languages, which takes long. */
function grouped(digits) {
  const [whole, ...rest] = digits.split(".");
  return [whole.replace(/\B(?=(\d{3})+$)/g, ","), ...rest].join(".");
}

export function usd(amount) {
  if (amount === null || amount === undefined) return DASH;
  const size = Math.abs(amount);
  if (size > 0 && size < 0.1) return size >= 0.00005 ? `$${amount.toFixed(4)}` : "under $0.0001";
  return amount < 0 ? `$-${grouped(size.toFixed(2))}` : `$${grouped(size.toFixed(2))}`;
}

export function count(n) {
  return n === null || n === undefined ? DASH : grouped(String(n));
}

export function number(value) {
  if (value === null || value === undefined) return DASH;
  return grouped(String(Number(value.toFixed(3))));
}

export function percent(share, digits = 1) {
  return share === null || share === undefined ? DASH : `${(100 * share).toFixed(digits)}%`;
}

/** `31 to 47`: an interval beside its rate, which has the sign. */
export function span(low, high) {
  if (low === null || low === undefined || high === null || high === undefined) return "";
  const digits = high - low < 0.02 ? 1 : 0;
  return `${(100 * low).toFixed(digits)} to ${(100 * high).toFixed(digits)}`;
}

export function bytes(n) {
  if (n === null || n === undefined) return DASH;
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (n >= 1000 && unit < units.length - 1) {
    n /= 1000;
    unit += 1;
  }
  return `${unit ? n.toFixed(n < 10 ? 1 : 0) : n} ${units[unit]}`;
}

const pad = (n) => String(n).padStart(2, "0");

/** Local time; with the day if it is not that of `beside`. */
export function clock(ms, beside = Date.now()) {
  if (ms === null || ms === undefined) return DASH;
  const at = new Date(ms);
  const time = `${pad(at.getHours())}:${pad(at.getMinutes())}`;
  return at.toDateString() === new Date(beside).toDateString() ? time : `${day(ms)} ${time}`;
}

/** With its second: for what is looked at closely. */
export const second = (ms, beside = ms) => `${clock(ms, beside)}:${pad(new Date(ms).getSeconds())}`;

function day(ms) {
  const at = new Date(ms);
  return `${at.getFullYear()}-${pad(at.getMonth() + 1)}-${pad(at.getDate())}`;
}

export function utc(ms) {
  return ms === null || ms === undefined ? "" : `${new Date(ms).toISOString().slice(0, 19).replace("T", " ")} UTC`;
}

/** Milliseconds of what a document tells as text (`2026-11-16T19:40:00Z`) or as a number. */
export function instant(value) {
  if (value === null || value === undefined || typeof value === "number") return value ?? null;
  const ms = Date.parse(value);
  return Number.isNaN(ms) ? null : ms;
}

export function plural(n, noun) {
  return `${count(n)} ${noun}${n === 1 ? "" : "s"}`;
}

export const words = (name) => String(name ?? "").replaceAll("_", " ");

// Characters that would change how the text around them is read: directions, controls, things without a width.
const UNSEEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]/g;

/** Text that somebody else wrote, with everything visible that a reader would not see, and cut to a length. */
export function plain(text, most = 2000) {
  const all = String(text ?? "");
  const cut = all.length > most ? `${all.slice(0, most)} … (${count(all.length)} characters)` : all;
  return cut.replace(UNSEEN, (c) => `\\u${c.charCodeAt(0).toString(16).padStart(4, "0")}`);
}
