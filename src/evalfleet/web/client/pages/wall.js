// The newest screenshot of every machine, those that have done nothing for longest first.
import { html, useNow } from "../base.js";
import { api } from "../data.js";
import { duration, plain, plural } from "../format.js";
import { Picture, Problem, Skeleton, Text, attemptLink, numberOf, taskOf, useDocument, useRun } from "../parts.js";
import { link } from "../route.js";
import { RunHead } from "./run.js";

const EVERY_MS = 3000;

export function WallPage({ name }) {
  const store = useRun(name, 1000);
  const { value, error } = useDocument(`${api("runs", name)}/wall`, EVERY_MS);
  const now = useNow(1000) + store.skew;
  const screens = [...(value?.screens ?? [])].sort((a, b) => (a[3] ?? Infinity) - (b[3] ?? Infinity));
  return html`<main id="main" tabindex="-1">${store.value && html`<${RunHead} store=${store} here="wall" />`}
    <div class="head sub"><h2>Wall</h2><span class="quiet">${value ? `${plural(screens.length, "screen")}, longest idle first` : ""}</span></div>
    ${error && html`<${Problem} error=${error} />`}${!value && !error && html`<${Skeleton} rows=${6} />`}
    ${value && !screens.length && html`<p class="empty">No machine shows a screen now. ${store.run && !store.run.live ? "The run is over: its replays are with its tasks." : "It is shown when the first attempt has taken one."}</p>`}
    <ul class="wall">${screens.map(([machine, attempt, ms, idle, url]) => html`<${Screen} key=${machine} ...${{ store, name, machine, attempt, ms, idle, url, now }} />`)}</ul></main>`;
}

function Screen({ store, name, machine, attempt, ms, idle, url, now }) {
  const machineName = store.value ? store.machineName(machine) : machine;
  const age = ms === null ? null : Math.max(0, now - ms) / 1000;
  const to = attempt ? attemptLink(name, taskOf(attempt), numberOf(attempt)) : link(["runs", name, "machines", machine]);
  const path = url && ms !== null ? `${url}${url.includes("?") ? "&" : "?"}at=${ms}` : url;
  return html`<li><a href=${to}><span class="screen">${url ? html`<${Picture} path=${path} alt=${`screen of ${plain(machineName, 60)}`} again=${EVERY_MS} />` : html`<span class="no-picture">no screen yet</span>`}</span>
    <span class="caption"><b>${plain(machineName, 60)}</b><span class="spring"></span><span class="quiet">${age === null ? "" : `${duration(age)} old`}</span></span>
    <span class="caption"><${Text} most=${60}>${attempt ?? "idle"}</${Text}><span class="spring"></span>${idle !== null && idle !== undefined && html`<span class="quiet">no step for ${duration(Math.max(0, now - idle) / 1000)}</span>`}</span></a></li>`;
}
