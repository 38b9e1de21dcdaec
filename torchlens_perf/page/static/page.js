// Entry point: draws the charts into the page's figures, and keeps their views synchronized.
{
  const FEWEST_COLUMNS = 4;
  const CHARTS = {
    heat: torchlens.Heat,
    compute: torchlens.Compute,
    steps: torchlens.StepTimes,
    step: torchlens.Timeline,
    memory: torchlens.Memory,
    telemetry: torchlens.Telemetry,
  };
  const WITHOUT_STEPS = new Set(["step", "telemetry"]);

  class Page {
    constructor(contents, steps) {
      this.contents = contents;
      this.steps = steps;
      this.isLive = document.documentElement.dataset.live !== undefined;
      this.view = new torchlens.View();
      this.charts = [];
      this.work = null;
      // Incremented with each renewal of the contents.
      this.version = 0;
      this.window = this.zoomed();
      document.querySelector("header h1")?.after(torchlens.share(this.view));
      this.bar = new torchlens.SelectionBar(this);
      this.view.watch((view, changed) => this.follow(changed));
      this.settle();
      this.draw();
      const redrawn = () => this.follow(new Set(["theme"]));
      matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawn);
      const printed = (theme) => {
        torchlens.applyTheme(theme);
        for (const chart of this.charts) chart.isNear = true;
        redrawn();
      };
      // Paper is white, so printing uses the light theme. Paper also has the charts that have not been visible.
      addEventListener("beforeprint", () => printed("light"));
      addEventListener("afterprint", () => printed(this.view.now.theme));
      let width = innerWidth;
      let waiting;
      addEventListener("resize", () => {
        // On phones, showing or hiding the address bar changes only the height.
        if (innerWidth === width) return;
        width = innerWidth;
        clearTimeout(waiting);
        waiting = setTimeout(redrawn, 150);
      });
      for (const name of ["pointerdown", "focusin"]) {
        document.querySelector("main").addEventListener(name, ({ target }) => {
          this.held = target.closest("figure") ?? target.closest("section");
        });
      }
      document.addEventListener("click", (event) => {
        const link = event.target.closest?.('a[href^="#"]');
        if (!link || event.ctrlKey || event.metaKey || event.shiftKey) return;
        event.preventDefault();
        this.go(decodeURIComponent(link.getAttribute("href").slice(1)));
      });
    }

    // Finds figures and tables, at first and after each renewal of the page's parts.
    settle() {
      for (const figure of document.querySelectorAll("figure[data-chart]")) {
        if (!this.steps && !WITHOUT_STEPS.has(figure.dataset.chart)) continue;
        if (this.charts.some((chart) => chart.figure === figure)) continue;
        this.charts.push(new CHARTS[figure.dataset.chart](this, figure));
      }
      for (const figure of document.querySelectorAll("figure.of-bars")) torchlens.bars(this, figure);
      torchlens.chooseBar(this.view.now.rank);
      for (const table of document.querySelectorAll("main table")) torchlens.sortable(table);
      for (const time of document.querySelectorAll("header time")) {
        time.textContent = `${time.title} (${new Date(time.dateTime).toLocaleTimeString("sv-SE", { timeStyle: "short" })} local)`;
      }
      const ranks = document.getElementById("ranks");
      if (ranks && !this.rankTable) {
        this.rankTable = new torchlens.RankTable(this, ranks);
        this.rankTable.follow(new Set(["steps"]));
      }
      for (const code of document.querySelectorAll(".command > code:only-child")) {
        code.after(" ", torchlens.copyButton("Copy", () => code.textContent));
      }
      this.verdictButtons();
      this.bar.show();
    }

    // Adds a button to each verdict that selects its steps and rank.
    verdictButtons() {
      if (!this.steps) return;
      for (const [at, { rank, since_step }] of this.contents.report.verdicts.entries()) {
        const card = document.getElementById(`verdict-${at + 1}`);
        if (!card || rank === null || since_step === null || card.querySelector("button.shows")) continue;
        const slow = this.steps.slow.find((each) => each.rank === rank && each.since_step === since_step);
        const show = () => {
          const since = Math.max(this.steps.begin, Math.min(since_step, this.steps.end - 1));
          this.view.set({ rank, steps: [since, Math.max(since + 1, slow?.until_step ?? this.steps.end)] });
          this.go(document.getElementById("heat") ? "heat" : "steps");
        };
        const place = card.querySelector(".command") ?? torchlens.element("p", { className: "command" });
        if (!place.isConnected) card.querySelector(".finding").after(place);
        place.append(" ", torchlens.button("Show in charts", show, { className: "shows" }));
      }
    }

    // -- one view for all

    follow(changed) {
      const top = this.heldTop();
      if (this.steps && changed.has("zoom") && String(this.view.now.zoom) !== String(this.zoomText())) {
        this.window = this.zoomed();
      }
      if (changed.has("rank")) torchlens.chooseBar(this.view.now.rank);
      for (const chart of this.charts) chart.ask(changed);
      this.bar.show();
      this.rankTable?.follow(changed);
      this.hold(top);
      this.draw();
    }

    // Returns the top of the element in use, so that hold() can keep it in place when content above it grows.
    heldTop() {
      const { held } = this;
      const box = held?.isConnected ? held.getBoundingClientRect() : null;
      return box && box.top < innerHeight && box.bottom > 0 ? box.top : null;
    }

    hold(top) {
      const now = top === null ? null : this.heldTop();
      if (now !== null && Math.abs(now - top) >= 1) scrollBy({ top: now - top, behavior: "instant" });
    }

    go(section) {
      this.view.go(section);
      this.held = document.getElementById(section);
    }

    // True if all charts near the viewport are drawn. Others are drawn when they come near.
    get isDrawn() {
      return this.work === null && !this.charts.some(({ isDue }) => isDue);
    }

    draw() {
      this.work ??= this.drawAll().finally(() => {
        this.work = null;
      });
      return this.work;
    }

    // Returns the undrawn chart that is nearest to the middle of the viewport.
    next() {
      const far = ({ figure }) => {
        const { top, bottom } = figure.getBoundingClientRect();
        return Math.max(0, top - innerHeight / 2, innerHeight / 2 - bottom);
      };
      const due = this.charts.filter(({ isDue }) => isDue).map((chart) => [far(chart), chart]);
      return due.length ? due.reduce((one, other) => (other[0] < one[0] ? other : one))[1] : null;
    }

    async drawAll() {
      await Promise.resolve();
      for (let chart; (chart = this.next());) {
        const top = this.heldTop();
        try {
          await chart.draw();
        } catch (error) {
          chart.clear();
          console.error(error);
        }
        this.hold(top);
      }
    }

    // Replaces the page's data by a newer page of the same run, and keeps the selection. newer: the page as HTML, or
    // only its contents; then words, tables and static pictures stay as they are.
    async update(newer) {
      const page = typeof newer === "string" ? new DOMParser().parseFromString(newer, "text/html") : null;
      const contents = page ? JSON.parse(page.getElementById("contents").textContent) : newer;
      const steps = await torchlens.read(contents);
      await this.work;
      const top = this.heldTop();
      this.contents = contents;
      this.steps = steps;
      this.version++;
      if (page) torchlens.renew(this, page);
      // If all steps were visible before, they still are.
      this.window = this.zoomed();
      this.settle();
      for (const chart of this.charts) chart.ask(["contents"]);
      this.rankTable?.follow(new Set(["contents"]));
      this.hold(top);
      await this.draw();
    }

    // -- steps

    // Extends a selection to whole columns.
    whole(selection) {
      const [from, until] = this.steps.range(selection);
      return [this.steps.first[from], this.steps.first[until - 1] + this.steps.width];
    }

    // Selects the steps under a brush. A brush narrower than a column clears the selection.
    select(low, high) {
      const { begin, end, width } = this.steps;
      const since = Math.max(begin, Math.floor(low));
      const until = Math.min(end, Math.ceil(high));
      this.view.set({ steps: until - since >= Math.min(2, width) && until > since ? [since, until] : null });
    }

    zoomed() {
      const { begin = 0, end = 1 } = this.steps ?? {};
      const zoom = this.view.now.zoom;
      return zoom && zoom[0] < end && zoom[1] > begin
        ? [Math.max(begin, zoom[0]), Math.min(end, zoom[1])]
        : [begin, end];
    }

    // Wheel events are frequent, so charts are redrawn once a frame.
    zoom(start, end) {
      const { begin, end: last, width } = this.steps;
      const window = torchlens.inside([start, end], [begin, last], FEWEST_COLUMNS * width);
      if (String(window) === String(this.window)) return;
      this.window = window;
      this.zooms ??= requestAnimationFrame(() => {
        this.zooms = undefined;
        const next = this.zoomText();
        if (String(next) !== String(this.view.now.zoom)) this.view.set({ zoom: next });
        else this.follow(new Set(["zoom"]));
      });
    }

    // Returns the visible steps in the format of the address.
    zoomText() {
      const [start, end] = this.window;
      return start <= this.steps.begin && end >= this.steps.end
        ? null
        : [Math.max(0, Math.floor(start)), Math.ceil(end)];
    }

    // at: the step that keeps its position; by default the chosen step, or the middle.
    zoomBy(factor, at) {
      const [start, end] = this.window;
      const { step } = this.view.now;
      const middle = at ?? (step !== null && step >= start && step < end ? step + 0.5 : (start + end) / 2);
      this.zoom(...torchlens.zoomed(this.window, factor, middle));
    }

    showAll() {
      this.zoom(this.steps.begin, this.steps.end);
    }

    bringIntoZoom(since, until) {
      const [start, end] = this.window;
      if (since < start) this.zoom(since, since + end - start);
      else if (until > end) this.zoom(until - (end - start), until);
    }

    openStep() {
      this.go("step");
      document.querySelector("figure[data-chart=step] .chart")?.focus({ preventScroll: true });
    }

    // Returns a rank's values in a column, in words.
    figures(row, column, quantity) {
      const { steps } = this;
      const at = row * steps.columns + column;
      return [...new Set([quantity, "excess", "step", "work"])].map(
        (key) => `${torchlens.quantityWords(key)}: ${torchlens.quantityText(key, steps.values(key)[at])}`,
      );
    }
  }

  async function begin() {
    const inert = document.getElementById("contents");
    if (!inert) return;
    const contents = JSON.parse(inert.textContent);
    const page = new Page(contents, await torchlens.read(contents));
    page.view.show();
    page.held = document.getElementById(page.view.now.section);
    window.torchlensPage = page;
    dispatchEvent(new Event("torchlensready"));
  }

  // If charts fail, the page still has its tables.
  begin().catch((error) => console.error(error));
}
