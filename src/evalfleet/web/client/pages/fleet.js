// What is there beside runs: pools, machines of this home, and where the money went.
import { html } from "../base.js";
import { clock, count, duration, instant, number, plain, usd, words } from "../format.js";
import { At, Facts, Figure, Problem, Skeleton, Text, Unknown, useDocument } from "../parts.js";
import { link } from "../route.js";

const ABOUT = { pools: "Machines with a name that outlive runs.", machines: "What this home has at its places now, by its journals and by what clouds list.", money: "What was spent, by run and by what it was spent on." };
const EMPTY = { pools: "This home has no named pools.", machines: "No machine of this home is up, and its places list none.", money: "Nothing was spent yet." };

export function FleetPage({ what }) {
  return what === "money" ? html`<${MoneyPage} />` : html`<${ListPage} what=${what} />`;
}

/** By place and model; then every run. What is unknown is not counted as nothing. */
function MoneyPage() {
  const { value, error } = useDocument("/api/money", 15_000);
  const runs = value ? asItems(value.runs) : [];
  const all = sums(runs, () => "all")[0];
  return html`<main id="main" tabindex="-1"><div class="head"><h1>Money</h1><span class="quiet">${ABOUT.money}</span></div>
    ${error && html`<${Problem} error=${error} />`}${!value && !error && html`<${Skeleton} rows=${6} />`}
    ${value && !runs.length && html`<p class="empty">${EMPTY.money}</p>`}
    ${all && html`<dl class="figures"><div><dt>machines</dt><dd><${Sum} sum=${all.machine_usd} /></dd></div><div><dt>models</dt><dd><${Sum} sum=${all.model_usd} /></dd></div><div><dt>runs</dt><dd>${count(all.runs)}</dd></div></dl>
    <div class="cards">${["place", "model"].map((by) => html`<${Sums} key=${by} by=${by} rows=${sums(runs, (run) => run[by])} />`)}</div>
    <section class="panel" aria-label="runs"><header><h2>Runs</h2></header><div class="scroll-x" tabindex="0" role="region" aria-label="runs and their costs"><table><thead><tr><th scope="col">run</th><th scope="col" class="wide">started</th><th scope="col" class="wide">status</th><th scope="col" class="wide">model</th><th scope="col" class="r">machines</th><th scope="col" class="r">models</th><th scope="col" class="r">budget</th></tr></thead><tbody>
      ${runs.slice(0, 1000).map((run) => html`<tr key=${run.name}><th scope="row"><a href=${link(["runs", run.name])}><${Text} most=${80}>${run.name}</${Text}></a></th><td class="wide"><${At} ms=${run.started} /></td><td class="wide">${run.status}</td><td class="wide"><${Value} name="model" value=${run.model} /></td><td class="r"><${Figure} value=${run.machine_usd} of=${usd} why="its place tells no prices" /></td><td class="r"><${Figure} value=${run.model_usd} of=${usd} why="its model calls were not metered" /></td><td class="r"><${Figure} value=${run.budget_usd} of=${usd} why="none was set" /></td></tr>`)}</tbody></table></div>${runs.length > 1000 && html`<p class="quiet">and ${count(runs.length - 1000)} older ones, which the sums hold too</p>`}</section>`}</main>`;
}

function sums(runs, by) {
  const groups = new Map();
  for (const run of runs) {
    const name = by(run) || "none was named";
    const group = groups.get(name) ?? { name, runs: 0, machine_usd: { sum: 0, unknown: 0 }, model_usd: { sum: 0, unknown: 0 } };
    group.runs += 1;
    for (const key of ["machine_usd", "model_usd"]) {
      if (run[key] === null) group[key].unknown += 1;
      else group[key].sum += run[key];
    }
    groups.set(name, group);
  }
  return [...groups.values()].sort((a, b) => b.machine_usd.sum + b.model_usd.sum - a.machine_usd.sum - a.model_usd.sum);
}

const Sum = ({ sum }) => html`<span title=${sum.unknown ? `without ${count(sum.unknown)} runs that nobody can tell it of` : ""}>${usd(sum.sum)}${sum.unknown ? html`<span class="quiet"> + ?</span>` : null}</span>`;

function Sums({ by, rows: all }) {
  return html`<section class="panel" aria-label=${`by ${by}`}><header><h2>By ${by}</h2></header><div class="scroll-x"><table><thead><tr><th scope="col">${by}</th><th scope="col" class="r">runs</th><th scope="col" class="r">machines</th><th scope="col" class="r">models</th></tr></thead><tbody>
    ${all.slice(0, 20).map((row) => html`<tr key=${row.name}><th scope="row"><${Text} most=${40}>${row.name}</${Text}></th><td class="r">${count(row.runs)}</td><td class="r"><${Sum} sum=${row.machine_usd} /></td><td class="r"><${Sum} sum=${row.model_usd} /></td></tr>`)}</tbody></table></div></section>`;
}

function ListPage({ what }) {
  const { value, error } = useDocument(`/api/${what}`, 15_000);
  const parts = value === null ? [] : sections(value);
  return html`<main id="main" tabindex="-1"><div class="head"><h1>${what[0].toUpperCase() + what.slice(1)}</h1><span class="quiet">${ABOUT[what]}</span></div>
    ${error && html`<${Problem} error=${error} />`}${!value && !error && html`<${Skeleton} rows=${6} />`}
    ${value && parts.every(([, rows]) => Array.isArray(rows) && !rows.length) && html`<p class="empty">${EMPTY[what]}</p>`}
    ${parts.filter(([, part]) => !Array.isArray(part) || part.length).map(([title, part], n) => html`<section key=${n} class="panel" aria-label=${title || what}>${title && html`<header><h2>${words(title)}</h2></header>`}${rows(part) ? html`<${Rows} rows=${part} />` : html`<${Facts} value=${part} />`}</section>`)}</main>`;
}

const isTable = (part) => part !== null && typeof part === "object" && Array.isArray(part.columns) && Array.isArray(part.rows);
const rows = (part) => Array.isArray(part) && part.length > 0 && part.every((row) => row !== null && typeof row === "object" && !Array.isArray(row));
const asItems = (table) => table.rows.map((row) => Object.fromEntries(table.columns.map((name, n) => [name, row[n]])));

/** A document as sections: its lists are tables, its single values stand together. */
function sections(value) {
  if (Array.isArray(value)) return [["", value]];
  if (isTable(value)) return [["", asItems(value)]];
  const entries = Object.entries(value).map(([key, part]) => [key, isTable(part) ? asItems(part) : part]);
  const single = entries.filter(([, part]) => part === null || typeof part !== "object");
  const others = entries.filter(([, part]) => part !== null && typeof part === "object" && !(Array.isArray(part) && !part.length));
  return [...(single.length ? [["", Object.fromEntries(single)]] : []), ...others];
}

function Rows({ rows: all }) {
  const columns = [...new Set(all.slice(0, 50).flatMap(Object.keys))].filter((name) => all.some((row) => row[name] !== null && row[name] !== undefined && (typeof row[name] !== "object" || Object.keys(row[name]).length))).slice(0, 12);
  const figures = new Set(columns.filter((name) => all.every((row) => row[name] === null || row[name] === undefined || typeof row[name] === "number")));
  return html`<div class="scroll-x" tabindex="0" role="region" aria-label="table"><table><thead><tr>${columns.map((name) => html`<th key=${name} scope="col" class=${figures.has(name) ? "r" : ""}>${words(name.replace(/_(usd|seconds)$/, ""))}</th>`)}</tr></thead><tbody>
    ${all.slice(0, 1000).map((row, n) => html`<tr key=${n}>${columns.map((name) => html`<td key=${name} class=${figures.has(name) ? "r" : ""}><${Value} name=${name} value=${row[name]} /></td>`)}</tr>`)}</tbody></table></div>${all.length > 1000 && html`<p class="quiet">and ${count(all.length - 1000)} more</p>`}`;
}

function Value({ name, value }) {
  if (value === null || value === undefined || value === "") return html`<${Unknown} why="it is not known, or there is none" />`;
  if (name === "run" && typeof value === "string") return html`<a href=${link(["runs", value])}><${Text} most=${80}>${value}</${Text}></a>`;
  if (typeof value === "number") return /usd/.test(name) ? usd(value) : /seconds|_s$/.test(name) ? duration(value) : number(value);
  if (/_at$|^(since|until|expires|at)$/.test(name) && instant(value)) return html`<span title=${plain(value)}>${clock(instant(value))}</span>`;
  if (typeof value === "object") return html`<${Facts} value=${value} depth=${2} />`;
  return html`<${Text} most=${120}>${typeof value === "boolean" ? (value ? "yes" : "no") : value}</${Text}>`;
}
