// Puts the charts in the places of the page's pictures, and keeps them showing the same view.
"use strict";

{
  const CHARTS = {
    heat: [() => torchlens.Heat, ["quantity", "group", "order", "theme"], ["step", "rank", "steps"]],
    steps: [() => torchlens.StepTimes, ["theme"], ["step"]],
    phases: [() => torchlens.Phases, ["steps", "theme"], []],
    step: [() => torchlens.Timeline, ["step", "theme"], []],
    modules: [() => torchlens.Modules, ["theme"], []],
    memory: [() => torchlens.Memory, ["theme"], []],
    telemetry: [() => torchlens.Telemetry, ["theme"], []],
  };
  const NEEDS_STEPS = new Set(["heat", "steps", "phases", "memory"]);
  const THEMES = ["system", "light", "dark"];

  // -- tables that can be sorted: by numbers with units where cells hold those

  const UNITS = { ns: 1e-9, us: 1e-6, "\u00b5s": 1e-6, ms: 1e-3, s: 1, min: 60, h: 3600, B: 1, kB: 1e3, MB: 1e6, GB: 1e9, TB: 1e12, KiB: 1024, MiB: 2 ** 20, GiB: 2 ** 30, "%": 0.01 };
  function sortKey(cell) {
    const text = cell.dataset.value ?? cell.textContent.trim();
    const found = /^([+-]?[\d.,]+(?:e[+-]?\d+)?)\s*(\S*)$/.exec(text.replaceAll(",", ""));
    if (!found || Number.isNaN(Number(found[1]))) return text;
    return Number(found[1]) * (UNITS[found[2]] ?? 1);
  }

  torchlens.sortable = (table) => {
    const rows = table.tBodies[0]?.rows ?? [];
    if (rows.length < 2 || !table.tHead) return;
    for (const [column, head] of [...table.tHead.rows[0].cells].entries()) {
      if (head.querySelector("button")) continue;
      const button = document.createElement("button");
      button.type = "button";
      button.className = "sorts";
      button.append(...head.childNodes);
      head.append(button);
      button.addEventListener("click", () => {
        const descending = head.getAttribute("aria-sort") !== "descending";
        for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
        head.setAttribute("aria-sort", descending ? "descending" : "ascending");
        const sorted = [...table.tBodies[0].rows].map((row) => [row, sortKey(row.cells[column] ?? row.cells[0])]);
        const order = (one, other) => (typeof one === "number" && typeof other === "number" ? one - other
          : typeof one === typeof other ? String(one).localeCompare(String(other), "en", { numeric: true }) : typeof one === "number" ? 1 : -1);
        sorted.sort(([, one], [, other]) => (descending ? order(other, one) : order(one, other)));
        table.tBodies[0].append(...sorted.map(([row]) => row));
      });
    }
  };

  class Page {
    constructor(contents, steps) {
      this.contents = contents;
      this.steps = steps;
      this.isLive = document.documentElement.dataset.live !== undefined;
      this.view = new torchlens.View();
      this.charts = [];
      this.asked = new Set();
      this.idle = true;
    }

    // Charts over steps are zoomed together. A range belongs to one chart: each has its own, and they follow each other.
    range() {
      const [low, high] = this.bounds();
      this.zoom ??= [low, high];
      const range = new Bokeh.Range1d({ start: this.zoom[0], end: this.zoom[1], bounds: [low, high], reset_start: low, reset_end: high });
      const changed = () => this.zoomed(range);
      range.properties.start.change.connect(changed);
      range.properties.end.change.connect(changed);
      return range;
    }

    bounds() {
      const low = this.steps.first[0] ?? 0;
      return [low, Math.max(this.steps.end, low + 1)];
    }

    zoomed(range) {
      if (range.start === this.zoom[0] && range.end === this.zoom[1]) return;
      this.zoom = [range.start, range.end];
      for (const { chart } of this.charts) {
        if (chart.range && chart.range !== range) chart.range.setv({ start: range.start, end: range.end });
      }
    }

    width(place) { return Math.max(280, Math.floor(place.clientWidth) - 4); }

    // A brush over steps; what is less than a column is none.
    select(low, high) {
      const { first, end, width } = this.steps;
      const since = Math.max(first[0], Math.floor(Math.min(low, high))), until = Math.min(end, Math.ceil(Math.max(low, high)));
      this.view.set({ steps: until - since >= width ? [since, until] : null });
    }

    begin() {
      for (const figure of document.querySelectorAll("figure[data-chart]")) {
        const key = figure.dataset.chart, [type, redraws, marks] = CHARTS[key] ?? [];
        if (!type || (NEEDS_STEPS.has(key) && !this.steps)) continue;
        if (key === "step" && !this.contents.traces.steps.length && !this.isLive) continue;
        const place = document.createElement("div");
        place.className = "chart";
        figure.prepend(place);
        if (key === "heat") this.controls(figure, place);
        const chart = new (type())(this, place);
        this.charts.push({ key, chart, figure, redraws, marks });
      }
      for (const table of document.querySelectorAll("main table")) torchlens.sortable(table);
      this.themes();
      this.status = document.createElement("p");
      this.status.className = "said";
      this.status.setAttribute("role", "status");
      document.querySelector("main")?.prepend(this.status);
      this.view.watch((view, changed) => this.follow(view, changed));
      let resized;
      addEventListener("resize", () => { clearTimeout(resized); resized = setTimeout(() => this.draw(new Set(["theme"])), 200); });
      matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw(new Set(["theme"])));
    }

    follow(view, changed) {
      if (changed.has("theme")) {
        if (view.theme === "system") delete document.documentElement.dataset.theme;
        else document.documentElement.dataset.theme = view.theme;
      }
      this.draw(changed);
      this.say(view);
    }

    // One drawing at a time: what is asked for meanwhile is drawn after it.
    async draw(changed) {
      for (const key of changed) this.asked.add(key);
      if (!this.idle) return;
      this.idle = false;
      while (this.asked.size) {
        const keys = this.asked;
        this.asked = new Set();
        for (const each of this.charts) {
          if (each.redraws.some((key) => keys.has(key))) await this.redraw(each);
          else if (each.marks.some((key) => keys.has(key))) each.chart.mark();
        }
      }
      this.idle = true;
    }

    async redraw(each) {
      try {
        await each.chart.draw();
        each.figure.classList.toggle("drawn", each.chart.place.childElementCount > 0);
      } catch (error) { // its picture stays
        each.chart.place.replaceChildren();
        each.figure.classList.remove("drawn");
        console.error(error);
      }
      each.done = true;
    }

    say(view) {
      const said = [];
      if (view.steps) said.push(`Steps ${view.steps[0]} to ${view.steps[1] - 1} are selected.`);
      if (view.rank !== null) said.push(`Rank ${view.rank}${view.step !== null ? "," : "."}`);
      if (view.step !== null) said.push(`step ${view.step}${view.rank !== null && this.steps ? `: ${this.figures(view)}` : ""}.`);
      this.status.textContent = said.join(" ");
    }

    figures({ rank, step, quantity }) {
      const row = this.steps.places.findIndex((place) => place.rank === rank);
      if (row < 0) return "there is no such rank";
      const index = row * this.steps.columns + this.steps.column(step);
      return `${quantity} ${torchlens.amount(quantity, this.steps.values(quantity)[index])}, step ${torchlens.duration(this.steps.step[index])}`;
    }

    // What the heat map shows, in which order; and the keyboard.
    controls(figure, place) {
      const bar = document.createElement("div");
      bar.className = "controls";
      const meshes = [...new Set(this.steps.places.flatMap((each) => Object.keys(each.mesh)))];
      const choices = [
        ["quantity", "Show ", [...this.steps.quantities.keys()].map((key) => [key, key === "excess" ? "more work than the others" : key === "step" ? "step time" : key])],
        ["group", "grouped by ", [["none", "nothing"], ["node", "node"], ...meshes.map((each) => [each, torchlens.short(each, 24)])]],
        ["order", "ordered by ", [["rank", "rank"], ["slowness", "slowness"]]],
      ];
      for (const [key, text, options] of choices) {
        const label = document.createElement("label"), select = document.createElement("select");
        label.textContent = text;
        select.name = key;
        for (const [value, name] of options) {
          const option = document.createElement("option");
          option.value = value;
          option.textContent = name;
          select.append(option);
        }
        select.addEventListener("change", () => this.view.set({ [key]: select.value }));
        this.view.watch((view) => { select.value = view[key]; });
        label.append(select);
        bar.append(label, " ");
      }
      const all = document.createElement("button");
      all.type = "button";
      all.textContent = "all steps";
      all.addEventListener("click", () => this.view.set({ steps: null }));
      bar.append(all);
      figure.prepend(bar);
      place.tabIndex = 0;
      place.setAttribute("role", "application");
      place.setAttribute("aria-label", "ranks by step. Left and right choose a step, up and down a rank, Enter opens the step");
      place.addEventListener("keydown", (event) => this.key(event));
    }

    key(event) {
      const { steps, view } = this, heat = this.charts.find((each) => each.key === "heat").chart;
      if (!heat.order) return;
      const by = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
      if (event.key === "Enter" && view.now.step !== null) document.getElementById("step")?.scrollIntoView();
      else if (event.key === "Escape") view.set({ steps: null, step: null, rank: null });
      else if (by) {
        const at = heat.order.findIndex(({ row }) => steps.places[row].rank === view.now.rank);
        const next = Math.min(heat.order.length - 1, Math.max(0, at < 0 ? 0 : at + by[1]));
        const column = view.now.step === null ? 0 : Math.min(steps.columns - 1, Math.max(0, steps.column(view.now.step) + by[0]));
        view.set({ rank: steps.places[heat.order[next].row].rank, step: steps.first[column] });
      } else return;
      event.preventDefault();
    }

    themes() {
      const button = document.createElement("button");
      button.type = "button";
      button.className = "theme";
      this.view.watch((view) => { button.textContent = `theme: ${view.theme}`; });
      button.addEventListener("click", () => this.view.set({ theme: THEMES[(THEMES.indexOf(this.view.now.theme) + 1) % THEMES.length] }));
      document.querySelector("header")?.append(button);
    }

    // Newer contents of the same run: what is selected stays.
    async update(contents) {
      const steps = await torchlens.read(contents);
      this.contents = contents;
      if (steps) {
        const follows = !this.steps || this.zoom[1] >= this.bounds()[1];
        this.steps = steps;
        if (this.zoom && follows) this.zoom = [this.zoom[0], this.bounds()[1]];
      }
      await this.draw(new Set(["quantity", "steps", "step", "theme"]));
    }
  }

  async function start() {
    const inert = document.getElementById("contents");
    if (!inert || typeof Bokeh === "undefined") return;
    Bokeh.set_log_level("error");
    const contents = JSON.parse(inert.textContent);
    const page = new Page(contents, await torchlens.read(contents));
    page.begin();
    window.torchlensPage = page;
  }

  start();
}
