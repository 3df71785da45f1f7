// Where one is. Everything has a URL: a path where a server answers, the same after `#` in the one file.
import { Signal, useSignal } from "./base.js";

export const embedded = document.getElementById("data") !== null;

function read() {
  const url = embedded ? location.hash.slice(1) || "/" : location.pathname + location.search;
  const [path, search = ""] = url.split(/\?(.*)/s);
  const parts = path.split("/").filter(Boolean).map(decoded);
  return { path, parts, query: new URLSearchParams(search) };
}

function decoded(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

export const place = new Signal(read());

export const href = (url) => (embedded ? `#${url}` : url);

/** A path made of parts that may hold anything, and a query without what is empty. */
export function link(parts, query = {}) {
  const path = `/${parts.map(encodeURIComponent).join("/")}`;
  const search = new URLSearchParams(Object.entries(query).filter(([, value]) => value !== null && value !== undefined && value !== ""));
  const text = String(search);
  return href(text ? `${path}?${text}` : path);
}

export function go(to, { replace = false } = {}) {
  if (to === href(place.value.path + (String(place.value.query) && `?${place.value.query}`))) return;
  history[replace ? "replaceState" : "pushState"](null, "", to);
  place.set(read());
  if (!replace) scrollTo(0, 0);
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
  addEventListener("popstate", moved);
  addEventListener("hashchange", moved);
  document.addEventListener("click", (event) => {
    const anchor = event.target.closest?.("a[href]");
    if (!anchor || event.defaultPrevented || event.button || event.metaKey || event.ctrlKey || event.shiftKey) return;
    const to = anchor.getAttribute("href");
    if (anchor.target || anchor.hasAttribute("download") || !to.startsWith(embedded ? "#/" : "/") || to.startsWith("/api/")) return;
    event.preventDefault();
    go(to);
  });
}
