// All runs, newest first: how each goes, what it costs, how long it has still to go.
import { html, useEffect, useMemo, useState } from "../base.js";
import { count, duration, plain, usd } from "../format.js";
import { keys } from "../keys.js";
import { At, Bar, Problem, Rate, Skeleton, Unknown, settledCounts, useDocument } from "../parts.js";
import { go, link, setQuery } from "../route.js";

const PAGE = 200;

function items({ runs: { columns, rows } }) {
  return rows.map((row) => Object.fromEntries(columns.map((name, n) => [name, row[n]]))).sort((a, b) => (b.started ?? Infinity) - (a.started ?? Infinity));
}

export function RunsPage({ query }) {
  const { value, error } = useDocument("/api/runs", 5000);
  const [picked, setPicked] = useState(() => new Set());
  const [most, setMost] = useState(PAGE);
  const all = useMemo(() => (value ? items(value) : []), [value]);
  const text = (query.get("text") ?? "").toLowerCase();
  const runs = all.filter((run) => !text || [run.name, run.benchmark, run.agent, run.model, run.place, ...(run.tags ?? [])].some((word) => String(word ?? "").toLowerCase().includes(text)));
  const shown = runs.slice(0, most);
  const place = shown.findIndex((run) => run.name === query.get("run"));
  const select = (n) => {
    const next = shown[Math.max(0, Math.min(shown.length - 1, n))];
    if (next) {
      setQuery({ run: next.name });
      document.getElementById(`run-${next.name}`)?.scrollIntoView({ block: "nearest" });
    }
  };
  useEffect(() => keys({ j: () => select(place + 1), k: () => select(place - 1), Enter: () => place >= 0 && go(link(["runs", shown[place].name])) }));
  const pick = (name) => {
    const next = new Set(picked);
    next.has(name) ? next.delete(name) : next.add(name);
    setPicked(next);
  };
  const [a, b] = runs.filter((run) => picked.has(run.name)).reverse();
  const live = all.filter((run) => run.live).length;
  return html`<main id="main" tabindex="-1"><div class="head"><h1>Runs</h1><span class="quiet">${value ? `${count(all.length)}${live ? ` · ${count(live)} live` : ""}` : ""}</span><span class="spring"></span>
      ${b ? html`<a class="button strong" href=${link(["compare"], { a: a.name, b: b.name })}>compare ${plain(a.name, 30)} with ${plain(b.name, 30)}</a>` : html`<span class="quiet only-wide">${picked.size ? "select one more to compare" : "select two to compare"}</span>`}
      <input id="search" type="search" placeholder="search  /" aria-label="search runs" value=${query.get("text") ?? ""} onInput=${(event) => setQuery({ text: event.target.value })} /></div>
    ${error && html`<${Problem} error=${error} />`}
    ${!value && !error && html`<${Skeleton} rows=${8} />`}
    ${value && !all.length && html`<p class="empty">No runs yet in this home. <code>evalfleet run …</code> starts one; <code>evalfleet demo</code> shows one in a minute.</p>`}
    ${value && all.length > 0 && !runs.length && html`<p class="empty quiet">No run matches.</p>`}
    <ul class="runs">${shown.map((run, n) => html`<${RunRow} key=${run.name} run=${run} selected=${n === place} picked=${picked.has(run.name)} pick=${pick} />`)}</ul>
    ${runs.length > most && html`<button type="button" onClick=${() => setMost(most + 5 * PAGE)}>show more: ${count(runs.length - most)} older ones</button>`}
  </main>`;
}

function RunRow({ run, selected, picked, pick }) {
  const done = (run.pass ?? 0) + (run.fail ?? 0) + (run.broken ?? 0);
  const counts = settledCounts({ pass: run.pass, fail: run.fail, broken: run.broken, running: run.running, waiting: run.waiting }, run.ended !== null);
  const about = [run.benchmark, run.agent, run.model].filter(Boolean).map((word) => plain(word, 60)).join(" · ");
  return html`<li id=${`run-${run.name}`} class=${`run-row ${selected ? "selected" : ""}`}>
    <label class="pick"><input type="checkbox" checked=${picked} onChange=${() => pick(run.name)} aria-label=${`compare ${plain(run.name, 80)}`} /></label>
    <div class="who"><a class="run-name" href=${link(["runs", run.name])}><bdi>${plain(run.name, 80)}</bdi></a>
      ${run.live ? html`<span class="dot-box live"><span class="dot live"></span>live</span>` : run.status !== "done" ? html`<span class="tag">${run.status}</span>` : null}
      <span class="quiet about"><bdi>${about}</bdi></span></div>
    <${Bar} counts=${counts} total=${run.total} label=${plain(run.name, 80)} />
    <span class="figure">${run.live ? html`${count(done)}<span class="quiet"> / ${count(run.total)}</span>` : count(run.total)}</span>
    <span class="figure"><${Rate} rate=${run.rate} low=${run.low} high=${run.high} /></span>
    <span class="figure" title=${`machines ${usd(run.machine_usd)}, models ${usd(run.model_usd)}${run.budget_usd ? `, of ${usd(run.budget_usd)}` : ""}`}><${Money} run=${run} /></span>
    <span class="figure">${run.live && run.left_s ? html`${duration(Array.isArray(run.left_s) ? run.left_s[1] : run.left_s)} left` : run.seconds === null ? html`<${Unknown} why="it has not begun" />` : duration(run.seconds)}</span>
    <span class="figure quiet when"><${At} ms=${run.started} /></span>
  </li>`;
}

const Money = ({ run }) =>
  html`${run.machine_usd === null ? html`<${Unknown} why="its place tells no prices" />` : usd(run.machine_usd)}<span class="quiet"> + </span>${run.model_usd === null ? html`<${Unknown} why="its model calls were not metered" />` : usd(run.model_usd)}`;
