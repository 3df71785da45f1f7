// The shell around all pages: where to go, keys, help. One page a route.
import { html, render, useEffect, useRef, useState } from "./base.js";
import { about } from "./data.js";
import { clock, utc } from "./format.js";
import { keys, listenForKeys } from "./keys.js";
import { Part } from "./parts.js";
import { embedded, href, link, listen, useRoute } from "./route.js";
import { RunsPage } from "./pages/runs.js";
import { RunPage } from "./pages/run.js";
import { TaskPage } from "./pages/task.js";
import { TriagePage } from "./pages/triage.js";
import { WallPage } from "./pages/wall.js";
import { MachinePage } from "./pages/machine.js";
import { ComparePage } from "./pages/compare.js";
import { FleetPage } from "./pages/fleet.js";

const HELP = [
  ["/", "search"],
  ["j k", "next and previous row"],
  ["enter", "open the row"],
  ["[ ]", "previous and next attempt"],
  ["← →", "previous and next step"],
  ["space", "play the steps"],
  ["+ − 0", "zoom, when the timeline has the focus; ← → moves it"],
  ["g r", "all runs"],
  ["esc", "leave a field, close this"],
  ["?", "this help"],
];

function Help({ close }) {
  const box = useRef(null);
  useEffect(() => {
    box.current.showModal();
  }, []);
  return html`<dialog ref=${box} class="help" aria-labelledby="help-head" onClose=${close} onClick=${(event) => event.target === box.current && box.current.close()}>
    <h2 id="help-head">Keys</h2><dl>${HELP.map(([key, does]) => html`<div key=${key}><dt><kbd>${key}</kbd></dt><dd>${does}</dd></div>`)}</dl>
    <p class="legend">${["pass", "fail", "broken", "running", "waiting"].map((name) => html`<span key=${name} class="mark-box"><span class=${`mark ${name}`} aria-hidden="true"></span>${name}</span>`)}</p>
    <button type="button" onClick=${() => box.current.close()}>close</button></dialog>`;
}

function page(parts, query) {
  const [first, run, what, id] = parts;
  if (!first) return html`<${RunsPage} query=${query} />`;
  if (first === "compare") return html`<${ComparePage} query=${query} />`;
  if (["pools", "machines", "money"].includes(first)) return html`<${FleetPage} key=${first} what=${first} />`;
  if (first === "runs" && run) {
    const pages = { triage: TriagePage, wall: WallPage, tasks: TaskPage, machines: MachinePage };
    const Page = what ? pages[what] : RunPage;
    if (Page) return html`<${Page} key=${`${run}/${what}/${id}`} name=${run} id=${id} query=${query} />`;
  }
  return html`<main id="main"><h1>There is no such page</h1><p><a href=${href("/")}>All runs</a></p></main>`;
}

function Shell() {
  const { parts, query } = useRoute();
  const [help, setHelp] = useState(false);
  const [file, setFile] = useState(null);
  useEffect(() => {
    about().then(setFile);
  }, []);
  useEffect(() => {
    let prefix = 0;
    return keys({
      "?": () => setHelp(true),
      "/": () => document.getElementById("search")?.focus(),
      g: () => {
        prefix = Date.now();
      },
      r: () => Date.now() - prefix < 1500 && document.querySelector("nav a")?.click(),
    });
  }, []);
  const here = parts[0] === "runs" || !parts[0] ? "runs" : parts[0];
  const nav = embedded ? (file?.runs ?? []).map((run) => [run, `/runs/${encodeURIComponent(run)}`, parts[1] === run]) : [["runs", "/"], ["pools", "/pools"], ["machines", "/machines"], ["money", "/money"]].map(([name, to]) => [name, to, here === name]);
  useEffect(() => {
    document.title = [...parts.slice(1).reverse(), "evalfleet"].filter((part) => part && part !== "tasks" && part !== "machines").join(" · ");
  });
  return html`<a class="skip" href="#main" onClick=${(event) => { event.preventDefault(); document.getElementById("main")?.focus(); }}>to the content</a>
    <header class="top"><a class="name" href=${embedded ? (nav[0] ? href(nav[0][1]) : "#/") : "/"}>evalfleet</a>
      <nav aria-label="pages">${nav.map(([name, to, current]) => html`<a key=${name} href=${href(to)} aria-current=${current ? "page" : undefined}>${name}</a>`)}</nav>
      <span class="spring"></span>${file && html`<span class="quiet small" title=${utc(file.made)}>made ${clock(file.made)}${file.left_out ? ` · ${file.left_out}` : ""}</span>`}
      <button type="button" class="plain" onClick=${() => setHelp(true)} aria-label="keys and help">?</button></header>
    <${Part} key=${parts.join("/")}>${page(parts, query)}</${Part}>
    ${help && html`<${Help} close=${() => setHelp(false)} />`}`;
}

listen();
listenForKeys();
addEventListener("beforeprint", () => {
  for (const folded of document.querySelectorAll("details")) folded.open = true;
});
if (embedded && !location.hash.slice(1)) about().then((file) => file.runs.length === 1 && location.replace(link(["runs", file.runs[0]])));
render(html`<${Shell} />`, document.getElementById("app"));
