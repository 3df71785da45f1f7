// Small parts that all pages share: marks, bars, dots, times, dashes with a reason.
import { Component, html, useEffect, useState, useSignal, useNow } from "./base.js";
import { DASH, clock, count, duration, percent, plain, span, usd, utc, words } from "./format.js";
import { get, picture, session } from "./data.js";
import { embedded, link } from "./route.js";
import { LATE_MS, runStore } from "./store.js";

export const OUTCOMES = ["pass", "fail", "broken", "running", "answered", "waiting", "unrun"];

/** The shape of an outcome. Its word stands beside it, or is told to screen readers. */
export function Mark({ outcome, word = false }) {
  const name = OUTCOMES.includes(outcome) ? outcome : "waiting";
  return html`<span class="mark-box"><span class=${`mark ${name}`} role="img" aria-label=${outcome} title=${outcome}></span>${word && html`<span aria-hidden="true">${outcome}</span>`}</span>`;
}

/** What waits in a run that is over will not be run. */
export const settledCounts = (counts, over) => (over ? { ...counts, waiting: 0, unrun: counts.waiting } : counts);

/** How many of each, as one bar: shapes as everywhere, widths by their share. */
export function Bar({ counts, total, label }) {
  const shares = OUTCOMES.map((name) => [name, counts[name] ?? 0]).filter(([, n]) => n);
  const told = shares.map(([name, n]) => `${count(n)} ${name}`).join(", ");
  return html`<div class="bar" role="img" aria-label=${`${label ?? ""}${label ? ": " : ""}${told} of ${count(total)}`} title=${told}>
    ${shares.map(([name, n]) => html`<span key=${name} class=${`share ${name}`} style=${{ flexGrow: n }}></span>`)}
  </div>`;
}

export const Unknown = ({ why }) => html`<span class="unknown" title=${why} aria-label=${`unknown: ${why}`} role="note">${DASH}</span>`;

/** A figure, or a dash with the reason why there is none. */
export function Figure({ value, of = count, why = "nothing tells it yet" }) {
  return value === null || value === undefined ? html`<${Unknown} why=${why} />` : html`<span>${of(value)}</span>`;
}

export function Rate({ rate, low, high, why = "no task has a score yet" }) {
  if (rate === null || rate === undefined) return html`<${Unknown} why=${why} />`;
  const told = low === null || low === undefined ? "" : `95% interval ${percent(low)} to ${percent(high)}`;
  return html`<span class="rate" title=${told}><b>${percent(rate)}</b>${told && html` <span class="quiet">(${span(low, high)})</span>`}</span>`;
}

/** A line from 0 to 100% with the interval on it and the rate as a mark. */
export function Interval({ rate, low, high }) {
  if (rate === null || rate === undefined) return html`<span class="interval"></span>`;
  const from = 100 * (low ?? rate);
  return html`<span class="interval" aria-hidden="true">
    <i style=${{ left: `${from}%`, width: `${100 * (high ?? rate) - from}%` }}></i><b style=${{ left: `${100 * rate}%` }}></b></span>`;
}

export function At({ ms, beside }) {
  if (ms === null || ms === undefined) return html`<${Unknown} why="it has not happened, or nobody told when" />`;
  return html`<time datetime=${new Date(ms).toISOString()} title=${utc(ms)}>${clock(ms, beside)}</time>`;
}

export const Text = ({ children, most = 2000 }) => html`<bdi class="text">${plain(children, most)}</bdi>`;

/** The dot: live, late (how old), disconnected; in a file, when it was made. A run that is over has none. */
export function Dot({ store }) {
  useSignal(store, 250);
  const now = useNow(1000, embedded ? 0 : null);
  if (embedded) return html`<span class="dot-box quiet">a file; ${store.run?.ended ? "the run is over" : "the run went on"}</span>`;
  const silent = now - store.heard;
  const state = store.connection === "live" && silent > LATE_MS ? "late" : store.connection;
  const over = store.run && !store.run.live;
  const text =
    state === "live" ? (over ? (store.run.status === "left" || store.run.status === "running" ? "nobody works on it" : "over") : "live") : state === "late" ? `late, ${duration(silent / 1000)} old` : state === "connecting" ? "connecting" : `disconnected, ${duration(silent / 1000)} old`;
  return html`<span class=${`dot-box ${state}`} role="status"><span class=${`dot ${state} ${over ? "over" : ""}`}></span>${text}</span>`;
}

/** What `get(path)` gives, asked again every `every` milliseconds. The last known value stays, with the error beside it. */
export function useDocument(path, every = 0, version = 0) {
  const [state, set] = useState({ path, value: null, error: null });
  useEffect(() => {
    let over = false;
    let timer = null;
    const ask = async () => {
      try {
        const value = path === null ? null : await get(path);
        if (!over) set({ path, value, error: null });
      } catch (error) {
        if (!over) set((before) => ({ path, value: before.path === path ? before.value : null, error }));
      }
      if (every && !over && !embedded) timer = setTimeout(ask, document.hidden ? 4 * every : every);
    };
    ask();
    return () => {
      over = true;
      clearTimeout(timer);
    };
  }, [path, every, version]);
  return state.path === path ? state : { path, value: null, error: null };
}

/** The store of a run, loaded and followed while somebody looks. */
export function useRun(name, least = 250) {
  const store = runStore(name);
  useEffect(() => store.use(), [store]);
  useSignal(store, least);
  return store;
}

/** True where a page may change a run. */
export function useControl() {
  const [may, set] = useState(false);
  useEffect(() => {
    session().then(({ read_only }) => set(read_only === false));
  }, []);
  return may;
}

export function Problem({ error }) {
  return html`<p class="problem" role="alert">${plain(error?.message ?? error)}</p>`;
}

export const Skeleton = ({ rows = 4 }) => html`<div class="skeleton" aria-hidden="true">${Array.from({ length: rows }, (_, n) => html`<i key=${n}></i>`)}</div>`;

/** An image of a run. One that is broken, or that a file does not hold, says so in its place; `again`: after so
 * many milliseconds it is asked for again, as its machine may only have been slow. */
export function Picture({ path, alt, onSize, lazy = true, again = null }) {
  const [state, set] = useState({ path: null, url: null, bad: null, failures: 0, tried: 0 });
  useEffect(() => {
    let over = false;
    picture(path).then((url) => over || set({ path, url, bad: url === null ? "left out of this file for size" : null, failures: 0, tried: 0 }));
    return () => {
      over = true;
    };
  }, [path]);
  useEffect(() => {
    if (!again || !state.failures) return undefined;
    const timer = setTimeout(() => set((now) => ({ ...now, tried: now.failures })), again);
    return () => clearTimeout(timer);
  }, [again, state.url, state.failures]);
  if (state.path !== path && !state.url) return html`<span class="no-picture" aria-hidden="true"></span>`;
  const says = state.bad && html`<span class="no-picture">${state.bad}</span>`;
  if (says && !(state.tried && state.tried === state.failures)) return says;
  const loaded = (event) => {
    onSize?.([event.target.naturalWidth, event.target.naturalHeight]);
    if (says) set((now) => ({ ...now, bad: null }));
  };
  // the next one may be known already when the last one turns out to be bad
  const failed = () => set((now) => (now.url === state.url ? { ...now, bad: "this image cannot be shown", failures: now.failures + 1 } : now));
  return html`${says}<img key=${state.tried} src=${state.url} alt=${alt} hidden=${Boolean(says)} loading=${lazy && !says ? "lazy" : "eager"} decoding="async" draggable=${false}
    onLoad=${loaded} onError=${failed} />`;
}

/** Shows a fault of one part in its place, so that all others are drawn. New data are tried anew. */
export class Part extends Component {
  componentDidCatch(error) {
    console.error(error);
    this.setState({ error });
  }

  componentWillReceiveProps() {
    this.setState({ error: null });
  }

  render({ children }, { error }) {
    return error ? html`<p class="problem">This part cannot be shown: ${plain(error.message, 200)}</p>` : children;
  }
}

export function Panel({ title, id, more, children, className = "" }) {
  return html`<section class=${`panel ${className}`} aria-labelledby=${id}><header><h2 id=${id}>${title}</h2><span class="spring"></span>${more}</header><${Part}>${children}</${Part}></section>`;
}

/** Something that was written by nobody knows whom, shown as it is: keys and values, nested ones indented. */
export function Facts({ value, depth = 0 }) {
  if (value === null || value === undefined) return html`<${Unknown} why="it was not recorded" />`;
  if (typeof value !== "object") return html`<${Text}>${typeof value === "boolean" ? (value ? "yes" : "no") : value}</${Text}>`;
  const entries = Array.isArray(value) ? value.map((v, n) => [String(n + 1), v]) : Object.entries(value);
  if (!entries.length) return html`<span class="quiet">none</span>`;
  if (depth > 3) return html`<${Text}>${JSON.stringify(value)}</${Text}>`;
  if (Array.isArray(value) && value.every((v) => v === null || typeof v !== "object")) return html`<${Text}>${value.join(", ")}</${Text}>`;
  return html`<dl class="facts">${entries.slice(0, 200).map(([key, v]) => html`<${Fact} name=${key} value=${v} depth=${depth + 1} />`)}</dl>`;
}

const Fact = ({ name, value, depth }) => html`<div><dt><${Text}>${words(name)}</${Text}></dt><dd><${Facts} value=${value} depth=${depth} /></dd></div>`;

/** An attempt is `<task>.<number>`. */
export const taskOf = (attempt) => attempt.slice(0, attempt.lastIndexOf("."));
export const numberOf = (attempt) => attempt.slice(attempt.lastIndexOf(".") + 1);
export const attemptLink = (run, task, number, more = {}) => link(["runs", run, "tasks", task], { attempt: number, ...more });
