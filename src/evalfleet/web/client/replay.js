// Replay of an attempt: screenshots with the action drawn where it happened, step by step.
import { html, useEffect, useMemo, useRef, useState } from "./base.js";
import { api, get } from "./data.js";
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
const END = `from=-${CHUNK}`;
const GROWN = 6000;
const LINE = 4000;
const TYPED_MS = 300;
const BAD = /\b(error|exception|traceback|fatal|failed|panic)\b/i;

/** The log, a page at a time, its end first. The end grows while the attempt runs; the server searches all of it. */
export function Log({ run, attempt }) {
  const [log, set] = useState(null);
  const [page, turn] = useState(END);
  const [text, setText] = useState("");
  const box = useRef(null);
  const stick = useRef(true);
  const path = `${api("runs", run, "attempts", attempt)}/log`;
  const { value, error } = useDocument(embedded ? path : `${path}?${page}&most=${CHUNK}`);
  useEffect(() => {
    if (!value) return;
    set(value);
    if (box.current) box.current.scrollTop = 0;
    stick.current = !page.startsWith("from=") || page === END;
  }, [value]);
  useEffect(() => {
    if (!log?.live || embedded || log.to < log.size) return undefined;
    const timer = setTimeout(async () => {
      try {
        const more = await get(`${path}?from=${log.to}&most=${CHUNK}`);
        const all = log.text + more.text;
        set(all.split("\n").length > GROWN ? await get(`${path}?${END}&most=${CHUNK}`) : { ...more, from: log.from, text: all });
      } catch {
        set({ ...log });
      }
    }, 1500);
    return () => clearTimeout(timer);
  }, [log]);
  useEffect(() => {
    if (stick.current && box.current) box.current.scrollTop = box.current.scrollHeight;
  });
  const lines = useMemo(() => {
    const all = (log?.text ?? "").split("\n");
    const wanted = embedded ? text.toLowerCase() : "";
    return wanted ? all.filter((line) => line.toLowerCase().includes(wanted)) : all;
  }, [log?.text, text]);
  const show = (at) => {
    setText("");
    turn(`from=${at}`);
  };
  if (error && !log) return html`<${Problem} error=${error} />`;
  if (!log) return html`<${Skeleton} rows=${8} />`;
  const ways = embedded ? [] : [["start", "from=0", log.from > 0], ["earlier", `before=${log.from}`, log.from > 0], ["later", `from=${log.to}`, log.to < log.size], ["end", END, log.to < log.size]];
  return html`<div class="log-head"><input type="search" placeholder="search the log" aria-label="search the log" value=${text} onInput=${(event) => setText(event.target.value)} /><span class="quiet">${bytes(log.size)}${log.live ? " · grows" : ""}</span>${!text && ways.some(([, , there]) => there) && ways.map(([name, to, there]) => html`<button key=${name} type="button" disabled=${!there} onClick=${() => turn(to)}>${name}</button>`)}${log.from > 0 && embedded && html`<span class="quiet">its end; the rest is left out</span>`}</div>
    ${text && !embedded ? html`<${Matches} key=${text} path=${path} text=${text} show=${show} />` : html`<pre class="log" tabindex="0" role="region" aria-label="lines of the log" ref=${box} onScroll=${(event) => { const node = event.currentTarget; stick.current = node.scrollHeight - node.scrollTop - node.clientHeight < 30; }}>${lines.map((line, n) => html`<${Line} key=${n} text=${line} />`)}${!log.size && html`<span class="quiet">${plain(log.problem ?? "nothing was written")}</span>`}</pre>`}`;
}

const Line = ({ text }) => html`<span class=${BAD.test(text.slice(0, LINE)) ? "bad" : ""}>${`${plain(text, LINE)}\n`}</span>`;

/** Lines of all of the log with this text; a click on one shows the log from there on. */
function Matches({ path, text, show }) {
  const [found, set] = useState({ matches: [], next: 0 });
  const [error, setError] = useState(null);
  const search = async (over) => {
    try {
      const more = await get(`${path}?${new URLSearchParams({ search: text, from: found.next })}`);
      if (!over?.()) set({ matches: [...found.matches, ...more.matches], next: more.next });
    } catch (problem) {
      setError(problem);
    }
  };
  useEffect(() => {
    let over = false;
    const timer = setTimeout(() => search(() => over), TYPED_MS);
    return () => {
      over = true;
      clearTimeout(timer);
    };
  }, []);
  return html`${error && html`<${Problem} error=${error} />`}<pre class="log" tabindex="0" role="region" aria-label="lines with this text">${found.matches.map(([at, line]) => html`<button key=${at} type="button" class="plain match" onClick=${() => show(at)}><${Line} text=${line} /></button>`)}${found.next === null ? html`<span class="quiet">${found.matches.length ? `${count(found.matches.length)} lines` : "no line has it"}</span>` : found.next > 0 ? html`<button type="button" onClick=${() => search()}>search on</button>` : html`<span class="quiet">searching …</span>`}</pre>`;
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
