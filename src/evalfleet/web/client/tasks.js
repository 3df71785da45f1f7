// The table of tasks: only the rows in view exist, so that 100,000 are no more than 30. Filters are in the URL.
import { html, useEffect, useMemo, usePrinting, useRef, useState } from "./base.js";
import { api } from "./data.js";
import { DASH, count, duration, number, plain, usd, words } from "./format.js";
import { keys } from "./keys.js";
import { Mark, OUTCOMES, attemptLink, taskOf, useDocument } from "./parts.js";
import { go, link, setQuery } from "./route.js";

const ROW = 30;
const PRINTED = 2000;

// name, title, kind, from which width on it is shown
const COLUMNS = [
  ["id", "task", "text", 0],
  ["domain", "domain", "text", 900],
  ["outcome", "outcome", "shape", 0],
  ["score", "score", "number", 0],
  ["steps", "steps", "count", 700],
  ["tokens", "tokens", "count", 1000],
  ["usd", "cost", "usd", 800],
  ["seconds", "time", "duration", 420],
  ["machine", "machine", "machine", 1000],
  ["attempts", "attempts", "count", 800],
  ["model", "model", "text", 1500],
  ["cause", "cause", "words", 1100],
];
const SHOWN = { number, count, usd, duration, text: (v) => plain(v, 300) || DASH, words: (v) => words(v) || DASH, machine: (v) => plain(v, 80) || DASH, shape: String };
const WHY = {
  score: "it has no score",
  steps: "its benchmark tells no steps",
  tokens: "nobody counted them",
  usd: "no meter or price tells it",
  seconds: "it has not ended",
  machine: "it has not run",
  model: "the run has one model, or none was named",
  cause: "nothing broke it",
  attempts: "it has not run",
  domain: "its benchmark names none",
};

function filters(query) {
  const list = (name) => (query.get(name) ? new Set(query.get(name).split(",")) : null);
  return { outcome: list("outcome"), domain: query.get("domain"), machine: query.get("machine"), cause: query.get("cause"), group: query.get("group"), text: (query.get("text") ?? "").toLowerCase(), sort: query.get("sort") ?? "" };
}

/** Numbers of the rows that pass the filters, in order. */
function chosen({ cells, count: most }, filter, tasksOfGroup) {
  const { id, domain, outcome, machine, cause } = cells;
  const picked = [];
  for (let n = 0; n < most; n += 1) {
    if (filter.outcome && !filter.outcome.has(outcome[n])) continue;
    if (filter.domain !== null && domain[n] !== filter.domain) continue;
    if (filter.machine !== null && machine[n] !== filter.machine) continue;
    if (filter.cause !== null && cause[n] !== filter.cause) continue;
    if (tasksOfGroup && !tasksOfGroup.has(id[n])) continue;
    if (filter.text && !id[n].toLowerCase().includes(filter.text) && !String(domain[n] ?? "").toLowerCase().includes(filter.text)) continue;
    picked.push(n);
  }
  const name = filter.sort.replace("-", "");
  if (name in cells) {
    const down = filter.sort.startsWith("-") ? -1 : 1;
    const values = name === "outcome" ? outcome.map((word) => OUTCOMES.indexOf(word)) : cells[name];
    picked.sort((a, b) => {
      const [x, y] = [values[a], values[b]];
      if (x === y) return a - b;
      if (x === null || x === undefined) return 1;
      if (y === null || y === undefined) return -1;
      return x < y ? -down : down;
    });
  }
  return picked;
}

function Cell({ kind, name, value, machineName }) {
  if (kind === "shape") return html`<${Mark} outcome=${value} word />`;
  const empty = value === null || value === undefined || value === "";
  if (empty) return html`<span class="unknown" title=${WHY[name]}>${DASH}</span>`;
  return html`<bdi>${SHOWN[kind](name === "machine" ? machineName(value) : value)}</bdi>`;
}

/** How many rows have each value of a column: counted from the rows, so that each filter finds as many as it says. */
function counted(cells) {
  const counts = new Map();
  for (const cell of cells) counts.set(cell, (counts.get(cell) ?? 0) + 1);
  return counts;
}

const domainsOf = (table) => [...counted(table.cells.domain)].filter(([name]) => name).sort((a, b) => (a[0] < b[0] ? -1 : 1));

export function Tasks({ store, query }) {
  const box = useRef(null);
  const search = useRef(null);
  const [scroll, setScroll] = useState(0);
  const [size, setSize] = useState([1000, 600]);
  const printing = usePrinting();
  const table = store.tasks;
  const filter = filters(query);
  const asked = `${query.get("outcome")}|${filter.domain}|${filter.machine}|${filter.cause}|${filter.group}|${filter.text}|${filter.sort}`;
  const { value: triage } = useDocument(filter.group ? `${api("runs", store.name)}/triage` : null);
  const picked = useMemo(() => {
    const group = filter.group && triage?.groups.find((each) => each.id === filter.group);
    return chosen(table, filter, group ? new Set(group.attempts.map(taskOf)) : null);
  }, [table, table.version, asked, triage]);
  const domains = useMemo(() => domainsOf(table), [table]);
  const counts = useMemo(() => counted(table.cells.outcome), [table, table.version]);
  const selected = query.get("task");
  const place = selected === null ? -1 : picked.indexOf(table.place(selected));

  useEffect(() => {
    const node = box.current;
    const watch = new ResizeObserver(() => setSize([node.clientWidth, node.clientHeight]));
    watch.observe(node);
    return () => watch.disconnect();
  }, []);

  // What is typed belongs to who types it: a drawing that lags behind the address would take letters back.
  useEffect(() => {
    if (document.activeElement !== search.current) search.current.value = query.get("text") ?? "";
  });

  const open = (n) => {
    if (n in picked) go(attemptLink(store.name, table.key(picked[n]), null));
  };
  const select = (n) => {
    const next = Math.max(0, Math.min(picked.length - 1, n));
    if (!picked.length) return;
    setQuery({ task: table.key(picked[next]) });
    const node = box.current;
    if (next * ROW < node.scrollTop) node.scrollTop = next * ROW;
    else if ((next + 2) * ROW > node.scrollTop + node.clientHeight) node.scrollTop = (next + 2) * ROW - node.clientHeight;
  };
  useEffect(() => keys({ j: () => select(place + 1), k: () => select(place - 1), Enter: () => open(place) }));

  const first = printing ? 0 : Math.max(0, Math.floor(scroll / ROW) - 8);
  const last = printing ? Math.min(picked.length, PRINTED) : Math.min(picked.length, Math.ceil((scroll + size[1]) / ROW) + 8);
  const models = table.count > 0 && table.cells.model[0] !== null;
  const columns = COLUMNS.filter(([name, , , from]) => (printing ? 1000 : size[0]) >= from && (name !== "model" || models));
  const sortBy = (name) => setQuery({ sort: filter.sort === name ? `-${name}` : filter.sort === `-${name}` ? null : name });
  const machineName = (id) => store.machineName(id);
  const grid = columns.map(([name]) => (name === "id" ? "minmax(9rem, 3fr)" : name === "outcome" ? "6.4rem" : name === "domain" || name === "machine" || name === "cause" || name === "model" ? "minmax(6rem, 1.4fr)" : "minmax(4rem, .8fr)")).join(" ");
  const toggle = (name) => {
    const next = new Set(filter.outcome ?? []);
    next.has(name) ? next.delete(name) : next.add(name);
    setQuery({ outcome: [...next].join(",") });
  };
  const others = ["machine", "cause", "group"].filter((name) => filter[name] !== null);
  return html`<section class="panel tasks" aria-labelledby="tasks-head"><header><h2 id="tasks-head">Tasks</h2><span class="quiet">${count(picked.length)}${picked.length === table.count ? "" : ` of ${count(table.count)}`}</span><span class="spring"></span></header>
    <div class="filters" role="search">
      <span class="chips">${OUTCOMES.filter((name) => counts.get(name) || filter.outcome?.has(name)).map((name) => html`<button key=${name} type="button" class="chip" aria-pressed=${filter.outcome?.has(name) ? "true" : "false"} onClick=${() => toggle(name)}><${Mark} outcome=${name} />${name} <span class="quiet">${count(counts.get(name) ?? 0)}</span></button>`)}</span>
      ${domains.length > 1 && html`<select aria-label="domain" value=${filter.domain ?? ""} onChange=${(event) => setQuery({ domain: event.target.value })}><option value="">all domains</option>${domains.map(([name, n]) => html`<option key=${name} value=${name}>${plain(name, 60)} (${count(n)})</option>`)}</select>`}
      <input id="search" type="search" placeholder="search  /" aria-label="search tasks by id or domain" ref=${search} onInput=${(event) => setQuery({ text: event.target.value })} />
      ${others.map((name) => html`<button key=${name} type="button" class="chip" aria-pressed="true" title="remove this filter" onClick=${() => setQuery({ [name]: null })}>${name}: ${plain(name === "machine" ? machineName(filter[name]) : words(filter[name]), 40)} ×</button>`)}
    </div>
    <div class="grid" role="table" aria-label="tasks" aria-rowcount=${picked.length + 1} ref=${box} tabindex="0" onScroll=${(event) => setScroll(event.target.scrollTop)}>
      <div class="grid-row grid-head" role="row" aria-rowindex="1" style=${{ gridTemplateColumns: grid }}>
        ${columns.map(([name, title, kind]) => html`<span key=${name} role="columnheader" class=${kind} aria-sort=${filter.sort === name ? "ascending" : filter.sort === `-${name}` ? "descending" : "none"}><button type="button" onClick=${() => sortBy(name)}>${title}${filter.sort === name ? " ↑" : filter.sort === `-${name}` ? " ↓" : ""}</button></span>`)}
      </div>
      <div class="grid-body" role="rowgroup" style=${{ height: `${(printing ? last : picked.length) * ROW}px` }}>
        ${picked.slice(first, last).map((n, i) => {
          const id = table.key(n);
          const here = first + i;
          return html`<div key=${id} class=${`grid-row ${here === place ? "selected" : ""}`} role="row" aria-rowindex=${here + 2} aria-selected=${here === place ? "true" : undefined} style=${{ gridTemplateColumns: grid, transform: `translateY(${here * ROW}px)` }}>
            ${columns.map(([name, , kind]) => html`<span key=${name} role="cell" class=${kind}>${name === "id" ? html`<a href=${link(["runs", store.name, "tasks", id])} title=${plain(id, 300)}><bdi>${plain(id, 200)}</bdi></a>` : html`<${Cell} kind=${kind} name=${name} value=${table.cells[name][n]} machineName=${machineName} />`}</span>`)}
          </div>`;
        })}
      </div>
      ${!picked.length && html`<p class="quiet empty">No task matches. ${html`<button type="button" class="plain" onClick=${() => setQuery({ outcome: null, domain: null, text: null, machine: null, cause: null, group: null })}>Show all</button>`}</p>`}
    </div>
    ${printing && picked.length > PRINTED && html`<p>${count(picked.length - PRINTED)} more tasks are not printed.</p>`}
  </section>`;
}
