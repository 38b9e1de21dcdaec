// What is looked at: section, selected steps, zoom, step, rank, quantity, grouping, order, rows, theme. All of it is
// in the address, so that a link leads to the very view; nothing is kept anywhere else.
{
  const DEFAULTS = {
    section: "",
    steps: null,
    zoom: null,
    step: null,
    rank: null,
    quantity: "excess",
    group: "none",
    order: "slowness",
    rows: "few",
    theme: "system",
  };
  const ONE_OF = { order: ["rank", "slowness"], rows: ["few", "all"], theme: ["system", "light", "dark"] };
  const QUIET_MS = 350; // browsers let a page write its address some hundred times in half a minute

  const whole = (text) => (/^\d{1,15}$/.test(text) ? Number(text) : null);

  // Steps are written with the last one, and held without: [since, until).
  function steps(text) {
    const [first, last] = text.split("-").map(whole);
    return Number.isInteger(first) && Number.isInteger(last) && first <= last ? [first, last + 1] : null;
  }

  function parsed(hash) {
    const view = { ...DEFAULTS };
    for (const [key, value] of new URLSearchParams(`section=${hash.slice(1).replaceAll(";", "&")}`)) {
      if (!Object.hasOwn(DEFAULTS, key)) continue;
      if (key === "steps" || key === "zoom") view[key] = steps(value);
      else if (key === "step" || key === "rank") view[key] = whole(value);
      else if (!Object.hasOwn(ONE_OF, key) || ONE_OF[key].includes(value)) view[key] = value;
    }
    return view;
  }

  function written(view) {
    const parts = [encodeURIComponent(view.section)];
    for (const key of Object.keys(DEFAULTS)) {
      const value = view[key];
      if (key === "section" || value === DEFAULTS[key]) continue;
      parts.push(`${key}=${Array.isArray(value) ? `${value[0]}-${value[1] - 1}` : encodeURIComponent(value)}`);
    }
    return `#${parts.join(";")}`;
  }

  class View {
    constructor() {
      this.listeners = [];
      this.now = parsed(location.hash);
      this.wroteAt = -Infinity;
      addEventListener("hashchange", () => {
        const next = parsed(location.hash);
        const isBare = !location.hash.includes(";");
        this.became(isBare ? { ...this.now, section: next.section } : next);
      });
    }

    // Calls back with the view and what has changed in it.
    watch(listener) {
      this.listeners.push(listener);
    }

    set(changes) {
      this.became({ ...this.now, ...changes });
      this.write();
    }

    // The address of this very view.
    address() {
      return new URL(written(this.now), location.href).href;
    }

    // A section that somebody went to: one can go back from there.
    go(section) {
      this.now = { ...this.now, section };
      history.pushState(null, "", written(this.now));
      this.show();
    }

    show() {
      const target = this.now.section && document.getElementById(this.now.section);
      if (target) target.scrollIntoView();
    }

    write() {
      clearTimeout(this.waiting);
      const put = () => {
        this.wroteAt = performance.now();
        history.replaceState(history.state, "", written(this.now));
      };
      const left = this.wroteAt + QUIET_MS - performance.now();
      if (left <= 0) put();
      else this.waiting = setTimeout(put, left);
    }

    became(next) {
      const changed = new Set(Object.keys(DEFAULTS).filter((key) => String(next[key]) !== String(this.now[key])));
      this.now = next;
      if (changed.size) for (const listener of this.listeners) listener(next, changed);
      if (changed.has("section")) this.show();
    }
  }

  torchlens.View = View;
}
