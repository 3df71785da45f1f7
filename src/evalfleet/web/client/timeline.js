// Machines x attempts on a canvas: boot, set-up, attempts by outcome, idle, silent. Zoom by wheel, by drag, by keys.
import { html, useEffect, useMemo, usePrinting, useRef, useState } from "./base.js";
import { inOrder } from "./store.js";
import { clock, count, duration, plain, percent, second, usd, words } from "./format.js";
import { attemptLink } from "./parts.js";
import { go, link, setQuery } from "./route.js";

const LABEL = 132;
const LABEL_NARROW = 64;
const ROW = 20;
const AXIS = 22;
const MONEY = 30;
const MOST_ROWS = 24;
const PRINTED_ROWS = 30;
const THIN = 2;
const STEPS_S = [1, 5, 10, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400, 172800, 604800];

/** The rows: as many for each machine as it ran attempts at once, with its phases and the numbers of its attempts in time's order. */
function laid({ attempts, machines }) {
  const { started, ended, machine } = attempts.cells;
  const lanes = new Map();
  for (let n = 0; n < machines.count; n += 1) lanes.set(machines.key(n), [{ machine: machines.at(n), lane: 0, attempts: [], free: 0 }]);
  for (const n of inOrder(started)) {
    const own = lanes.get(machine[n]);
    if (!own || started[n] === null) continue;
    let line = own[0].free <= started[n] ? own[0] : own.find((each) => each.free <= started[n]);
    if (!line) own.push((line = { machine: own[0].machine, lane: own.length, attempts: [] }));
    line.free = ended[n] ?? Infinity;
    line.attempts.push(n);
  }
  return [...lanes.values()].flat();
}

function extent(store) {
  const from = Math.min(store.run.started ?? Infinity, ...store.machines.cells.phases.slice(0, 5000).map((phases) => phases?.[0]?.[1] ?? Infinity));
  const to = Math.max(store.run.ended ?? store.now(), from + 1000);
  return Number.isFinite(from) ? [from, to] : [to - 60_000, to];
}

function colours(canvas) {
  const style = getComputedStyle(canvas);
  const of = (name) => style.getPropertyValue(name).trim();
  return { ink: of("--ink"), quiet: of("--quiet"), line: of("--line"), faint: of("--faint"), accent: of("--accent"), paper: of("--panel"), font: `12px ${style.fontFamily}` };
}

function hatch(context, colour) {
  const tile = document.createElement("canvas");
  tile.width = tile.height = 5;
  const pen = tile.getContext("2d");
  pen.strokeStyle = colour;
  pen.lineWidth = 1.4;
  pen.beginPath();
  for (const shift of [-5, 0, 5]) {
    pen.moveTo(shift, 5);
    pen.lineTo(shift + 5, 0);
  }
  pen.stroke();
  return context.createPattern(tile, "repeat");
}

/** First index whose attempt ends after `from`: attempts of one lane do not overlap. */
function firstSeen(attempts, ended, from, now) {
  let [low, high] = [0, attempts.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if ((ended[attempts[middle]] ?? now) < from) low = middle + 1;
    else high = middle;
  }
  return low;
}

class Drawing {
  constructor(canvas, store, rows, view, scroll, height) {
    Object.assign(this, { canvas, store, rows, view, scroll });
    this.width = canvas.clientWidth;
    this.height = height;
    const ratio = devicePixelRatio || 1;
    if (canvas.width !== Math.round(this.width * ratio) || canvas.height !== Math.round(height * ratio)) {
      canvas.width = Math.round(this.width * ratio);
      canvas.height = Math.round(height * ratio);
    }
    this.context = canvas.getContext("2d");
    this.context.setTransform(ratio, 0, 0, ratio, 0, 0);
    this.colours = colours(canvas);
    this.pattern = hatch(this.context, this.colours.ink);
    this.label = this.width < 600 ? LABEL_NARROW : LABEL;
  }

  x(ms) {
    return this.label + ((ms - this.view[0]) / (this.view[1] - this.view[0])) * (this.width - this.label);
  }

  draw() {
    const { context: pen, colours, width, height } = this;
    pen.clearRect(0, 0, width, height);
    pen.font = colours.font;
    pen.textBaseline = "middle";
    const bottom = height - AXIS - MONEY;
    this.axis(bottom);
    pen.save();
    pen.beginPath();
    pen.rect(0, 0, width, bottom);
    pen.clip();
    const first = Math.max(0, Math.floor(this.scroll / ROW));
    const last = Math.min(this.rows.length, Math.ceil((this.scroll + bottom) / ROW));
    for (let n = first; n < last; n += 1) this.row(this.rows[n], n * ROW - this.scroll);
    pen.restore();
    this.money(height - MONEY);
  }

  axis(bottom) {
    const { context: pen, colours, view } = this;
    const wanted = ((view[1] - view[0]) / 1000) * (90 / Math.max(1, this.width - this.label));
    const step = (STEPS_S.find((s) => s >= wanted) ?? 604800) * 1000;
    const shift = new Date(view[0]).getTimezoneOffset() * 60_000;
    pen.textAlign = "center";
    for (let at = Math.ceil((view[0] - shift) / step) * step + shift; at <= view[1]; at += step) {
      const x = Math.round(this.x(at)) + 0.5;
      pen.strokeStyle = colours.faint;
      pen.beginPath();
      pen.moveTo(x, 0);
      pen.lineTo(x, bottom + 4);
      pen.stroke();
      pen.fillStyle = colours.quiet;
      const text = step < 60_000 ? second(at) : step >= 86_400_000 ? clock(at, 0).slice(5, 10) : clock(at, at);
      const half = pen.measureText(text).width / 2;
      if (x > this.label + half && x < this.width - half) pen.fillText(text, x, bottom + AXIS / 2 + 1);
    }
    pen.strokeStyle = colours.line;
    pen.beginPath();
    pen.moveTo(this.label, bottom + 0.5);
    pen.lineTo(this.width, bottom + 0.5);
    pen.stroke();
  }

  row({ machine, lane, attempts }, y) {
    const { context: pen, colours } = this;
    const now = this.store.now();
    pen.fillStyle = colours.quiet;
    pen.textAlign = "left";
    if (!lane) pen.fillText(this.cut(plain(machine.name ?? machine.id, 60)), 0, y + ROW / 2);
    pen.save();
    pen.beginPath();
    pen.rect(this.label, y, this.width - this.label, ROW);
    pen.clip();
    if (!lane) for (const phase of machine.phases ?? []) this.phase(phase, y, now);
    this.attempts(attempts, y, now);
    pen.restore();
  }

  /** Of thousands in one row, neighbours of one outcome that are too thin to be told apart are drawn as one. */
  attempts(attempts, y, now) {
    const { started, ended, outcome: outcomes } = this.store.attempts.cells;
    let painted = -1;
    let [like, begin] = [null, 0];
    const drawThin = () => {
      if (like !== null) this.attempt(like, begin, Math.max(1, painted - begin), y, true);
      like = null;
    };
    for (let k = firstSeen(attempts, ended, this.view[0], now); k < attempts.length; k += 1) {
      const n = attempts[k];
      if (started[n] > this.view[1]) break;
      const outcome = outcomes[n];
      const [from, to] = [this.x(started[n]), this.x(ended[n] ?? now)];
      // What would lie on the pixel before is seen when one zooms in.
      if (to - painted < 0.7 && outcome !== "broken") continue;
      if (to - from >= THIN) {
        drawThin();
        this.attempt(outcome, from, to - from, y, false);
      } else if (like !== outcome || from - painted > 1) {
        drawThin();
        [like, begin] = [outcome, from];
      }
      painted = to;
    }
    drawThin();
  }

  cut(name) {
    const pen = this.context;
    const most = this.label - 10;
    if (pen.measureText(name).width <= most) return name;
    let end = name;
    while (end.length > 3 && pen.measureText(`…${end}`).width > most) end = end.slice(1);
    return `…${end}`;
  }

  phase([name, from, to], y, now) {
    const { context: pen, colours } = this;
    const x = this.x(from);
    const width = Math.max(0.5, this.x(to ?? now) - x);
    const middle = y + ROW / 2;
    if (name === "ready" || name === "idle" || name === "busy") {
      pen.fillStyle = colours.line;
      pen.fillRect(x, middle - 0.5, width, 1);
      return;
    }
    if (name === "silent" || name === "lost" || name === "queued") {
      pen.strokeStyle = name === "queued" ? colours.line : colours.ink;
      pen.setLineDash(name === "queued" ? [1, 4] : [2, 3]);
      pen.lineWidth = name === "queued" ? 1 : 2;
      pen.beginPath();
      pen.moveTo(x, middle);
      pen.lineTo(x + width, middle);
      pen.stroke();
      pen.setLineDash([]);
      pen.lineWidth = 1;
      return;
    }
    pen.fillStyle = colours.faint;
    pen.fillRect(x, y + 5, Math.max(0, width - 1), ROW - 10);
    pen.fillStyle = colours.quiet;
    pen.textAlign = "left";
    if (width > pen.measureText(words(name)).width + 8) pen.fillText(words(name), x + 4, middle + 0.5);
  }

  attempt(outcome, x, width, y, thin) {
    const { context: pen, colours } = this;
    const [top, height] = [y + 3, ROW - 6];
    const gap = width > 4 && !thin ? 1 : 0;
    if (width > 2) {
      pen.fillStyle = colours.paper;
      pen.fillRect(x, top, width - gap, height);
    }
    if (outcome === "pass") {
      pen.fillStyle = colours.accent;
      pen.fillRect(x, top, width - gap, height);
    } else if (outcome === "broken") {
      pen.fillStyle = this.pattern;
      pen.fillRect(x, top, Math.max(1.5, width - gap), height);
      this.outline(x, top, width - gap, height, colours.ink, thin);
    } else if (outcome === "running") {
      this.outline(x, top, width, height, colours.accent, false);
      pen.fillStyle = colours.accent;
      pen.fillRect(x + width - 3, top, 3, height);
    } else {
      this.outline(x, top, width - gap, height, outcome === "fail" ? colours.ink : colours.quiet, thin);
    }
  }

  outline(x, y, width, height, colour, open) {
    const pen = this.context;
    pen.strokeStyle = colour;
    pen.lineWidth = 1;
    if (open || width < 2) {
      pen.fillStyle = colour;
      pen.fillRect(x, y, Math.max(0.7, width), 1);
      pen.fillRect(x, y + height - 1, Math.max(0.7, width), 1);
      return;
    }
    pen.strokeRect(x + 0.5, y + 0.5, width - 1, height - 1);
  }

  /** What each hour cost: machines below, models on top. */
  money(top) {
    const { context: pen, colours } = this;
    const hours = this.store.run.money?.by_hour ?? [];
    const most = Math.max(...hours.map((hour) => (hour[1] ?? 0) + (hour[2] ?? 0)), 0);
    pen.fillStyle = colours.quiet;
    pen.textAlign = "left";
    pen.fillText(this.label > 100 ? "cost by hour" : "$/hour", 0, top + MONEY / 2);
    if (!most) {
      pen.fillText("nothing", this.label, top + MONEY / 2);
      return;
    }
    pen.save();
    pen.beginPath();
    pen.rect(this.label, top, this.width - this.label, MONEY);
    pen.clip();
    const end = extent(this.store)[1];
    for (const [at, machines, models] of hours) {
      const [x, to] = [this.x(at), this.x(Math.min(at + 3_600_000, end))];
      const width = Math.max(1, to - x - 1);
      const [low, high] = [(machines ?? 0) / most, (models ?? 0) / most].map((share) => share * (MONEY - 4));
      pen.fillStyle = colours.line;
      pen.fillRect(x, top + MONEY - low, width, low);
      if (high > 0) {
        pen.strokeStyle = colours.quiet;
        pen.strokeRect(x + 0.5, top + MONEY - low - high + 0.5, Math.max(0.5, width - 1), Math.max(0.5, high));
      }
      const text = usd((machines ?? 0) + (models ?? 0));
      pen.fillStyle = colours.ink;
      const seen = Math.max(x, this.label);
      if (Math.min(x + width, this.width) - seen > pen.measureText(text).width + 8) pen.fillText(text, seen + 4, top + MONEY / 2 + 2);
    }
    pen.restore();
  }
}

/** What lies under the pointer: an attempt, else a phase. */
function under(store, lane, ms) {
  const { started, ended } = store.attempts.cells;
  const now = store.now();
  const n = lane.attempts[firstSeen(lane.attempts, ended, ms, now)];
  if (n !== undefined && started[n] <= ms) return { attempt: store.attempts.at(n) };
  const phase = (lane.machine.phases ?? []).find(([, from, to]) => from <= ms && ms <= (to ?? now));
  return phase ? { phase } : {};
}

function Hint({ store, lane, found, x, y }) {
  const now = store.now();
  const name = plain(lane.machine.name ?? lane.machine.id, 80);
  let lines = [];
  if (found.attempt) {
    const { task, number, outcome, cause, score, started, ended, usd: cost } = found.attempt;
    lines = [
      `${plain(task, 80)} · attempt ${number}`,
      `${outcome}${cause ? `: ${words(cause)}` : ""}${score === null ? "" : ` · score ${score}`}`,
      `${duration(((ended ?? now) - started) / 1000)}${cost === null ? "" : ` · ${usd(cost)}`} · from ${clock(started)}`,
    ];
  } else if (found.phase) {
    const [phase, from, to] = found.phase;
    lines = [words(phase), `${duration(((to ?? now) - from) / 1000)} · from ${clock(from)}`];
  }
  return html`<div class="hint" style=${{ left: `${x}px`, top: `${y}px` }} aria-hidden="true"><b>${name}</b>${lines.map((line) => html`<span>${line}</span>`)}</div>`;
}

export function Timeline({ store, query }) {
  const canvas = useRef(null);
  const drawn = useRef(null);
  const [size, resized] = useState(0);
  const [hint, setHint] = useState(null);
  const [scroll, setScroll] = useState(0);
  const [drag, setDrag] = useState(null);
  const rows = useMemo(() => laid(store), [store, store.attempts.version, store.machines.version, store.attempts, store.machines]);
  const full = extent(store);
  const asked = [Number(query.get("from")), Number(query.get("to"))];
  const view = asked[0] && asked[1] > asked[0] ? asked : full;
  const printing = usePrinting();
  const shown = Math.min(printing ? PRINTED_ROWS : MOST_ROWS, Math.max(1, rows.length));
  const height = shown * ROW + AXIS + MONEY;
  const most = Math.max(0, (rows.length - shown) * ROW);
  const top = Math.min(scroll, most);

  useEffect(() => {
    const watch = new ResizeObserver(() => canvas.current && drawn.current !== null && drawn.current !== canvas.current.clientWidth && resized((n) => n + 1));
    watch.observe(canvas.current);
    const scheme = matchMedia("(prefers-color-scheme: dark)");
    const again = () => resized((n) => n + 1);
    scheme.addEventListener("change", again);
    return () => {
      watch.disconnect();
      scheme.removeEventListener("change", again);
    };
  }, []);
  const draw = useRef(null);
  draw.current = () => {
    if (!canvas.current) return;
    drawn.current = canvas.current.clientWidth;
    new Drawing(canvas.current, store, rows, view, top, height).draw();
  };
  const frame = useRef(0);
  useEffect(() => {
    cancelAnimationFrame(frame.current);
    frame.current = requestAnimationFrame(() => draw.current());
  }, [rows, view[0], view[1], top, height, size, store.run, store.run.live ? store.now() : null]);
  useEffect(() => {
    // Paper is white: it is drawn anew, in the colours of print, before the page is taken.
    const print = matchMedia("print");
    const changed = () => draw.current();
    print.addEventListener("change", changed);
    return () => print.removeEventListener("change", changed);
  }, []);

  const label = () => (canvas.current.clientWidth < 600 ? LABEL_NARROW : LABEL);
  const time = (x) => view[0] + ((x - label()) / Math.max(1, canvas.current.clientWidth - label())) * (view[1] - view[0]);
  const zoom = (from, to) => {
    if (to - from < 50) return;
    if (from <= full[0] && to >= full[1]) setQuery({ from: null, to: null });
    else setQuery({ from: Math.round(Math.max(full[0], from)), to: Math.round(Math.min(full[1], to)) });
  };
  const by = (factor, around = (view[0] + view[1]) / 2) => zoom(around - (around - view[0]) * factor, around + (view[1] - around) * factor);
  const pan = (share) => {
    const step = Math.max(full[0] - view[0], Math.min(full[1] - view[1], share * (view[1] - view[0])));
    zoom(view[0] + step, view[1] + step);
  };
  const inside = (event) => {
    const box = canvas.current.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  };
  const laneAt = (y) => (y < shown * ROW ? rows[Math.floor((y + top) / ROW)] : undefined);

  const moved = (event) => {
    const [x, y] = inside(event);
    if (drag) return setDrag({ ...drag, to: x });
    const lane = laneAt(y);
    const found = lane && x > label() ? under(store, lane, time(x)) : {};
    setHint(lane && (found.attempt || found.phase) ? { lane, found, x: Math.min(x + 12, canvas.current.clientWidth - 240), y: y + 16 } : null);
    return undefined;
  };
  const released = (event) => {
    const [x, y] = inside(event);
    const begun = drag;
    setDrag(null);
    if (begun && Math.abs(x - begun.from) > 6) return zoom(...[time(begun.from), time(x)].sort((a, b) => a - b));
    const lane = laneAt(y);
    if (!lane || event.button) return undefined;
    if (x < label()) return go(link(["runs", store.name, "machines", lane.machine.id]));
    const { attempt } = under(store, lane, time(x));
    if (attempt) go(attemptLink(store.name, attempt.task, attempt.number));
    return undefined;
  };
  useEffect(() => {
    const wheel = (event) => {
      if (event.ctrlKey || event.metaKey) {
        event.preventDefault();
        by(event.deltaY > 0 ? 1.25 : 0.8, time(inside(event)[0]));
      } else if (most && event.deltaY) {
        const next = Math.max(0, Math.min(most, top + event.deltaY));
        if (next !== top) {
          event.preventDefault();
          setScroll(next);
        }
      }
    };
    const node = canvas.current;
    node.addEventListener("wheel", wheel, { passive: false });
    return () => node.removeEventListener("wheel", wheel);
  });
  const key = (event) => {
    const does = { "+": () => by(0.6), "=": () => by(0.6), "-": () => by(1.6), 0: () => zoom(...full), ArrowLeft: () => pan(-0.25), ArrowRight: () => pan(0.25), ArrowDown: () => setScroll(Math.min(most, top + ROW)), ArrowUp: () => setScroll(Math.max(0, top - ROW)) }[event.key];
    if (!does || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    event.stopPropagation();
    does();
  };
  const exact = (ms) => (view[1] - view[0] < 600_000 ? second : clock)(ms, view[0]);
  const told = `Timeline of ${count(store.machines.count)} machines and ${count(store.attempts.count)} attempts, from ${clock(view[0])} to ${clock(view[1])}. The same is in the tables of machines and tasks.`;
  return html`<section class="panel timeline" aria-labelledby="timeline-head"><header><h2 id="timeline-head">Timeline</h2><span class="spring"></span>
    <span class="quiet only-wide">${exact(view[0])} to ${exact(view[1])} · ${percent((view[1] - view[0]) / (full[1] - full[0]), 0)} of it</span>
    <span class="buttons"><button type="button" onClick=${() => by(0.6)} aria-label="zoom in" title="zoom in (+)">+</button><button type="button" onClick=${() => by(1.6)} aria-label="zoom out" title="zoom out (-)" disabled=${view === full}>−</button><button type="button" onClick=${() => zoom(...full)} title="all of it (0)" disabled=${view === full}>all</button></span></header>
    <div class="canvas-box" style=${{ height: `${height}px` }}>
      <canvas ref=${canvas} tabindex="0" role="img" aria-label=${told} data-size=${size} onMouseMove=${moved} onMouseLeave=${() => { setHint(null); setDrag(null); }}
        onMouseDown=${(event) => { const [x] = inside(event); if (x > label() && !event.button) setDrag({ from: x, to: x }); }} onMouseUp=${released} onKeyDown=${key}></canvas>
      ${drag && Math.abs(drag.to - drag.from) > 4 && html`<div class="drag" style=${{ left: `${Math.min(drag.from, drag.to)}px`, width: `${Math.abs(drag.to - drag.from)}px` }}></div>`}
      ${hint && !drag && html`<${Hint} store=${store} ...${hint} />`}
    </div>
    ${most > 0 && html`<p class="quiet small">${printing ? `${count(shown)} of ${count(rows.length)} rows are printed.` : `${count(rows.length)} rows; the wheel or ↑ ↓ moves through them.`}</p>`}
  </section>`;
}
