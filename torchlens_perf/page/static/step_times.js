// Step times over the run: quantiles of all ranks, the chosen rank's own, and what happened meanwhile.
{
  const { duration, element, source, fields } = torchlens;
  const HEIGHT = 210;
  const HEADROOM = 1.6; // times the highest 95th percentile: longer steps are marked at the top

  class StepTimes extends torchlens.Chart {
    static FOLLOWS = ["steps", "step", "rank"];

    constructor(page, figure) {
      super(page, figure);
      this.words = element("p", { className: "chart-words" });
      figure.append(this.words);
      figure.classList.add("own-words");
      this.renewed();
    }

    renewed() {
      this.found = this.figure.querySelector("figcaption strong")?.textContent ?? "";
    }

    build() {
      const { steps, colours } = this;
      const number = (values) => values.map((value) => value ?? NaN);
      const plot = this.plotOf({
        height: HEIGHT + 58,
        xLabel: "step",
        xText: String,
        yText: torchlens.tick(duration),
        xTicker: this.stepTicks(),
        yTicker: new Bokeh.BasicTicker({ desired_num_ticks: 5, num_minor_ticks: 0 }),
        tools: this.brushTools(),
        x_range: this.stepRange(),
        y_range: (this.rows = new Bokeh.Range1d({ start: 0, end: 1 })),
      });
      this.slow = source({ left: [], right: [], top: [], text: [] });
      plot.quad({
        ...fields("left", "right", "top"),
        bottom: 0,
        source: this.slow,
        fill_color: colours.slow,
        line_color: null,
      });
      plot.text({
        x: { field: "left" },
        y: { field: "top" },
        text: { field: "text" },
        source: this.slow,
        x_offset: 4,
        y_offset: 13,
        ...this.textLook("11px", colours.dim),
      });
      this.bands = source({ x: [], low: [], high: [], middle: [], longest: [] });
      plot.varea({
        x: { field: "x" },
        y1: { field: "low" },
        y2: { field: "high" },
        source: this.bands,
        fill_color: colours.band,
      });
      plot.line({
        x: { field: "x" },
        y: { field: "longest" },
        source: this.bands,
        line_color: colours.thin,
        line_width: 1,
      });
      plot.line({
        x: { field: "x" },
        y: { field: "middle" },
        source: this.bands,
        line_color: colours.median,
        line_width: 2,
      });
      this.own = source({ x: [], y: [] });
      plot.line({ ...fields("x", "y"), source: this.own, line_color: colours.bad, line_width: 1.5 });
      this.beyond = source({ x: [], y: [] });
      plot.scatter({
        ...fields("x", "y"),
        source: this.beyond,
        marker: "triangle",
        size: 8,
        fill_color: colours.bad,
        line_color: null,
      });
      this.flags = source({ x: [], text: [] });
      plot.text({
        x: { field: "x" },
        y: 0,
        y_offset: -3,
        text: { field: "text" },
        source: this.flags,
        text_align: "center",
        ...this.textLook("11px", colours.dim),
      });
      this.box = this.stepBox(plot);
      this.line = new Bokeh.Span({
        location: 0,
        dimension: "height",
        line_color: colours.text,
        line_width: 1.5,
        visible: false,
      });
      plot.add_layout(this.line);
      this.activate(plot);
      this.brush(plot);
      plot.on_event("tap", ({ x }) => {
        if (x >= steps.begin && x < steps.end) this.page.view.set({ step: Math.floor(x) });
      });
      plot.on_event("mousemove", ({ x }) => this.hover(x));
      plot.on_event("mouseleave", () => this.tip.hide());
      const changed = () => this.later();
      this.range.properties.start.change.connect(changed);
      this.range.properties.end.change.connect(changed);
      this.number = number;
      return plot;
    }

    later() {
      if (this.waits) return;
      this.waits = true;
      requestAnimationFrame(() => {
        this.waits = false;
        this.flags.data = this.letters();
      });
    }

    letters() {
      return torchlens.flagMarks(this.steps, [this.range.start, this.range.end], this.width - this.left);
    }

    fill(changed) {
      const { steps, number } = this;
      const { bands } = steps;
      if (["theme", "contents"].some((key) => changed.has(key))) {
        const known = (values) => values.filter((value) => value !== null);
        const top =
          1.05 * Math.min(Math.max(0, ...known(bands.max_s)), HEADROOM * Math.max(0, ...known(bands.p95_s))) || 1;
        const x = steps.first.map((first) => first + steps.width / 2);
        this.rows.end = this.top = top;
        this.bands.data = {
          x,
          low: number(bands.p5_s),
          high: number(bands.p95_s),
          middle: number(bands.p50_s),
          longest: number(bands.max_s).map((value) => Math.min(value, top)),
        };
        const over = bands.max_s
          .map((value, at) => [value, x[at]])
          .filter(([value]) => value > top)
          .sort(([one], [other]) => other - one)
          .slice(0, 40);
        this.beyond.data = { x: over.map(([, at]) => at), y: over.map(() => top * 0.98) };
        const until = (slow) => slow.until_step ?? steps.end;
        this.slow.data = {
          left: steps.slow.map((slow) => Math.max(slow.since_step, steps.begin)),
          right: steps.slow.map(until),
          top: steps.slow.map(() => top),
          text: steps.slow.map((slow, at) => (at < 4 ? `rank ${slow.rank} slow` : "")),
        };
        this.flags.data = this.letters();
      }
      this.mark();
      this.say();
    }

    mark() {
      const { steps, view } = this;
      const row = steps.rowOf.get(view.rank);
      this.showSteps(this.box, ...(view.steps ?? [null, null]));
      this.line.visible = view.step !== null && view.step >= steps.begin && view.step < steps.end;
      if (this.line.visible) this.line.location = steps.first[steps.column(view.step)] + steps.width / 2;
      const own =
        row === undefined ? [] : Array.from(steps.step.subarray(row * steps.columns, (row + 1) * steps.columns));
      this.own.data = {
        x: own.map((_, column) => steps.first[column] + steps.width / 2),
        y: own.map((value) => Math.min(value, this.top)),
      };
    }

    hover(x) {
      const { steps, view } = this;
      if (!(x >= steps.begin && x < steps.end)) {
        this.tip.hide();
        return;
      }
      const column = steps.column(x);
      const { bands } = steps;
      const first = steps.first[column];
      const row = steps.rowOf.get(view.rank);
      this.tip.show([
        torchlens.steps(first, first + steps.width),
        `median ${duration(bands.p50_s[column])}, 95% take at most ${duration(bands.p95_s[column])}`,
        `longest ${duration(bands.max_s[column])}`,
        ...(row === undefined ? [] : [`rank ${view.rank}: ${duration(steps.step[row * steps.columns + column])}`]),
        ...steps.slow
          .filter((slow) => slow.since_step <= x && x < (slow.until_step ?? steps.end))
          .slice(0, 3)
          .map((slow) => `rank ${slow.rank} is slow in ${slow.phase}`),
        ...(steps.flags[column].length ? [`did: ${steps.flags[column].join(", ")}`] : []),
      ]);
    }

    // What there is to be seen, and the selected steps in figures.
    say() {
      const { steps, view } = this;
      const letters = torchlens.flagLegend(steps);
      this.words.replaceChildren(
        element("strong", { text: `${this.found} ${view.steps ? this.selectedWords() : ""}` }),
        ` Line: median over all ranks of each ${steps.width > 1 ? `${steps.width} steps` : "step"}; band: from the 5th`,
        " to the 95th percentile; thin line: the longest; triangles: longer than there is room for. By the hosts'",
        ` clocks, with the warm-up.${letters ? ` Letters: ${letters}.` : ""}`,
        steps.rowOf.has(view.rank) ? ` Red line: rank ${view.rank}.` : "",
      );
    }

    selectedWords() {
      const { steps, view } = this;
      const found = steps.spread(steps.range(view.steps));
      const where = torchlens.steps(...this.page.whole(view.steps));
      if (!found) return `In the selected ${where}, no step was measured.`;
      const first = steps.first[found.column];
      const what = steps.width > 1 ? `means over ${steps.width} steps of single ranks` : "steps of single ranks";
      const longest = `rank ${found.rank}, ${torchlens.steps(first, first + steps.width)}`;
      return (
        `In the selected ${where}: of ${found.count} ${what}, half take at most ${duration(found.p50_s)}, ` +
        `95% at most ${duration(found.p95_s)}; the longest takes ${duration(found.max_s)}: ${longest}.`
      );
    }
  }

  torchlens.StepTimes = StepTimes;
}
