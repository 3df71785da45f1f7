// Two runs side by side: what may be concluded, and the tasks that flipped with both replays.
import { html, useEffect, useState } from "../base.js";
import { count, duration, percent, plain, plural, usd } from "../format.js";
import { keys } from "../keys.js";
import { Figure, Mark, Panel, Problem, Skeleton, Text, useDocument } from "../parts.js";
import { SideBySide } from "../replay.js";
import { link, setQuery } from "../route.js";

export function ComparePage({ query }) {
  const [a, b] = [query.get("a"), query.get("b")];
  const { value, error } = useDocument(a && b ? `/api/compare?${new URLSearchParams({ a, b })}` : null);
  const all = value ? (Array.isArray(value) ? value : (value.comparisons ?? [value])) : [];
  return html`<main id="main" tabindex="-1" class="compare-page"><div class="head"><h1>Compare</h1><span class="quiet">${a && b ? html`<${Text}>${a}</${Text}> and <${Text}>${b}</${Text}>` : ""}</span></div>
    ${(!a || !b) && html`<${Choose} a=${a} b=${b} />`}
    ${error && html`<${Problem} error=${error} />`}${a && b && !value && !error && html`<${Skeleton} rows=${10} />`}
    ${all.map((each, n) => html`<${Comparison} key=${n} value=${each} query=${query} />`)}</main>`;
}

function Choose({ a, b }) {
  const { value } = useDocument("/api/runs");
  const names = value ? value.runs.rows.map((row) => row[0]) : [];
  const pick = (key, chosen) => html`<label>${key === "a" ? "first" : "second"} <select value=${chosen ?? ""} onChange=${(event) => setQuery({ [key]: event.target.value })}><option value="">a run</option>${names.map((name) => html`<option key=${name} value=${name}>${plain(name, 80)}</option>`)}</select></label>`;
  return html`<p class="row">${pick("a", a)} ${pick("b", b)}</p>`;
}

const signed = (share) => `${share > 0 ? "+" : share < 0 ? "−" : "±"}${Math.abs(100 * share).toFixed(1)}`;

function Comparison({ value, query }) {
  const { first, second, corners, rate, score } = value;
  return html`${value.differences.length > 0 && html`<${Panel} title="Not alike" id="unlike-head" className="attention"><ul>${value.differences.map((line, n) => html`<li key=${n}><span class="bang" aria-hidden="true">!</span><span class="grow"><${Text}>${line}</${Text}></span></li>`)}</ul></${Panel}>`}
    <p class=${`conclusion ${value.real ? "real" : ""}`}><${Text}>${value.conclusion}</${Text}></p>
    <div class="cards">
      <${Panel} title="Difference" id="difference-head" more=${html`<span class="quiet">${plural(value.paired, "task")} in both</span>`}>
        ${rate ? html`<${Spread} difference=${rate} name="success" />${score && html`<${Spread} difference=${score} name="mean score" />`}<p class="quiet small">95% interval, ${plain(rate.method, 120)}${value.p === null ? "" : `; exact McNemar p = ${value.p}, held against ${value.level}`}</p>` : html`<p class="quiet">No task has a score in both.</p>`}</${Panel}>
      <${Panel} title="The four corners" id="corners-head"><table class="corners"><thead><tr><td></td><th scope="col"><${Text} most=${40}>${second.label}</${Text}> passes</th><th scope="col">fails</th></tr></thead><tbody><tr><th scope="row"><${Text} most=${40}>${first.label}</${Text}> passes</th><td>${count(corners.both_pass)}</td><td class="flip">${count(corners.first_only)}</td></tr><tr><th scope="row">fails</th><td class="flip">${count(corners.second_only)}</td><td>${count(corners.neither)}</td></tr></tbody></table></${Panel}>
      <${Panel} title="Side by side" id="sides-head"><div class="scroll-x"><table><thead><tr><td></td>${[first, second].map((side, n) => html`<th key=${n} scope="col" class="r"><a href=${link(["runs", side.run])}><${Text} most=${40}>${side.label}</${Text}></a></th>`)}</tr></thead><tbody>
        ${SIDES.map(([title, key, shown, why]) => html`<tr key=${key}><th scope="row">${title}</th>${[first, second].map((side, n) => html`<td key=${n} class="r"><${Figure} value=${side[key]} of=${shown} why=${why} /></td>`)}</tr>`)}</tbody></table></div></${Panel}>
    </div><${Flipped} value=${value} query=${query} />`;
}

const SIDES = [
  ["success", "success_rate", percent, "no task has a score in both"],
  ["mean score", "mean_score", (v) => v.toFixed(3), "no task has a score in both"],
  ["tasks", "tasks", count, ""],
  ["broken", "broken", count, ""],
  ["unrun", "unrun", count, ""],
  ["median time", "median_seconds", duration, "no task has a score"],
  ["whole run", "duration_seconds", duration, "it has not ended"],
  ["machines", "machines_usd", usd, "its place tells no prices"],
  ["models", "models_usd", usd, "its model calls were not metered"],
];

/** The difference and its interval on a line with zero in its midst. */
function Spread({ difference, name }) {
  const { mean, ci } = difference;
  const reach = Math.max(0.05, Math.abs(mean), ...(ci ?? []).map(Math.abs)) * 1.15;
  const x = (v) => 50 + (50 * v) / reach;
  return html`<div class="spread"><p><b class="big">${signed(mean)}</b> <span class="quiet">points ${name}${ci ? `, ${signed(ci[0])} to ${signed(ci[1])}` : ""}</span></p>
    <div class="spread-line" aria-hidden="true"><span class="zero"></span>${ci && html`<i style=${{ left: `${x(ci[0])}%`, width: `${x(ci[1]) - x(ci[0])}%` }}></i>`}<b style=${{ left: `${x(mean)}%` }}></b></div></div>`;
}

const sideOf = (side, flip) => ({ run: side.run, label: side.label, task: flip.task_id });

function Flipped({ value, query }) {
  const { flipped, first, second } = value;
  const open = query.get("task");
  const place = flipped.findIndex((flip) => flip.task_id === open);
  const select = (n) => flipped.length && setQuery({ task: flipped[Math.max(0, Math.min(flipped.length - 1, n))].task_id, step: null });
  useEffect(() => keys({ j: () => select(place + 1), k: () => select(place - 1) }));
  const [most, setMost] = useState(100);
  return html`<${Panel} title="Tasks that flipped" id="flipped-head" more=${html`<span class="quiet">${count(flipped.length)}</span>`}>
    ${!flipped.length && html`<p class="quiet">Every task that both have scored went the same way.</p>`}
    <ul class="groups">${flipped.slice(0, most).map((flip) => {
      const passes = flip.passes === first.label;
      return html`<li key=${flip.task_id} class=${`group ${flip.task_id === open ? "selected" : ""}`}><button type="button" class="group-head" aria-expanded=${flip.task_id === open ? "true" : "false"} onClick=${() => setQuery({ task: flip.task_id === open ? null : flip.task_id, step: null })}><${Mark} outcome=${passes ? "pass" : "fail"} /><span aria-hidden="true">→</span><${Mark} outcome=${passes ? "fail" : "pass"} /><b><${Text} most=${80}>${flip.task_id}</${Text}></b><span class="quiet"><${Text} most=${40}>${flip.domain}</${Text}></span><span class="grow"></span><span class="quiet">passes with <${Text} most=${40}>${flip.passes}</${Text}></span></button>
        ${flip.task_id === open && html`<${SideBySide} first=${sideOf(first, flip)} second=${sideOf(second, flip)} query=${query} />`}</li>`;
    })}</ul>${flipped.length > most && html`<button type="button" onClick=${() => setMost(most + 500)}>more</button>`}</${Panel}>`;
}
