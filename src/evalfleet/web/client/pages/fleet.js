// What is there beside runs: pools, machines of this home, and where the money went.
import { html } from "../base.js";
import { clock, count, duration, instant, number, plain, usd, words } from "../format.js";
import { Facts, Problem, Skeleton, Text, Unknown, useDocument } from "../parts.js";
import { link } from "../route.js";

const ABOUT = { pools: "Machines with a name that outlive runs.", machines: "What this home has at its places now.", money: "What was spent, by run and by what it was spent on." };
const EMPTY = { pools: "This home has no named pools.", machines: "No machine of this home is up.", money: "Nothing was spent yet." };

export function FleetPage({ what }) {
  const { value, error } = useDocument(`/api/${what}`, 15_000);
  const parts = value === null ? [] : sections(value);
  return html`<main id="main" tabindex="-1"><div class="head"><h1>${what[0].toUpperCase() + what.slice(1)}</h1><span class="quiet">${ABOUT[what]}</span></div>
    ${error && html`<${Problem} error=${error} />`}${!value && !error && html`<${Skeleton} rows=${6} />`}
    ${value && parts.every(([, rows]) => Array.isArray(rows) && !rows.length) && html`<p class="empty">${EMPTY[what]}</p>`}
    ${parts.map(([title, part], n) => html`<section key=${n} class="panel" aria-label=${title || what}>${title && html`<header><h2>${words(title)}</h2></header>`}${rows(part) ? html`<${Rows} rows=${part} />` : html`<${Facts} value=${part} />`}</section>`)}</main>`;
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
