// Where one is. Everything has a URL: a path where a server answers, the same after `#` in the one file.
import { Signal, useSignal } from "./base.js";

export const embedded = document.getElementById("data") !== null;

function read() {
  const url = embedded ? location.hash.slice(1) || "/" : location.pathname + location.search;
  const [path, search = ""] = url.split(/\?(.*)/s);
  const parts = path.split("/").filter(Boolean).map(decoded);
  return { path, parts, query: new URLSearchParams(search) };
}

/** A part of a path. Browsers take `.` and `..` for folders, however they are encoded: a `~` stands before them. */
export const encoded = (part) => encodeURIComponent(part.replace(/^~*\.\.?$/, "~$&"));

function decoded(part) {
  try {
    return decodeURIComponent(part).replace(/^~(~*\.\.?)$/, "$1");
  } catch {
    return part;
  }
}

export const place = new Signal(read());

export const href = (url) => (embedded ? `#${url}` : url);

/** A path made of parts that may hold anything, and a query without what is empty. */
export function link(parts, query = {}) {
  const path = `/${parts.map(encoded).join("/")}`;
  const search = new URLSearchParams(Object.entries(query).filter(([, value]) => value !== null && value !== undefined && value !== ""));
  const text = String(search);
  return href(text ? `${path}?${text}` : path);
}

export function go(to, { replace = false } = {}) {
  if (to === href(place.value.path + (String(place.value.query) && `?${place.value.query}`))) return;
  if (replace) history.replaceState(history.state, "", to);
  else history.pushState(performance.now(), "", to);
  place.set(read());
  if (!replace) scrollTo(0, 0);
}

const scrolls = new Map();
let restoring = 0;
const RESTORE_MS = 3000;

const table = () => document.querySelector(".grid");

/** How far the page and its table are scrolled, for the way back to this entry of the history. */
function noteScroll() {
  if (!restoring) scrolls.set(history.state, [scrollY, table()?.scrollTop ?? 0]);
}

/** Scroll to where the reader was when the page is long enough again, unless the reader scrolls meanwhile. */
function restoreScroll() {
  const [page, rows] = scrolls.get(history.state) ?? [0, 0];
  const until = performance.now() + RESTORE_MS;
  cancelAnimationFrame(restoring);
  const again = () => {
    scrollTo(0, page);
    const box = table();
    if (box) box.scrollTop = rows;
    const done = Math.abs(scrollY - page) < 2 && (!rows || Math.abs((box?.scrollTop ?? 0) - rows) < 2);
    restoring = done || performance.now() > until ? 0 : requestAnimationFrame(again);
  };
  restoring = requestAnimationFrame(again);
}

function stopRestoring() {
  cancelAnimationFrame(restoring);
  restoring = 0;
}

/** Change some of the query and stay on the page: a filter, a zoom, a step. */
export function setQuery(changes, { replace = true } = {}) {
  const query = new URLSearchParams(place.value.query);
  for (const [key, value] of Object.entries(changes)) {
    if (value === null || value === undefined || value === "") query.delete(key);
    else query.set(key, value);
  }
  const search = String(query);
  go(href(search ? `${place.value.path}?${search}` : place.value.path), { replace });
}

export const useRoute = () => useSignal(place);

export function listen() {
  const moved = () => place.set(read());
  history.scrollRestoration = "manual";
  addEventListener("popstate", () => {
    moved();
    restoreScroll();
  });
  addEventListener("hashchange", moved);
  addEventListener("scroll", noteScroll, { capture: true, passive: true });
  for (const kind of ["wheel", "touchstart", "pointerdown", "keydown"]) addEventListener(kind, stopRestoring, { capture: true, passive: true });
  document.addEventListener("click", (event) => {
    const anchor = event.target.closest?.("a[href]");
    if (!anchor || event.defaultPrevented || event.button || event.metaKey || event.ctrlKey || event.shiftKey) return;
    const to = anchor.getAttribute("href");
    if (anchor.target || anchor.hasAttribute("download") || !to.startsWith(embedded ? "#/" : "/") || to.startsWith("/api/")) return;
    event.preventDefault();
    go(to);
  });
}
