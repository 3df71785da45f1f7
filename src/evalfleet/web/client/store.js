// One run as the page holds it: a snapshot, kept up to date by the server's events.
import { Signal } from "./base.js";
import { api, get } from "./data.js";
import { embedded } from "./route.js";

/** Rows by their key, in the order in which they came; a change replaces or adds rows. */
export class Table {
  constructor({ columns, rows, dictionaries }, others = {}) {
    this.columns = columns;
    this.at = Object.fromEntries(columns.map((name, n) => [name, n]));
    this.rows = rows;
    this.version = 0;
    for (const [column, values] of Object.entries(dictionaries ?? {})) this.spellOut(this.at[column], values, others);
    this.byKey = null;
  }

  /** Put the words where the snapshot has their numbers; the strings are shared, so this costs no memory. */
  spellOut(column, values, others) {
    const listed = typeof values === "string" ? others[values].rows : values;
    const words = typeof values === "string" ? listed.map((row) => row[0]) : listed;
    for (const row of this.rows) if (typeof row[column] === "number") row[column] = words[row[column]];
  }

  keys() {
    this.byKey ??= new Map(this.rows.map((row, n) => [row[0], n]));
    return this.byKey;
  }

  has(key) {
    return this.keys().has(key);
  }

  row(key) {
    const n = this.keys().get(key);
    return n === undefined ? null : this.rows[n];
  }

  /** The row as an object, for what is shown one at a time. */
  item(key) {
    const row = this.row(key);
    return row && Object.fromEntries(this.columns.map((name, n) => [name, row[n]]));
  }

  change(rows) {
    const keys = this.keys();
    for (const row of rows) {
      const n = keys.get(row[0]);
      if (n === undefined) {
        keys.set(row[0], this.rows.length);
        this.rows.push(row);
      } else {
        this.rows[n] = row;
      }
    }
    this.version += 1;
  }
}

/** Rows by a number in them: themselves, if they are in order already, as most are. */
export function inOrder(rows, column) {
  for (let n = 1; n < rows.length; n += 1) {
    if (rows[n - 1][column] > rows[n][column]) return [...rows].sort((a, b) => a[column] - b[column]);
  }
  return rows;
}

// A page that was told nothing for so long is late: the server speaks every ten seconds.
export const LATE_MS = 25_000;
// A tab that nobody sees hangs up: a browser opens six connections to a server, and each tab holds one.
const HIDDEN_MS = 10_000;

class RunStore extends Signal {
  constructor(name) {
    super(null);
    this.name = name;
    this.seq = 0;
    this.skew = 0;
    this.connection = "connecting";
    this.heard = Date.now();
    this.error = null;
    this.source = null;
    this.users = 0;
  }

  async load() {
    try {
      const snapshot = await get(api("runs", this.name));
      this.take(snapshot);
      this.error = null;
    } catch (error) {
      this.error = error;
      this.connection = "disconnected";
      this.changed();
      if (!embedded && this.users && (error.status === 0 || error.status >= 500)) this.again();
      return;
    }
    if (embedded) this.connection = "file";
    else this.listen();
    this.changed();
  }

  take(snapshot) {
    this.seq = snapshot.seq;
    this.run = snapshot.run;
    this.taken = snapshot.now;
    this.skew = snapshot.now - Date.now();
    const others = { tasks: snapshot.tasks, machines: snapshot.machines };
    this.machines = new Table(snapshot.machines);
    this.tasks = new Table(snapshot.tasks, others);
    this.attempts = new Table(this.named(snapshot.attempts, others), others);
    this.addTold();
    this.heard = Date.now();
    this.value = this;
  }

  /** An attempt's id is null where it is `<task>.<number>`, and a task's newest attempt is its number. */
  named(attempts, others) {
    const [task, number] = [attempts.columns.indexOf("task"), attempts.columns.indexOf("number")];
    for (const row of attempts.rows) {
      if (row[0] === null) row[0] = `${typeof row[task] === "number" ? others.tasks.rows[row[task]][0] : row[task]}.${row[number]}`;
    }
    return attempts;
  }

  /** A task's row tells all of its only attempt, if it says when that began: its row is made of it. */
  addTold() {
    const { rows } = this.tasks;
    const { started, attempt } = this.tasks.at;
    const cells = this.attempts.columns.map((name) => this.tasks.at[{ task: "id", number: "attempt" }[name] ?? name]);
    const all = this.attempts.rows;
    for (const row of rows) {
      const number = row[attempt];
      if (number === null) continue;
      const id = `${row[0]}.${number}`;
      if (row[started] !== null) {
        const made = [id];
        for (let n = 1; n < cells.length; n += 1) made.push(row[cells[n]]);
        all.push(made);
      }
      row[attempt] = id;
    }
    this.attempts.rows = inOrder(all, this.attempts.at.started);
  }

  nameNewest(rows) {
    const newest = this.tasks.at.attempt;
    for (const row of rows) if (typeof row[newest] === "number") row[newest] = `${row[0]}.${row[newest]}`;
    return rows;
  }

  listen() {
    this.source?.close();
    const source = new EventSource(`${api("runs", this.name)}/events?after=${this.seq}`);
    this.source = source;
    source.onopen = () => this.hear("live");
    source.onmessage = (message) => this.event(JSON.parse(message.data));
    source.addEventListener("ping", () => this.hear("live"));
    const over = (status, message) => {
      source.close();
      this.error = { status, message };
      this.connection = "disconnected";
      this.changed();
    };
    source.addEventListener("gone", () => over(404, "This run is no longer there: it was removed."));
    source.addEventListener("damaged", (message) => over(409, JSON.parse(message.data).error));
    source.onerror = () => {
      if (this.source !== source) return;
      this.connection = "disconnected";
      this.changed();
      // A server that was started again, or has forgotten us, is asked anew from where we are.
      if (source.readyState === EventSource.CLOSED) this.again();
    };
    this.seen(document.hidden);
  }

  again() {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.users && this.load(), 1000);
  }

  /** Nobody sees the tab, or somebody does again: it goes on from where it was. */
  seen(hidden) {
    clearTimeout(this.hiding);
    if (hidden) this.hiding = setTimeout(() => this.hangUp(), HIDDEN_MS);
    else if (this.value && !this.source && this.users) this.listen();
  }

  hangUp() {
    this.source?.close();
    this.source = null;
  }

  hear(connection) {
    this.heard = Date.now();
    if (this.connection !== connection) {
      this.connection = connection;
      this.changed();
    }
  }

  event(change) {
    this.connection = "live";
    this.heard = Date.now();
    if (change.seq < this.seq) return;
    this.seq = change.seq;
    if (change.now) this.skew = change.now - Date.now();
    if (change.run) this.run = change.run;
    if (change.machines) this.machines.change(change.machines);
    if (change.tasks) this.tasks.change(this.nameNewest(change.tasks));
    if (change.attempts) {
      this.named({ columns: this.attempts.columns, rows: change.attempts }, {});
      this.attempts.change(change.attempts);
    }
    this.changed();
  }

  /** The server's time; of a run that is over, when it ended: nothing of it goes on. */
  now() {
    return this.run?.ended ?? (embedded ? this.taken : Date.now() + this.skew);
  }

  use() {
    this.users += 1;
    if (this.users === 1) {
      clearTimeout(this.closing);
      if (!this.value || (!embedded && !this.source)) this.load();
    }
    return () => {
      this.users -= 1;
      // Pages of one run follow each other: what was loaded is kept for a while.
      if (!this.users) this.closing = setTimeout(() => this.users || this.close(), 5000);
    };
  }

  close() {
    clearTimeout(this.timer);
    clearTimeout(this.hiding);
    this.hangUp();
    if (stores.get(this.name) === this && !embedded) stores.delete(this.name);
  }
}

const stores = new Map();

export function runStore(name) {
  if (!stores.has(name)) stores.set(name, new RunStore(name));
  return stores.get(name);
}

if (!embedded) {
  document.addEventListener("visibilitychange", () => {
    for (const store of stores.values()) store.seen(document.hidden);
  });
}
