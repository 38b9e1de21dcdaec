// State of the view: section, selected steps, zoom, step, rank, quantity, grouping, order, rows, theme. The address
// contains all of it, so a link restores the view. It is stored nowhere else.
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
  // Browsers limit how often a page may change its address: about 100 times in 30 s.
  const QUIET_MS = 350;

  const whole = (text) => (/^\d{1,15}$/.test(text) ? Number(text) : null);

  // The address includes the last step, while code uses half-open ranges [since, until).
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

    // Registers a listener, which receives the view and its changed keys.
    watch(listener) {
      this.listeners.push(listener);
    }

    set(changes) {
      this.became({ ...this.now, ...changes });
      this.write();
    }

    // Returns the address of the current view.
    address() {
      return new URL(written(this.now), location.href).href;
    }

    // Goes to a section, with a history entry so that the browser's back button returns.
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
