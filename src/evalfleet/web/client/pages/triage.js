// Fifty failures that are one: attempts grouped by cause and by what their last lines say.
import { html, useEffect, useState } from "../base.js";
import { api } from "../data.js";
import { count, plain, plural, words } from "../format.js";
import { keys } from "../keys.js";
import { Mark, Problem, Skeleton, Text, attemptLink, numberOf, taskOf, useDocument, useRun } from "../parts.js";
import { link, setQuery } from "../route.js";
import { RunHead } from "./run.js";

const MOST = 60;
const FAILED = "failed";

/** What broke them; those that were scored and did not pass are the agent's own. */
const causeOf = (group) => group.cause ?? FAILED;

export function TriagePage({ name, query }) {
  const store = useRun(name, 1000);
  const { value, error } = useDocument(`${api("runs", name)}/triage`, 10_000);
  const cause = query.get("cause");
  const groups = (value?.groups ?? []).filter((group) => !cause || causeOf(group) === cause);
  const open = query.get("group");
  const place = groups.findIndex((group) => String(group.id) === open);
  const select = (n) => groups.length && setQuery({ group: groups[Math.max(0, Math.min(groups.length - 1, n))].id });
  useEffect(() => keys({ j: () => select(place + 1), k: () => select(place - 1) }));
  const causes = [...new Set((value?.groups ?? []).map(causeOf))];
  return html`<main id="main" tabindex="-1">${store.value && html`<${RunHead} store=${store} here="triage" />`}
    <div class="head sub"><h2>Triage</h2><span class="quiet">${value ? `${plural(groups.length, "group")} of ${plural(groups.reduce((sum, group) => sum + group.count, 0), "attempt")}` : ""}</span>
      <span class="chips">${causes.length > 1 && causes.map((each) => html`<button key=${each} type="button" class="chip" aria-pressed=${cause === each ? "true" : "false"} onClick=${() => setQuery({ cause: cause === each ? null : each })}>${words(each)}</button>`)}</span></div>
    ${error && html`<${Problem} error=${error} />`}${!value && !error && html`<${Skeleton} rows=${6} />`}
    ${value && !groups.length && html`<p class="empty">Nothing failed or broke${cause ? ` by ${words(cause)}` : ""}.</p>`}
    <ul class="groups">${groups.map((group) => html`<${Group} key=${group.id} store=${store} run=${name} group=${group} open=${String(group.id) === open} />`)}</ul></main>`;
}

function Group({ store, run, group, open }) {
  const [all, setAll] = useState(false);
  const attempts = all ? group.attempts : group.attempts.slice(0, MOST);
  return html`<li class=${`group ${open ? "selected" : ""}`}><button type="button" class="group-head" aria-expanded=${open ? "true" : "false"} onClick=${() => setQuery({ group: open ? null : group.id })}>
      <span class="times">${count(group.count)} ×</span><${Mark} outcome=${causeOf(group) === FAILED ? "fail" : "broken"} /><b>${words(causeOf(group))}</b><span class="grow mono"><${Text} most=${240}>${group.text || "(no output)"}</${Text}></span></button>
    ${open && html`<div class="group-body"><pre class="log" tabindex="0"><${Text} most=${8000}>${group.text}</${Text}></pre>
      <ul class="attempts">${attempts.map((id) => html`<li key=${id}><${AttemptLink} store=${store} run=${run} id=${id} /></li>`)}</ul>
      ${attempts.length < group.attempts.length && html`<button type="button" onClick=${() => setAll(true)}>all ${count(group.attempts.length)}</button>`}
      <p><a href=${link(["runs", run], { group: group.id })}>the tasks of these in the table</a></p></div>`}</li>`;
}

function AttemptLink({ store, run, id }) {
  const machine = store.value ? store.attempts.cell(id, "machine") : null;
  const name = machine && store.machineName(machine);
  return html`<a href=${attemptLink(run, taskOf(id), numberOf(id))}><${Text} most=${80}>${id}</${Text}></a>${name && html` <span class="quiet">${plain(name, 40)}</span>`}`;
}
