// One run: is it going well, is anything stuck, what does it cost, what broke, and is it the agent or us.
import { html, useEffect, useMemo, usePrinting, useRef, useState } from "../base.js";
import { api, post } from "../data.js";
import { clock, count, duration, instant, number, percent, plain, plural, usd, words } from "../format.js";
import { At, Bar, Dot, Facts, Figure, Interval, Mark, Panel, Part, Problem, Rate, Skeleton, Text, Unknown, attemptLink, settledCounts, useControl, useRun } from "../parts.js";
import { embedded, link, setQuery } from "../route.js";
import { inOrder } from "../store.js";
import { Tasks } from "../tasks.js";
import { Timeline } from "../timeline.js";

export function RunPage({ name, query }) {
  const store = useRun(name);
  if (!store.value) return html`<main id="main" tabindex="-1"><div class="head"><h1><bdi>${plain(name, 80)}</bdi></h1></div>${store.error ? html`<${Problem} error=${store.error} />` : html`<${Skeleton} rows=${12} />`}</main>`;
  const { run } = store;
  return html`<main id="main" tabindex="-1" class="run-page">
    <${RunHead} store=${store} here="run" />
    ${store.error && html`<${Problem} error=${store.error} />`}
    <${Bar} counts=${settledCounts(run.counts, run.ended !== null)} total=${run.counts.total} label="tasks" />
    <${Figures} store=${store} />
    <div class="run-body"><div class="run-left">
      ${parted([Attention, Timeline], { store, query })}
      <div class="cards">${parted([Domains, Causes, Money, Slowest, Machines, Places, Method], { store, run, query })}</div>
    </div><div class="run-right">${parted([Tasks], { store, query })}</div></div>
  </main>`;
}

/** Each in a part of its own: a fault in one leaves the others. */
const parted = (panels, given) => panels.map((Shown) => html`<${Part} key=${Shown.name}><${Shown} ...${given} /></${Part}>`);

/** Name, dot, where it runs, ways to its pages, controls. It stands on every page of the run. */
export function RunHead({ store, here, children }) {
  const { run, name } = store;
  const broken = (run.causes ?? []).reduce((sum, [, n]) => sum + n, 0);
  const tabs = [["run", [], "run"], ["triage", ["triage"], `triage${broken ? ` ${count(broken)}` : ""}`], ["wall", ["wall"], "wall"]];
  const places = (run.places ?? []).map((place) => (typeof place === "string" ? place : place.name)).join(", ");
  const about = [run.benchmark, run.agent, run.model, places].filter(Boolean).map((word) => plain(word, 60));
  return html`<div class="head"><h1><a href=${link(["runs", name])}><bdi>${plain(name, 80)}</bdi></a></h1><${Dot} store=${store} />
      ${run.status !== "running" && run.status !== "done" && html`<span class="tag">${run.status}</span>`}${run.paused && html`<span class="tag">paused</span>`}
      <span class="quiet about"><bdi>${about.join(" · ")}</bdi></span><span class="spring"></span>
      <nav class="tabs" aria-label="of this run">${tabs.map(([id, parts, title]) => (embedded && id === "wall" ? null : html`<a key=${id} href=${link(["runs", name, ...parts])} aria-current=${here === id ? "page" : undefined}>${title}</a>`))}</nav>
      <${Controls} store=${store} /></div>${children}`;
}

const VERBS = { pause: "No more attempts are handed out; those that run go on.", unpause: "Attempts are handed out again.", drain: "What runs may end; then the run ends, and its machines go.", cancel: "What runs is ended now, and its machines go." };

function Controls({ store }) {
  const [asked, ask] = useState(null);
  const { run } = store;
  if (!useControl() || !run.live) return null;
  const verbs = [run.paused ? "unpause" : "pause", "drain", "cancel"];
  const sets = { pause: { workers: 0 }, unpause: { workers: run.workers } };
  return html`<span class="buttons">${verbs.map((verb) => html`<button key=${verb} type="button" class=${verb === "cancel" ? "danger" : ""} onClick=${() => ask(verb)}>${verb}</button>`)}</span>
    ${asked && html`<${Confirm} run=${store.name} verb=${asked} what=${VERBS[asked]} sets=${sets[asked]} close=${() => ask(null)} />`}`;
}

/** Says which run it is, asks why, and tells what the server said. */
function Confirm({ run, verb, what, sets, close }) {
  const box = useRef(null);
  const [why, setWhy] = useState("");
  const [state, set] = useState({});
  useEffect(() => box.current.showModal(), []);
  const send = async (event) => {
    event.preventDefault();
    set({ busy: true });
    try {
      await post(`${api("runs", run)}/steer`, { verb: sets ? "set" : verb, arguments: sets ?? {}, reason: why });
      box.current.close();
    } catch (error) {
      set({ error });
    }
  };
  return html`<dialog ref=${box} class="confirm" aria-labelledby="confirm-head" onClose=${close}><form onSubmit=${send}>
    <h2 id="confirm-head">${words(verb)} <bdi>${plain(run, 80)}</bdi>?</h2><p>${what}</p>
    <label>Why (kept in the journal) <input value=${why} onInput=${(event) => setWhy(event.target.value)} maxlength="500" /></label>
    ${state.error && html`<${Problem} error=${state.error} />`}
    <p class="row"><button type="submit" class=${verb === "cancel" ? "danger" : "strong"} disabled=${state.busy}>${words(verb)} ${plain(run, 40)}</button><button type="button" onClick=${() => box.current.close()}>leave it</button></p></form></dialog>`;
}

function Figures({ store }) {
  const { run } = store;
  const { counts, money = {} } = run;
  const done = counts.pass + counts.fail + counts.broken;
  const left = Array.isArray(run.left_s) ? run.left_s : run.left_s ? [run.left_s, run.left_s] : null;
  const now = store.now();
  return html`<dl class="figures">
    <${Shown} name="done">${count(done)}<span class="quiet"> of ${count(counts.total)}</span></${Shown}>
    <${Shown} name="success"><${Rate} rate=${run.rate} low=${run.low} high=${run.high} /></${Shown}>
    <${Shown} name="broken"><a href=${link(["runs", store.name], { outcome: "broken" })}>${count(counts.broken)}</a></${Shown}>
    <${Shown} name="retries">${run.retries ? html`<a href=${link(["runs", store.name, "triage"])}>${count(run.retries)}</a>` : html`<${Figure} value=${run.retries} />`}</${Shown}>
    ${run.live ? html`<${Shown} name="pace"><${Figure} value=${run.pace} of=${(pace) => `${number(Math.round(pace * 10) / 10)}/min`} why="too little has ended to tell" /></${Shown}>
      <${Shown} name="ends">${left ? html`<span title=${`in ${duration(left[0])} to ${duration(left[1])}`}>${clock(now + 1000 * left[0], now)}${left[1] - left[0] > 60 ? ` to ${clock(now + 1000 * left[1], now)}` : ""}</span>` : html`<${Unknown} why="too little has ended to tell" />`}</${Shown}>`
    : html`<${Shown} name="took"><${Figure} value=${run.started && run.ended ? (run.ended - run.started) / 1000 : null} of=${duration} why="it has not ended" /></${Shown}>`}
    <${Shown} name="machines"><${Figure} value=${money.machine_usd} of=${usd} why="its place tells no prices" /></${Shown}>
    <${Shown} name="models"><${Figure} value=${money.model_usd} of=${usd} why="its model calls were not metered" /></${Shown}>
    ${money.budget_usd ? html`<${Shown} name="budget">${usd(money.budget_usd)}</${Shown}>` : null}
    <${Shown} name="began"><${At} ms=${run.started} /></${Shown}></dl>`;
}

const Shown = ({ name, children }) => html`<div><dt>${name}</dt><dd>${children}</dd></div>`;

function Attention({ store }) {
  const { run } = store;
  const alerts = run.alerts ?? [];
  const notes = (run.notes ?? []).filter(Boolean);
  const { cells } = store.attempts;
  const broken = useMemo(() => {
    const causes = new Map();
    cells.outcome.forEach((outcome, n) => {
      if (outcome !== "broken") return;
      const own = causes.get(cells.cause[n]);
      if (own) own.push(n);
      else causes.set(cells.cause[n], [n]);
    });
    return [...causes].sort((a, b) => b[1].length - a[1].length).slice(0, 3);
  }, [store.attempts.version, store.attempts]);
  if (!alerts.length && !notes.length && !broken.length) return run.live ? html`<p class="calm"><${Mark} outcome="pass" /> Nothing needs attention.</p>` : null;
  return html`<${Panel} title="Needs attention" id="attention-head" className="attention"><ul>
    ${alerts.slice(0, 12).map(([severity, text, machine, attempt, when], n) => {
      const task = attempt && store.attempts.item(attempt);
      return html`<li key=${n}><span class=${`bang ${severity}`} title=${severity} aria-label=${severity} role="img">!</span><span class="grow"><${Text} most=${300}>${text}</${Text}> <span class="quiet"><${At} ms=${instant(when)} /></span></span>
        ${task && html`<a href=${attemptLink(store.name, task.task, task.number)}>show</a>`}${machine && store.machines.has(machine) && html`<a href=${link(["runs", store.name, "machines", machine])}>${plain(store.machineName(machine), 40)}</a>`}</li>`;
    })}
    ${broken.map(([cause, own]) => {
      const machines = new Set(own.map((n) => cells.machine[n]));
      const last = own.reduce((newest, n) => (cells.started[n] >= cells.started[newest] ? n : newest));
      return html`<li key=${cause}><${Mark} outcome="broken" /><span class="grow">${plural(own.length, "attempt")} broken by <b>${words(cause) || "an unknown cause"}</b> <span class="quiet">on ${machines.size === 1 ? plain(store.machineName(cells.machine[last]), 60) : plural(machines.size, "machine")}</span></span>
        <a href=${attemptLink(store.name, cells.task[last], cells.number[last])}>newest</a><a href=${`${link(["runs", store.name, "triage"])}`}>triage</a></li>`;
    })}
    ${notes.slice(0, 12).map((note, n) => html`<li key=${`n${n}`}><span class="bang" aria-hidden="true">·</span><span class="grow"><${Text} most=${400}>${note}</${Text}></span></li>`)}
  </ul></${Panel}>`;
}

function Domains({ run, query }) {
  const domains = (run.domains ?? []).filter(([name]) => name || (run.domains ?? []).length > 1);
  const [all, setAll] = useState(false);
  const printing = usePrinting();
  if (!domains.length) return null;
  const shown = all || printing ? domains : domains.slice(0, 14);
  return html`<${Panel} title="Domains" id="domains-head"><div class="scroll-x"><table><thead><tr><th scope="col">domain</th><th scope="col" class="wide" title="95% interval of the success rate">interval</th><th scope="col" class="r">success</th><th scope="col" class="r">done</th></tr></thead><tbody>
    ${shown.map(([name, pass, fail, broken, total, rate, low, high]) => html`<tr key=${name}><th scope="row"><button type="button" class="plain" aria-pressed=${query.get("domain") === name ? "true" : "false"} onClick=${() => setQuery({ domain: query.get("domain") === name ? null : name })}><${Text} most=${40}>${name || "none"}</${Text}></button></th><td class="wide"><${Interval} rate=${rate} low=${low} high=${high} /></td><td class="r"><${Rate} rate=${rate} low=${low} high=${high} /></td><td class="r">${count(pass + fail + broken)}${pass + fail + broken < total && html`<span class="quiet">/${count(total)}</span>`}</td></tr>`)}
  </tbody></table></div>${domains.length > shown.length && html`<button type="button" onClick=${() => setAll(true)}>all ${count(domains.length)}</button>`}</${Panel}>`;
}

function Causes({ store }) {
  const causes = store.run.causes ?? [];
  const most = Math.max(1, ...causes.map(([, n]) => n));
  return html`<${Panel} title="What broke" id="causes-head" more=${causes.length ? html`<a href=${link(["runs", store.name, "triage"])}>triage</a>` : null}>
    ${causes.length ? html`<table><tbody>${causes.map(([cause, n]) => html`<tr key=${cause}><th scope="row"><a href=${link(["runs", store.name, "triage"], { cause })}><${Text} most=${40}>${words(cause)}</${Text}></a></th><td class="wide"><span class="length broken" style=${{ width: `${(100 * n) / most}%` }}></span></td><td class="r">${count(n)}</td></tr>`)}</tbody></table><p class="quiet small">Attempts that say nothing about the agent. Each task is tried again.</p>`
    : html`<p class="quiet">No attempt broke: every score is the agent's.</p>`}</${Panel}>`;
}

function Money({ run }) {
  const { money = {} } = run;
  const hours = (money.by_hour ?? []).slice(-24);
  const most = Math.max(1e-9, ...hours.map(([, machines, models]) => (machines ?? 0) + (models ?? 0)));
  const spent = (money.machine_usd ?? 0) + (money.model_usd ?? 0);
  return html`<${Panel} title="Money" id="money-head" more=${html`<span><b>${usd(spent)}</b>${money.budget_usd ? html`<span class="quiet"> of ${usd(money.budget_usd)} (${percent(spent / money.budget_usd, 0)})</span>` : null}</span>`}>
    <dl class="facts"><div><dt>machines</dt><dd><${Figure} value=${money.machine_usd} of=${usd} why="its place tells no prices" /></dd></div><div><dt>models</dt><dd><${Figure} value=${money.model_usd} of=${usd} why="its model calls were not metered" /></dd></div></dl>
    ${hours.length > 0 && spent > 0 && html`<div class="hours" role="img" aria-label=${`by hour: ${hours.map(([at, a, b]) => `${clock(at)} ${usd((a ?? 0) + (b ?? 0))}`).join(", ")}`}>${hours.map(([at, machines, models]) => html`<span key=${at} title=${`${clock(at)}: machines ${usd(machines)}, models ${usd(models)}`}><i class="models" style=${{ height: `${(100 * (models ?? 0)) / most}%` }}></i><i style=${{ height: `${(100 * (machines ?? 0)) / most}%` }}></i></span>`)}</div><p class="quiet small">by hour from ${clock(hours[0][0], run.started)}; at most ${usd(most)}. Filled: machines, hollow: models.</p>`}
  </${Panel}>`;
}

/** Where the five largest values are that are more than `least`, the largest first. */
function most(values, least) {
  const best = [];
  for (let n = 0; n < values.length; n += 1) {
    if (!(values[n] > (best.length === 5 ? values[best[4]] : least))) continue;
    best.push(n);
    best.sort((a, b) => values[b] - values[a] || a - b);
    if (best.length > 5) best.pop();
  }
  return best;
}

function Slowest({ store }) {
  const { cells } = store.tasks;
  const lists = useMemo(() => [most(cells.seconds, 0), most(cells.attempts, 1)], [store.tasks, store.tasks.version]);
  const list = (title, own, values, shown) => own.length > 0 && html`<h3>${title}</h3><ol class="list">${own.map((n) => html`<li key=${cells.id[n]}><${Mark} outcome=${cells.outcome[n]} /><a class="grow" href=${link(["runs", store.name, "tasks", cells.id[n]])}><${Text} most=${60}>${cells.id[n]}</${Text}></a><span>${shown(values[n])}</span></li>`)}</ol>`;
  return html`<${Panel} title="Slowest and flakiest" id="slowest-head">${list("longest", lists[0], cells.seconds, duration)}${list("most attempts", lists[1], cells.attempts, count)}${!lists[0].length && html`<p class="quiet">No task has ended yet.</p>`}</${Panel}>`;
}

const PRINTED = 40;

function Machines({ store }) {
  const { machines } = store;
  const [all, setAll] = useState(false);
  const printing = usePrinting();
  if (!machines.count) return html`<${Panel} title="Machines" id="machines-head"><p class="quiet">None was asked for yet.</p></${Panel}>`;
  const gone = machines.cells.phase.map((phase) => (["deleted", "gone", "ended"].includes(phase) ? 1 : 0));
  const shown = inOrder(gone).slice(0, all ? 500 : printing ? PRINTED : 8).map((n) => machines.at(n));
  return html`<${Panel} title="Machines" id="machines-head" more=${html`<span class="quiet">${plural(machines.count, "machine")}</span>`}><div class="scroll-x"><table><thead><tr><th scope="col">name</th><th scope="col">phase</th><th scope="col">now</th><th scope="col" class="r">cost</th></tr></thead><tbody>
    ${shown.map((machine) => html`<tr key=${machine.id}><th scope="row"><a href=${link(["runs", store.name, "machines", machine.id])}><${Text} most=${40}>${machine.name ?? machine.id}</${Text}></a></th><td>${words(machine.phase)}</td><td class="now"><${Text} most=${60}>${machine.attempt ?? machine.step ?? machine.why ?? ""}</${Text}></td><td class="r"><${Figure} value=${machine.usd} of=${usd} why="its place tells no prices" /></td></tr>`)}
  </tbody></table></div>${!all && machines.count > shown.length && html`<button type="button" onClick=${() => setAll(true)}>all ${count(machines.count)}</button>`}${printing && machines.count > shown.length && html`<p class="quiet small">${count(machines.count - shown.length)} more machines are not printed.</p>`}</${Panel}>`;
}

const CIRCUITS = { open: "left", draining: "no new machines", closed: "machines again" };

/** What ran where, and why a place was left: said where there were several. */
function Places({ run }) {
  const uses = run.by_place ?? [];
  if (uses.length < 2) return null;
  const changes = uses.flatMap((use) => use.changes.map((change) => [instant(change.at), use.place, change])).sort((a, b) => a[0] - b[0]);
  return html`<${Panel} title="Places" id="places-head"><div class="scroll-x"><table><thead><tr><th scope="col">place</th><th scope="col" class="r">machines</th><th scope="col" class="r wide">attempts</th><th scope="col" class="r">scored</th><th scope="col" class="r">broken</th><th scope="col" class="r">cost</th></tr></thead><tbody>
    ${uses.map((use) => html`<tr key=${use.place}><th scope="row"><${Text} most=${40}>${use.place}</${Text}>${use.circuit !== "closed" && html` <span class="tag">${CIRCUITS[use.circuit]}</span>`}</th><td class="r">${count(use.machines)}${use.failed_machines > 0 && html`<span class="quiet"> (${count(use.failed_machines)} failed)</span>`}</td><td class="r wide">${count(use.attempts)}</td><td class="r">${count(use.scored)}</td><td class="r">${count(use.broken)}</td><td class="r"><${Figure} value=${use.machines_usd} of=${usd} why="it tells no prices" /></td></tr>`)}
  </tbody></table></div>${changes.length > 0 && html`<ol class="list changes">${changes.map(([at, place, change], n) => html`<li key=${n}><span class="quiet"><${At} ms=${at} /></span><span class="grow"><b><${Text} most=${40}>${place}</${Text}></b> ${CIRCUITS[change.phase]}: <${Text} most=${300}>${change.why}</${Text}>${change.permanent && " It is not tried again."}</span></li>`)}</ol>`}</${Panel}>`;
}

function Method({ store }) {
  const { run } = store;
  const steering = run.steering ?? [];
  return html`<${Panel} title="Method" id="method-head"><dl class="facts">
      <div><dt>isolation</dt><dd><${Facts} value=${run.isolation} /></dd></div><div><dt>workers</dt><dd><${Facts} value=${run.workers ?? null} /></dd></div></dl>
    ${run.offers?.length > 0 && html`<h3>Bought</h3><ul class="list">${run.offers.slice(0, 20).map(([place, size, region, spot, price, priced, n], i) => html`<li key=${i}><span class="grow">${count(n)} × <${Text} most=${60}>${size || place}</${Text}>${spot && " spot"} <span class="quiet"><${Text} most=${60}>${region ? `${place}, ${region}` : place}</${Text}></span></span><span>${price ? html`${usd(price)}/h${priced && html` <span class="quiet" title="the date of the price">${plain(priced, 30)}</span>`}` : html`<span class="quiet">free</span>`}</span></li>`)}</ul>`}
    <details><summary>versions, digests, limits, settings</summary><${Facts} value=${run.provenance ?? null} /></details>
    ${steering.length > 0 && html`<h3>Changed by people</h3><ul class="list">${steering.map((change, n) => html`<li key=${n}><span class="quiet"><${At} ms=${instant(change.at)} /></span><span class="grow"><${Text}>${change.what}</${Text}></span></li>`)}</ul>`}</${Panel}>`;
}

