// One run as the page holds it: a snapshot, kept up to date by the server's events.
import { Signal } from "./base.js";
import { api, get } from "./data.js";
import { embedded } from "./route.js";

/** A table by its columns, `cells[column][n]`, in the order in which rows came; a change replaces or adds rows. */
export class Table {
  constructor({ columns, rows }) {
    this.columns = columns;
    this.count = rows.length;
    this.version = 0;
    this.places = null;
    this.cells = Object.fromEntries(columns.map((name, k) => [name, rows.map((row) => row[k])]));
  }

  key(n) {
    return this.cells.id[n];
  }

  /** The number of the row that has this key, else undefined. */
  place(key) {
    if (!this.places) {
      this.places = new Map();
      for (let n = 0; n < this.count; n += 1) this.places.set(this.key(n), n);
    }
    return this.places.get(key);
  }

  has(key) {
    return this.place(key) !== undefined;
  }

  /** One cell; undefined if there is no such row. */
  cell(key, name) {
    return this.cells[name][this.place(key)];
  }

  /** A row as an object, for what is shown one at a time. */
  at(n) {
    return Object.fromEntries(this.columns.map((name) => [name, this.cells[name][n]]));
  }

  item(key) {
    const n = this.place(key);
    return n === undefined ? null : this.at(n);
  }

  change(rows) {
    const columns = this.columns.map((name) => this.cells[name]);
    for (const row of rows) {
      const key = row[0];
      let n = this.place(key);
      if (n === undefined) {
        n = this.count;
        this.count += 1;
        this.places.set(key, n);
      }
      for (let k = 0; k < columns.length; k += 1) columns[k][n] = row[k];
    }
    this.version += 1;
  }
}

/** Where the smallest of the numbers are, the next, and so on. */
export function inOrder(numbers) {
  const order = numbers.map((_, n) => n);
  if (numbers.every((number, n) => !n || numbers[n - 1] <= number)) return order;
  return order.sort((a, b) => numbers[a] - numbers[b] || a - b);
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
    this.tell();
  }

  take(snapshot) {
    this.seq = snapshot.seq;
    this.run = snapshot.run;
    this.taken = snapshot.now;
    this.skew = snapshot.now - Date.now();
    this.machines = new Table(snapshot.machines);
    this.tasks = new Table(snapshot.tasks);
    this.attempts = new Table(snapshot.attempts);
    this.heard = Date.now();
    this.value = this;
  }

  /** What people call a machine. */
  machineName(id) {
    return this.machines.cell(id, "name") ?? id;
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
    if (change.tasks) this.tasks.change(change.tasks);
    if (change.attempts) this.attempts.change(change.attempts);
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
