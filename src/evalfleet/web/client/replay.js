// Replay of an attempt: screenshots with the action drawn where it happened, step by step.
import { html, useEffect, useMemo, useRef, useState } from "./base.js";
import { api } from "./data.js";
import { bytes, count, duration, instant, plain } from "./format.js";
import { keys } from "./keys.js";
import { Facts, Mark, Picture, Problem, Skeleton, Text, Unknown, attemptLink, numberOf, useDocument } from "./parts.js";
import { embedded, setQuery } from "./route.js";

export const imagePath = (run, attempt, path) => `${api("runs", run, "attempts", attempt)}/image/${path.split("/").map(encodeURIComponent).join("/")}`;
const filePath = (run, attempt, path) => `${api("runs", run, "attempts", attempt)}/file/${path.split("/").map(encodeURIComponent).join("/")}`;

/** The screenshot with the action on it. A click is a cross in a ring, at its place in the picture's own pixels. */
export function Shot({ run, attempt, step, eager = false }) {
  const [size, setSize] = useState(null);
  const image = step?.image;
  const point = step?.point ?? (step?.x !== null && step?.x !== undefined && step?.y !== null && step?.y !== undefined ? [step.x, step.y] : null);
  const seen = point && size && point[0] >= 0 && point[1] >= 0 && point[0] <= size[0] && point[1] <= size[1];
  return html`<div class="shot">${image ? html`<${Picture} path=${imagePath(run, attempt, image)} alt=${`screen at step ${step.n}`} lazy=${!eager} onSize=${setSize} />` : html`<span class="no-picture">${step ? "no screenshot of this step" : "no step"}</span>`}
    ${seen && image && html`<svg class="action" viewBox=${`0 0 ${size[0]} ${size[1]}`} aria-hidden="true"><g transform=${`translate(${point[0]} ${point[1]}) scale(${Math.max(1, size[0] / 900)})`}><circle r="15" class="halo" /><circle r="15" /><path d="M-22 0h14M8 0h14M0 -22v14M0 8v14" class="halo" /><path d="M-22 0h14M8 0h14M0 -22v14M0 8v14" /></g></svg>`}
  </div>`;
}

export function StepWords({ step, before }) {
  if (!step) return null;
  const [at, last] = [instant(step.at), instant(before?.at)];
  return html`<p class="step-words"><span class="mono action-text"><${Text} most=${600}>${step.action ?? "no action was recorded"}</${Text}></span></p>
    <p class="quiet">${[step.ok === null || step.ok === undefined ? null : step.ok ? "ok" : "did not work", at && last ? duration((at - last) / 1000) : null, step.tokens ? `${count(step.tokens)} tokens` : null, step.point ? `at ${step.point.map((v) => Math.round(v)).join(", ")}` : null].filter(Boolean).join(" · ")}</p>
    ${step.error && html`<p class="problem"><${Text} most=${1000}>${step.error}</${Text}></p>`}
    ${(step.thought ?? step.output) && html`<details open><summary>thought and output</summary><pre class="thought"><${Text} most=${6000}>${step.thought ?? step.output}</${Text}></pre></details>`}`;
}

/** The number of a step for people, who count from 1, as a trajectory may not. */
export const stepNumber = (steps, n) => steps[n].n + (steps[0].n === 0 ? 1 : 0);

/** Numbers of all steps; many are shown as a slider. */
export function Steps({ steps, at, move }) {
  if (steps.length > 60)
    return html`<input class="slider" type="range" min="0" max=${steps.length - 1} value=${at} aria-label="step" aria-valuetext=${`step ${stepNumber(steps, at)} of ${stepNumber(steps, steps.length - 1)}`} onInput=${(event) => move(Number(event.target.value))} />`;
  return html`<ol class="steps">${steps.map((step, n) => html`<li key=${n}><button type="button" class=${step.ok === false ? "bad" : ""} aria-current=${n === at ? "step" : undefined} aria-label=${`step ${stepNumber(steps, n)}${step.ok === false ? ", did not work" : ""}`} title=${plain(step.action, 120)} onClick=${() => move(n)}>${stepNumber(steps, n)}${step.ok === false ? "✗" : ""}</button></li>`)}</ol>`;
}

const OUTCOME = { scored: (attempt) => (attempt.success ? "pass" : "fail"), broken: () => "broken", answered: () => "answered" };

/** The outcome of an attempt as `show RUN TASK` tells it, in the word that has a shape. */
export const outcomeOf = (attempt) => OUTCOME[attempt.outcome]?.(attempt) ?? (attempt.ended_at ? "unrun" : "running");

/** What one side of two shows: an attempt of a task, by default the one that decided it. */
function useSide({ run, task, attempt }) {
  const { value: detail, error } = useDocument(api("runs", run, "tasks", task));
  const id = attempt ?? (detail && (detail.decided_by ?? detail.attempts[detail.attempts.length - 1]?.attempt)) ?? null;
  const { value, error: missing } = useDocument(id ? api("runs", run, "attempts", id) : null);
  const tried = detail?.attempts.find((each) => each.attempt === id);
  return { id, tried, value, steps: value?.steps ?? [], error: error ?? missing, idle: detail !== null && id === null };
}

/** Two attempts, step by step together. A side is `{ run, task, attempt, label }`. */
export function SideBySide({ first, second, query }) {
  const sides = [first, second];
  const found = [useSide(first), useSide(second)];
  const most = Math.max(...found.map((side) => side.steps.length));
  const at = Math.max(0, Math.min(most - 1, Number(query.get("step") ?? 1) - 1 || 0));
  const move = (n) => most && setQuery({ step: Math.max(0, Math.min(most - 1, n)) + 1 });
  useEffect(() => keys({ ArrowLeft: () => move(at - 1), ArrowRight: () => move(at + 1), Home: () => move(0), End: () => move(most - 1) }));
  return html`<div class="side-by-side">${sides.map((side, n) => html`<${Side} key=${n} side=${side} found=${found[n]} at=${at} move=${move} />`)}</div>`;
}

function Side({ side, found, at, move }) {
  const { id, tried, value, steps, error } = found;
  const here = Math.min(at, steps.length - 1);
  const told = [typeof tried?.score === "number" ? `score ${tried.score}` : null, typeof tried?.duration_seconds === "number" ? duration(tried.duration_seconds) : null].filter(Boolean);
  return html`<section class="side" aria-label=${plain(side.label, 80)}><h3>${tried && html`<${Mark} outcome=${outcomeOf(tried)} /> `}<a href=${attemptLink(side.run, side.task, side.attempt ? numberOf(side.attempt) : null)}><${Text} most=${60}>${side.label}</${Text}></a> <span class="quiet">${told.join(" · ")}</span></h3>
    ${error && html`<${Problem} error=${error} />`}${found.idle && html`<p class="quiet">It was not tried.</p>`}${!value && !error && !found.idle && html`<${Skeleton} rows=${5} />`}
    ${value && (steps.length ? html`<${Shot} run=${side.run} attempt=${id} step=${steps[here]} eager /><${Steps} steps=${steps} at=${here} move=${move} /><${StepWords} step=${steps[here]} before=${steps[here - 1]} />` : html`<p class="quiet">No steps were recorded.</p><${Log} run=${side.run} attempt=${id} />`)}
    ${value?.result && html`<details><summary>result</summary><${Facts} value=${value.result} /></details>`}</section>`;
}

const CHUNK = 200_000;
const KEPT = 2_000_000;
const LINE = 4000;
const BAD = /\b(error|exception|traceback|fatal|failed|panic)\b/i;

/** The log: its end first, more on demand; grows while the attempt runs; errors are marked; search keeps lines. */
export function Log({ run, attempt }) {
  const [log, set] = useState(null);
  const [error, setError] = useState(null);
  const [text, setText] = useState("");
  const box = useRef(null);
  const stick = useRef(true);
  const path = `${api("runs", run, "attempts", attempt)}/log`;
  const first = useDocument(embedded ? path : `${path}?from=-${CHUNK}&most=${CHUNK}`);
  useEffect(() => {
    if (first.value) set(first.value);
    setError(first.error);
  }, [first.value, first.error]);
  useEffect(() => {
    if (!log?.live || embedded) return undefined;
    const timer = setTimeout(async () => {
      try {
        const response = await fetch(`${path}?from=${log.to}&most=${CHUNK}`);
        const more = await response.json();
        if (response.ok) set({ ...more, from: log.from, text: (log.text + more.text).slice(-KEPT) });
      } catch {
        set({ ...log });
      }
    }, 1500);
    return () => clearTimeout(timer);
  }, [log]);
  useEffect(() => {
    if (stick.current && box.current) box.current.scrollTop = box.current.scrollHeight;
  });
  const earlier = async () => {
    stick.current = false;
    const from = Math.max(0, log.from - CHUNK);
    const response = await fetch(`${path}?from=${from}&most=${log.from - from}`);
    if (response.ok) {
      const more = await response.json();
      set({ ...log, from, text: more.text + log.text });
    }
  };
  const lines = useMemo(() => {
    const all = (log?.text ?? "").split("\n");
    const wanted = text.toLowerCase();
    return (wanted ? all.filter((line) => line.toLowerCase().includes(wanted)) : all).slice(-3000);
  }, [log?.text, text]);
  if (error && !log) return html`<${Problem} error=${error} />`;
  if (!log) return html`<${Skeleton} rows=${8} />`;
  return html`<div class="log-head"><input type="search" placeholder="search the log" aria-label="search the log" value=${text} onInput=${(event) => setText(event.target.value)} /><span class="quiet">${bytes(log.size)}${log.live ? " · grows" : ""}</span>${log.from > 0 && !embedded && html`<button type="button" onClick=${earlier}>earlier</button>`}${log.from > 0 && embedded && html`<span class="quiet">its end; the rest is left out</span>`}</div>
    <pre class="log" tabindex="0" role="region" aria-label="lines of the log" ref=${box} onScroll=${(event) => { const node = event.currentTarget; stick.current = node.scrollHeight - node.scrollTop - node.clientHeight < 30; }}>${lines.map((line, n) => html`<span key=${n} class=${BAD.test(line.slice(0, LINE)) ? "bad" : ""}>${`${plain(line, LINE)}\n`}</span>`)}${!log.size && html`<span class="quiet">${plain(log.problem ?? "nothing was written")}</span>`}</pre>`;
}

/** Model calls; those that were tried again for the same thing stand in one row. */
export function Calls({ calls }) {
  const rows = useMemo(() => {
    const joined = [];
    for (const call of calls) {
      const last = joined[joined.length - 1];
      if (last && last.bad && last.call.model === call.model) joined[joined.length - 1] = { call, tries: last.tries + 1, errors: [...last.errors, last.call.error ?? last.call.status], bad: failed(call) };
      else joined.push({ call, tries: 1, errors: [], bad: failed(call) });
    }
    return joined.slice(-1000);
  }, [calls]);
  if (!calls.length) return html`<p class="quiet">No model calls were metered.</p>`;
  return html`<div class="scroll-x" tabindex="0" role="region" aria-label="table of model calls"><table><thead><tr><th scope="col">model</th><th scope="col">status</th><th scope="col" class="r">in</th><th scope="col" class="r">out</th><th scope="col" class="r">ms</th><th scope="col" class="r">cost</th><th scope="col" class="r">tries</th></tr></thead><tbody>
    ${rows.map(({ call, tries, errors }, n) => html`<tr key=${n}><td><${Text} most=${40}>${call.model}</${Text}></td><td class=${failed(call) ? "bad" : ""}>${call.error ? html`<${Text} most=${120}>${call.error}</${Text}>` : call.status ?? html`<${Unknown} why="it was in flight" />`}</td><td class="r">${count(call.in)}</td><td class="r">${count(call.out)}</td><td class="r">${count(call.ms)}</td><td class="r">${call.usd === null || call.usd === undefined ? html`<${Unknown} why="its price is not known" />` : `$${call.usd.toFixed(4)}`}</td><td class="r" title=${errors.map((e) => plain(e, 80)).join("; ")}>${tries > 1 ? tries : ""}</td></tr>`)}
  </tbody></table></div>`;
}

const failed = (call) => Boolean(call.error) || (typeof call.status === "number" && call.status >= 400);

export function Files({ run, attempt, files }) {
  const [most, setMost] = useState(500);
  if (!files.length) return html`<p class="quiet">No files were kept.</p>`;
  return html`<ul class="files">${files.slice(0, most).map(([path, size]) => html`<li key=${path}>${embedded ? html`<span class="mono grow"><${Text} most=${200}>${path}</${Text}></span>` : html`<a class="mono grow" href=${filePath(run, attempt, path)} download><${Text} most=${200}>${path}</${Text}></a>`}<span class="quiet">${bytes(size)}</span></li>`)}</ul>${files.length > most && html`<button type="button" onClick=${() => setMost(files.length)}>all ${count(files.length)}</button>`}`;
}
