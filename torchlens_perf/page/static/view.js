// What is looked at: section, selected steps, step, rank, quantity, grouping, order, theme. It is in the address, so that
// a link leads to the very view; nothing is kept anywhere else.
"use strict";

{
  const DEFAULTS = { section: "", steps: null, step: null, rank: null, quantity: "excess", group: "none", order: "rank", theme: "system" };

  function parsed(hash) {
    const view = { ...DEFAULTS };
    for (const [at, part] of hash.replace(/^#/, "").split(";").entries()) {
      const [key, value] = part.split("=").map(decodeURIComponent);
      if (at === 0 && value === undefined) view.section = key;
      else if (key === "steps") {
        const ends = value.split("-").map(Number);
        if (ends.length === 2 && ends.every(Number.isInteger) && ends[0] < ends[1]) view.steps = ends;
      } else if (key === "step" || key === "rank") {
        if (/^\d+$/.test(value)) view[key] = Number(value);
      } else if (key in DEFAULTS) view[key] = value;
    }
    return view;
  }

  function written(view) {
    const parts = [view.section];
    for (const [key, value] of Object.entries(view)) {
      if (key === "section" || value === DEFAULTS[key]) continue;
      parts.push(`${key}=${encodeURIComponent(key === "steps" ? value.join("-") : value)}`);
    }
    return `#${parts.join(";")}`;
  }

  class View {
    constructor() {
      this.listeners = [];
      this.now = parsed(location.hash);
      addEventListener("hashchange", () => this.became(parsed(location.hash)));
    }

    // Calls back with the view and what changed in it; at once, too.
    watch(listener) {
      this.listeners.push(listener);
      listener(this.now, new Set(Object.keys(DEFAULTS)));
    }

    set(changes) {
      const next = { ...this.now, ...changes };
      history.replaceState(null, "", written(next));
      this.became(next);
    }

    became(next) {
      const changed = new Set(Object.keys(DEFAULTS).filter((key) => String(next[key]) !== String(this.now[key])));
      this.now = next;
      if (changed.size) for (const listener of this.listeners) listener(next, changed);
      if (changed.has("section")) document.getElementById(next.section)?.scrollIntoView();
    }
  }

  torchlens.View = View;
}
