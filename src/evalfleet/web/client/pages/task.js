// One task, one of its attempts at a time: the page people stay on.
import { html, useEffect, useState } from "../base.js";
import { api } from "../data.js";
import { count, duration, plain, plural, usd, words } from "../format.js";
import { keys } from "../keys.js";
import { Facts, Mark, Panel, Part, Picture, Problem, Skeleton, Text, attemptLink, numberOf, useDocument, useRun } from "../parts.js";
import { Calls, Files, Log, Shot, SideBySide, StepWords, Steps, imagePath, outcomeOf, stepNumber } from "../replay.js";
import { embedded, go, link, setQuery } from "../route.js";
import { RunHead } from "./run.js";

const PLAY_MS = 900;

export function TaskPage({ name, id, query }) {
  const store = useRun(name, 1000);
  const version = store.value && store.tasks.has(id) ? Object.values(store.tasks.item(id)).join("|") : "";
  const { value: task, error } = useDocument(api("runs", name, "tasks", id), store.run?.live ? 10_000 : 0, version);
  if (error && !task) return html`<main id="main" tabindex="-1"><h1><${Text}>${id}</${Text}></h1><${Problem} error=${error} /></main>`;
  if (!task) return html`<main id="main" tabindex="-1"><h1><${Text}>${id}</${Text}></h1><${Skeleton} rows=${10} /></main>`;
  return html`<${TaskView} ...${{ name, id, query, store, task }} />`;
}

function TaskView({ name, id, query, store, task }) {
  const attempts = task.attempts;
  const of = (number) => attempts.findIndex((each) => numberOf(each.attempt) === number);
  const decided = attempts.findIndex((each) => each.attempt === task.decided_by);
  const asked = of(query.get("attempt"));
  const at = asked >= 0 ? asked : decided >= 0 ? decided : attempts.length - 1;
  const attempt = attempts[at];
  const to = (n) => attempts[n] && go(attemptLink(name, id, numberOf(attempts[n].attempt)), { replace: true });
  useEffect(() => keys({ "[": () => to(at - 1), "]": () => to(at + 1) }));
  const side = (n) => ({ run: name, task: id, attempt: attempts[n].attempt, label: `attempt ${n + 1}` });
  const other = query.get("with") ? { run: query.get("with"), task: id, label: query.get("with") } : of(query.get("beside")) >= 0 ? side(of(query.get("beside"))) : null;
  return html`<main id="main" tabindex="-1" class="task-page">${store.value && html`<${RunHead} store=${store} here="task" />`}
    <div class="head sub"><h2><${Text} most=${120}>${id}</${Text}></h2>${attempt && html`<${Verdict} task=${task} attempt=${attempt} at=${at} store=${store} />`}<span class="spring"></span>
      ${attempts.length > 1 && html`<nav class="tabs" aria-label="attempts">${attempts.map((each, n) => html`<a key=${n} href=${attemptLink(name, id, numberOf(each.attempt))} aria-current=${n === at ? "page" : undefined}><${Mark} outcome=${outcomeOf(each)} /> attempt ${n + 1}${each.cause ? ` ${words(each.cause)}` : ""}</a>`)}</nav>`}
      ${attempt && html`<${Beside} attempts=${attempts} at=${at} query=${query} store=${store} />`}</div>
    ${attempt && other ? html`<${SideBySide} key=${`${attempt.attempt} ${other.run} ${other.attempt}`} first=${other.run === name ? side(at) : { ...side(at), label: name }} second=${other} query=${query} />` : attempt ? html`<${AttemptView} key=${attempt.attempt} run=${name} attempt=${attempt} query=${query} />` : html`<p class="empty">This task has not run${task.status === "unrun" || store.run?.live === false ? "" : " yet"}.</p>`}
    <details class="panel"><summary>what the task is</summary><${Facts} value=${{ domain: task.domain || null, tags: task.tags, time_limit: task.timeout_seconds === null ? null : duration(task.timeout_seconds), model: task.model, params: task.params, metadata: task.task_metadata }} /></details>
  </main>`;
}

const MOST_RUNS = 200;

/** Chooses what is shown beside the attempt: another one of the task, or the same task in another run. */
function Beside({ attempts, at, query, store }) {
  const chosen = query.get("with") ? `run ${query.get("with")}` : query.get("beside") ? `attempt ${query.get("beside")}` : "";
  const [asked, ask] = useState(false);
  const { value } = useDocument(asked && !embedded ? "/api/runs" : null);
  const [name, benchmark] = value ? ["name", "benchmark"].map((column) => value.runs.columns.indexOf(column)) : [0, 0];
  const runs = (value?.runs.rows ?? []).filter((row) => row[name] !== store.name && row[benchmark] === store.run?.benchmark).slice(0, MOST_RUNS).map((row) => row[name]);
  const others = attempts.map((each, n) => [numberOf(each.attempt), n]).filter(([, n]) => n !== at);
  if (embedded && !others.length) return null;
  const choose = (text) => setQuery({ with: text.startsWith("run ") ? text.slice(4) : null, beside: text.startsWith("attempt ") ? text.slice(8) : null, step: null });
  if (!asked && !chosen) return html`<button type="button" onClick=${() => ask(true)}>compare with …</button>`;
  const listed = query.get("with") && !runs.includes(query.get("with")) ? [query.get("with"), ...runs] : runs;
  return html`<label class="beside">beside it <select value=${chosen} onFocus=${() => ask(true)} onChange=${(event) => choose(event.target.value)}><option value="">nothing</option>
    ${others.map(([number, n]) => html`<option key=${number} value=${`attempt ${number}`}>attempt ${n + 1}</option>`)}${listed.map((run) => html`<option key=${run} value=${`run ${run}`}>${plain(run, 60)}</option>`)}</select></label>`;
}

function Verdict({ task, attempt, at, store }) {
  const outcome = outcomeOf(attempt);
  const machine = attempt.machine_id ?? attempt.machine;
  const cost = attempt.cost_usd ?? task.model_usd;
  const facts = [
    attempt.num_steps === null || attempt.num_steps === undefined ? null : plural(attempt.num_steps, "step"),
    attempt.duration_seconds === null ? null : duration(attempt.duration_seconds),
    cost === null || cost === undefined ? null : usd(cost),
  ].filter(Boolean);
  return html`<span class="verdict"><span class="quiet">attempt ${at + 1} of ${task.attempts.length}</span><span><${Mark} outcome=${outcome} word />${attempt.score === null || attempt.score === undefined ? "" : html` <b>${attempt.score}</b>`}${attempt.cause ? html` <b>${words(attempt.cause)}</b>` : ""}</span>
    ${facts.map((fact) => html`<span key=${fact}>${fact}</span>`)}<a href=${link(["runs", store.name, "machines", machine])}><${Text} most=${60}>${attempt.machine}</${Text}></a></span>`;
}

function AttemptView({ run, attempt, query }) {
  const running = outcomeOf(attempt) === "running";
  const { value, error } = useDocument(api("runs", run, "attempts", attempt.attempt), running ? 3000 : 0);
  const [playing, setPlaying] = useState(false);
  const steps = value?.steps ?? [];
  const asked = query.get("step");
  const last = steps.length - 1;
  const found = steps.findIndex((step) => String(step.n) === asked);
  const at = found >= 0 ? found : last;
  const move = (n) => steps.length && setQuery({ step: n >= last && running ? null : steps[Math.max(0, Math.min(last, n))].n });
  useEffect(() => keys({ ArrowLeft: () => move(at - 1), ArrowRight: () => move(at + 1), Home: () => move(0), End: () => move(last), " ": () => setPlaying(!playing) }));
  useEffect(() => {
    if (!playing) return undefined;
    if (at >= last && found >= 0) {
      setPlaying(false);
      return undefined;
    }
    const timer = setTimeout(() => move(found < 0 ? 0 : at + 1), PLAY_MS);
    return () => clearTimeout(timer);
  }, [playing, at, found]);
  const images = (value?.files ?? []).filter(([path]) => /\.(png|jpe?g|webp)$/i.test(path));
  return html`${error && html`<${Problem} error=${error} />`}
    ${attempt.error && html`<p class="problem"><${Text} most=${2000}>${attempt.error}</${Text}></p>`}${attempt.problem && html`<p class="problem"><${Text}>${attempt.problem}</${Text}></p>`}
    ${!value && !error && html`<${Skeleton} rows=${10} />`}
    ${value && html`<div class="replay"><div class="replay-left"><${Part}>
        ${steps.length ? html`<${Shot} run=${run} attempt=${attempt.attempt} step=${steps[at]} eager />${steps[at + 1]?.image && html`<span class="ahead"><${Picture} path=${imagePath(run, attempt.attempt, steps[at + 1].image)} alt="" lazy=${false} /></span>`}
          <div class="replay-bar"><button type="button" onClick=${() => move(at - 1)} disabled=${at <= 0} aria-label="previous step">←</button><button type="button" onClick=${() => setPlaying(!playing)} aria-label=${playing ? "stop" : "play"}>${playing ? "stop" : "play"}</button><button type="button" onClick=${() => move(at + 1)} disabled=${at >= last} aria-label="next step">→</button><b aria-live="polite">step ${stepNumber(steps, at)} of ${stepNumber(steps, last)}</b></div>
          <${Steps} steps=${steps} at=${at} move=${move} /><${StepWords} step=${steps[at]} before=${steps[at - 1]} />`
        : html`<p class="quiet panel">No steps: ${plain(value.steps_problem ?? (running ? "none was taken yet" : "its benchmark tells none, or none was taken"), 300)}</p>${images.length > 0 && html`<ul class="wall small">${images.slice(0, 12).map(([path]) => html`<li key=${path}><span class="screen"><${Picture} path=${imagePath(run, attempt.attempt, path)} alt=${plain(path, 100)} /></span><span class="caption"><${Text} most=${60}>${path}</${Text}></span></li>`)}</ul>`}`}
      </${Part}></div><div class="replay-right"><${Panel} title="Log" id="log-head" className="log-panel"><${Log} key=${attempt.attempt} run=${run} attempt=${attempt.attempt} /></${Panel}></div></div>
      <div class="cards"><${Panel} title="Model calls" id="calls-head" more=${amount(value.calls)}><${Calls} calls=${value.calls ?? []} /></${Panel}>
        <${Panel} title="Files" id="files-head" more=${amount(value.files)}><${Files} run=${run} attempt=${attempt.attempt} files=${value.files ?? []} /></${Panel}>
        <${Panel} title="Result" id="result-head">${value.result ? html`<${Facts} value=${value.result} />` : html`<p class="quiet">${running ? "It is not there yet." : "No result.json was written."}</p>`}</${Panel}></div>`}`;
}

const amount = (list) => (list?.length ? html`<span class="quiet">${count(list.length)}</span>` : null);
