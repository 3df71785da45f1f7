// Keys that pages offer. The newest page's come first; nobody's keys are taken while somebody types.
const layers = [];

/** Offer keys, and return what takes them back: made for `useEffect`. */
export function keys(map) {
  layers.push(map);
  return () => layers.splice(layers.indexOf(map), 1);
}

const typing = (node) => node.isContentEditable || /^(INPUT|TEXTAREA|SELECT)$/.test(node.tagName);

export function listenForKeys() {
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.isComposing) return;
    if (typing(event.target)) {
      if (event.key === "Escape") event.target.blur();
      return;
    }
    // Enter and space on a link or a button are theirs.
    if ((event.key === "Enter" || event.key === " ") && event.target.closest?.("a, button, summary, dialog")) return;
    for (let n = layers.length - 1; n >= 0; n -= 1) {
      const does = layers[n][event.key];
      if (does) {
        event.preventDefault();
        does(event);
        return;
      }
    }
  });
}
