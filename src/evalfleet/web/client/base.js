// What every module of the client is made with: Preact, its hooks, and htm bound to it.
import { Component, h, render } from "./vendor/preact.js";
import { useState, useEffect, useMemo, useRef } from "./vendor/hooks.js";
import htm from "./vendor/htm.js";

export const html = htm.bind(h);

/** State that outlives a page, whose watchers are told when it changes; at most once a frame. */
export class Signal {
  constructor(value) {
    this.value = value;
    this.watchers = new Set();
    this.told = true;
  }

  set(value) {
    this.value = value;
    this.changed();
  }

  changed() {
    if (!this.told) return;
    this.told = false;
    // A tab in the background gets no frames, and must not gather what it would draw.
    document.hidden ? setTimeout(() => this.tell(), 500) : requestAnimationFrame(() => this.tell());
  }

  /** At once: for what a page waits for. */
  tell() {
    this.told = true;
    for (const watcher of [...this.watchers]) watcher();
  }

  watch(watcher) {
    this.watchers.add(watcher);
    return () => this.watchers.delete(watcher);
  }
}

/** Render again whenever the signal changes, but not more often than every `least` milliseconds. */
export function useSignal(signal, least = 0) {
  const [, again] = useState(0);
  useEffect(() => {
    let last = -Infinity;
    let timer = null;
    const stop = signal.watch(() => {
      if (timer) return;
      const wait = Math.max(0, last + least - performance.now());
      timer = setTimeout(() => {
        timer = null;
        last = performance.now();
        again((n) => n + 1);
      }, wait);
    });
    return () => {
      stop();
      clearTimeout(timer);
    };
  }, [signal, least]);
  return signal.value;
}

/** The time, in steps of `every` milliseconds; `null` stands for a document whose time is past. */
export function useNow(every = 1000, stopped = null) {
  const [now, set] = useState(() => stopped ?? Date.now());
  useEffect(() => {
    if (stopped !== null) return undefined;
    const timer = setInterval(() => set(Date.now()), every);
    return () => clearInterval(timer);
  }, [every, stopped]);
  return stopped ?? now;
}

/** True while the page is printed: all of it must be there then. */
export function usePrinting() {
  const [printing, set] = useState(false);
  useEffect(() => {
    const [on, off] = [() => set(true), () => set(false)];
    addEventListener("beforeprint", on);
    addEventListener("afterprint", off);
    return () => {
      removeEventListener("beforeprint", on);
      removeEventListener("afterprint", off);
    };
  }, []);
  return printing;
}

export { Component, render, useState, useEffect, useMemo, useRef };
