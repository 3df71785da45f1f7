// One machine: how it came up, how it fares, what it did, its screen.
import { html, useEffect, useRef, useState } from "../base.js";
import { api, post } from "../data.js";
import { bytes, clock, count, duration, instant, percent, plain, second, usd, words } from "../format.js";
import { At, Figure, Mark, Panel, Picture, Problem, Skeleton, Text, attemptLink, useControl, useDocument, useRun } from "../parts.js";
import { embedded } from "../route.js";
import { inOrder } from "../store.js";
import { RunHead } from "./run.js";

export function MachinePage({ name, id }) {
  const store = useRun(name, 1000);
  const may = useControl();
  const { value, error } = useDocument(api("runs", name, "machines", id), store.run?.live ? 10_000 : 0);
  const row = store.value && store.machines.item(id);
  const machine = value && !Array.isArray(value.machine) ? { ...row, ...value.machine } : row;
  const phases = joined(value?.phases ?? machine?.phases ?? []);
  const now = store.value ? store.now() : Date.now();
  const own = store.value ? attemptsOf(store, machine?.id ?? id) : [];
  return html`<main id="main" tabindex="-1">${store.value && html`<${RunHead} store=${store} here="machine" />`}
    <div class="head sub"><h2><${Text} most=${80}>${machine?.name ?? id}</${Text}></h2>${machine && html`<span class="quiet">${[machine.place, machine.offer, machine.region, words(machine.phase)].filter(Boolean).map((word) => plain(word, 60)).join(" · ")}</span><span><${Figure} value=${machine.usd} of=${usd} why="its place tells no prices" /></span>`}<span class="spring"></span>${may && store.run?.live && value?.has_screen && !machine.why && html`<${Vnc} run=${name} id=${id} />`}</div>
    ${error && html`<${Problem} error=${error} />`}${machine?.why && html`<p><${Text} most=${600}>${machine.why}</${Text}></p>`}
    ${!machine && !error && html`<${Skeleton} rows=${8} />`}
    <div class="cards">
      <${Panel} title="Phases" id="phases-head">${phases.length ? html`<table><tbody>${phases.map(([phase, from, to], n) => html`<tr key=${n}><th scope="row">${words(phase)}</th><td class="quiet"><${At} ms=${from} /></td><td class="r">${duration(((to ?? now) - from) / 1000)}${to === null && store.run?.live ? html`<span class="quiet"> so far</span>` : null}</td></tr>`)}</tbody></table>` : html`<p class="quiet">None was recorded.</p>`}</${Panel}>
      ${machine?.screen && !embedded && html`<${Panel} title="Screen" id="screen-head" more=${html`<span class="quiet"><${At} ms=${machine.screen} /></span>`}><span class="screen"><${Picture} path=${`${api("runs", name, "machines", id)}/screen?at=${machine.screen}`} alt="newest screen" /></span></${Panel}>`}
      <${Panel} title="Attempts" id="attempts-head" more=${html`<span class="quiet">${count(own.length)}</span>`}>${own.length ? html`<div class="scroll-x"><table><tbody>${own.slice(0, 200).map((attempt) => html`<tr key=${attempt.id}><td><${Mark} outcome=${attempt.outcome} word /></td><th scope="row"><a href=${attemptLink(name, attempt.task, attempt.number)}><${Text} most=${60}>${attempt.id}</${Text}></a></th><td>${words(attempt.cause)}</td><td class="r">${attempt.started ? duration(((attempt.ended ?? now) - attempt.started) / 1000) : ""}</td></tr>`)}</tbody></table></div>` : html`<p class="quiet">None ran on it.</p>`}</${Panel}>
    </div>
    ${value?.series?.rows?.length > 1 ? html`<${Series} series=${value.series} />` : value && html`<p class="quiet">No samples of its load were kept.</p>`}</main>`;
}

/** Phases of one name that follow each other are one. */
function joined(phases) {
  const all = [];
  for (const [name, from, to] of phases) {
    const last = all[all.length - 1];
    if (last && last[0] === name && last[2] === from) last[2] = to;
    else all.push([name, from, to]);
  }
  return all;
}

function attemptsOf({ attempts }, id) {
  const own = inOrder(attempts.cells.started).filter((n) => attempts.cells.machine[n] === id);
  return own.reverse().map((n) => attempts.at(n));
}

/** Opens the screen by a tunnel on a port of its own: what a machine serves never shares this page's origin. */
function Vnc({ run, id }) {
  const [state, set] = useState({});
  const open = async () => {
    set({ busy: true });
    try {
      set({ url: (await post(`${api("runs", run, "machines", id)}/screen-tunnel`, {})).url });
    } catch (error) {
      set({ error });
    }
  };
  if (state.url) return html`<a class="button strong" href=${/^https?:/.test(state.url) ? state.url : undefined} target="_blank" rel="noopener noreferrer">open its screen</a>`;
  return html`${state.error && html`<span class="quiet">${plain(state.error.message)}</span>`}<button type="button" disabled=${state.busy} onClick=${open}>screen by VNC</button>`;
}

const BYTES = /^(network|net|rx|tx|sent|received|read|written)|_in$|_out$|bytes/;
const isBytes = (name) => BYTES.test(name);

/** A chart for the shares, one for what is counted in bytes. The library is loaded with the first chart. */
function Series({ series }) {
  const names = series.columns.slice(1);
  const numeric = names.filter((name) => series.rows.some((row) => typeof row[series.columns.indexOf(name)] === "number"));
  const groups = [["Load", numeric.filter((name) => !isBytes(name)), (v) => percent(v, 0)], ["Network", numeric.filter(isBytes), (v) => `${bytes(v)}/s`]];
  return html`<div class="cards wide">${groups.filter(([, own]) => own.length).map(([title, own, shown]) => html`<${Panel} key=${title} title=${title} id=${`${title}-head`}><${Chart} series=${series} names=${own} shown=${shown} share=${title === "Load"} /></${Panel}>`)}</div>`;
}

const DASHES = [[], [6, 3], [2, 3], [10, 3, 2, 3]];
const EDGES = ["solid", "dashed", "dotted", "double"]; // the same lines in the legend, as a style sheet names them

function Chart({ series, names, shown, share }) {
  const box = useRef(null);
  const [scheme, setScheme] = useState(0);
  useEffect(() => {
    const dark = matchMedia("(prefers-color-scheme: dark)");
    const changed = () => setScheme((n) => n + 1);
    dark.addEventListener("change", changed);
    return () => dark.removeEventListener("change", changed);
  }, []);
  useEffect(() => {
    let chart = null;
    let over = false;
    let watch = null;
    import("../vendor/uplot.js").then(({ default: UPlot }) => {
      if (over) return;
      const style = getComputedStyle(box.current);
      const of = (name) => style.getPropertyValue(name).trim();
      const at = series.columns.indexOf("at") >= 0 ? series.columns.indexOf("at") : 0;
      const columns = names.map((name) => series.columns.indexOf(name));
      const data = [series.rows.map((row) => instant(row[at]) / 1000), ...columns.map((n) => series.rows.map((row) => row[n]))];
      const axis = { stroke: of("--quiet"), grid: { stroke: of("--faint"), width: 1 }, ticks: { stroke: of("--faint"), width: 1 }, font: `12px ${style.fontFamily}` };
      const time = data[0][data[0].length - 1] - data[0][0] < 600 ? second : clock;
      chart = new UPlot(
        {
          width: box.current.clientWidth,
          height: 200,
          scales: { y: share ? { range: [0, 1] } : { range: (_, low, high) => [0, Math.max(high, 1)] } },
          series: [{ value: (_, v) => (v === null ? "" : time(v * 1000, v * 1000)) }, ...names.map((name, n) => ({ label: words(name), stroke: n ? of("--ink") : of("--accent"), width: 1.4, dash: DASHES[n % 4], value: (_, v) => (v === null ? "–" : shown(v)) }))],
          legend: { markers: { dash: (_, n) => EDGES[(n - 1) % 4] } },
          axes: [{ ...axis, values: (_, splits) => splits.map((s) => time(s * 1000, s * 1000)) }, { ...axis, size: 70, values: (_, values) => values.map(shown) }],
        },
        data,
        box.current,
      );
      watch = new ResizeObserver(() => chart.setSize({ width: box.current.clientWidth, height: 200 }));
      watch.observe(box.current);
    });
    return () => {
      over = true;
      watch?.disconnect();
      chart?.destroy();
    };
  }, [series, scheme]);
  const last = series.rows[series.rows.length - 1];
  return html`<div class="chart" ref=${box} role="img" aria-label=${names.map((name) => `${words(name)} now ${last[series.columns.indexOf(name)] === null ? "unknown" : shown(last[series.columns.indexOf(name)])}`).join(", ")}></div>`;
}
