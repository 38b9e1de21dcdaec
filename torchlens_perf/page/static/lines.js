// Quantities over the run as lines, one for each rank, GPU or port: memory by step, telemetry by time.
{
  const { short, source, fields } = torchlens;
  const HEIGHT = 104;
  const MOST_LINES = 16;
  const MOST_IN_TIP = 6; // as page/pictures/lines.py

  // A subclass has lines(): {label, rank, x, y, isNamed} each; and axis(): what its x is.
  class Lines extends torchlens.Chart {
    static FOLLOWS = ["steps", "rank"];

    shape() {
      this.data = this.lines();
      return `${this.page.version} ${this.data.map(({ label }) => label)}`;
    }

    build() {
      const { colours } = this;
      if (!this.data.length) return null;
      const { range, label, text, ticker } = this.axis();
      const known = this.data.flatMap(({ y }) => y.filter((value) => value === value));
      const high = known.reduce((one, other) => Math.max(one, other), 0);
      const low = known.reduce((one, other) => Math.min(one, other), 0);
      const plot = this.plotOf({
        height: HEIGHT + 56,
        xLabel: label,
        xText: text,
        yText: torchlens.tick((value) => this.text(value)),
        xTicker: ticker,
        yTicker: new Bokeh.BasicTicker({ desired_num_ticks: 3, num_minor_ticks: 0 }),
        tools: this.tools(),
        x_range: range,
        y_range: new Bokeh.Range1d({ start: low, end: low + ((high - low) * 1.05 || 1) }),
      });
      const order = [...this.data].sort((one, other) => one.isNamed - other.isNamed); // what stands out, above
      for (const { x, y, isNamed } of order) {
        plot.line({
          x,
          y,
          line_color: isNamed ? colours.bad : colours.dim,
          line_width: isNamed ? 2 : 1,
          line_alpha: isNamed ? 1 : 0.75,
        });
      }
      this.own = source({ x: [], y: [] });
      plot.line({ ...fields("x", "y"), source: this.own, line_color: colours.link, line_width: 2.5 });
      this.box = this.stepBox(plot);
      this.activate(plot);
      plot.on_event("mousemove", ({ x, y }) => this.hover(x, y));
      plot.on_event("mouseleave", () => this.tip.hide());
      this.listen(plot);
      return plot;
    }

    fill() {
      const own = this.data.find(({ rank }) => rank !== null && rank === this.view.rank);
      this.own.data = own ? { x: own.x, y: own.y } : { x: [], y: [] };
      this.showSteps(this.box, ...this.selected());
    }

    // The nearest to the pointer.
    hover(x, y) {
      const found = this.data
        .map(({ label, x: xs, y: ys }) => {
          let low = 0;
          let high = xs.length - 1;
          while (low < high) {
            const middle = (low + high + 1) >> 1;
            if (xs[middle] <= x) low = middle;
            else high = middle - 1;
          }
          return { label, at: xs[low], value: ys[low], far: Math.abs(ys[low] - y) };
        })
        .filter(({ at, value }) => at !== undefined && value === value);
      if (!found.length || x < 0) {
        this.tip.hide();
        return;
      }
      found.sort((one, other) => one.far - other.far);
      const left = found.length - MOST_IN_TIP;
      this.tip.show([
        this.where(x),
        ...found.slice(0, MOST_IN_TIP).map(({ label, value }) => `${short(label, 40)}: ${this.text(value)}`),
        ...(left > 0 ? [`and ${left} others`] : []),
      ]);
    }

    tools() {
      return [];
    }
    listen() {}
  }

  class Memory extends Lines {
    lines() {
      const { steps } = this;
      const { report } = this.page.contents;
      const named = torchlens.namedRanks(report);
      if (!steps.memory_bytes) return [];
      const prominent = torchlens
        .byProminence(report)
        .map(({ rank }) => rank)
        .filter((rank) => steps.rowOf.has(rank))
        .slice(0, MOST_LINES);
      if (steps.rowOf.has(this.view.rank) && !prominent.includes(this.view.rank)) prominent.push(this.view.rank);
      return prominent
        .map((rank) => {
          const values = steps.memory_bytes[steps.rowOf.get(rank)];
          const together = Math.ceil(steps.columns / values.length);
          return {
            label: `rank ${rank}`,
            rank,
            x: values.map((_, at) => steps.first[at * together]),
            y: values.map((value) => value ?? NaN),
            isNamed: named.has(rank),
          };
        })
        .filter(({ y }) => y.some((value) => value === value));
    }

    axis() {
      return { range: this.stepRange(), label: "step", text: String, ticker: this.stepTicks() };
    }
    text(value) {
      return torchlens.amount(value, "B");
    }
    where(x) {
      return `step ${Math.floor(x)}`;
    }
    selected() {
      return this.view.steps ?? [null, null];
    }
    tools() {
      return this.brushTools();
    }
    listen(plot) {
      this.brush(plot);
    }
  }

  // One quantity of hardware.
  class Telemetry extends Lines {
    constructor(page, figure, title) {
      super(page, figure);
      this.title = title;
    }

    lines() {
      const {
        contents: { telemetry, report },
      } = this.page;
      const named = torchlens.namedRanks(report);
      const of = telemetry.filter(({ title }) => title === this.title);
      this.unit = of[0]?.unit ?? "1";
      const isFirst = ({ rank }) => named.has(rank) || rank === this.view.rank;
      return of
        .sort((one, other) => isFirst(other) - isFirst(one))
        .slice(0, MOST_LINES)
        .map(({ where, rank, time_s, value }) => ({
          label: where,
          rank,
          x: time_s,
          y: value.map((each) => each ?? NaN),
          isNamed: named.has(rank),
        }));
    }

    axis() {
      const times = this.data.flatMap(({ x }) => [x[0], x[x.length - 1]]).filter((time) => time !== undefined);
      const range = new Bokeh.Range1d({ start: Math.min(0, ...times), end: Math.max(1e-9, ...times) });
      return {
        range,
        label: "seconds since the first step",
        text: (x) => String(Number(x.toPrecision(6))),
        ticker: new Bokeh.BasicTicker({ desired_num_ticks: this.isNarrow ? 4 : 8, num_minor_ticks: 0 }),
      };
    }

    text(value) {
      return torchlens.measured(value, this.unit);
    }
    where(x) {
      return `${x.toFixed(1)} s`;
    }

    // From the begin of the first selected column to that of the one behind the last.
    selected() {
      const { steps, view } = this;
      if (!steps || !view.steps) return [null, null];
      const [from, until] = steps.range(view.steps);
      const known = (at) => steps.started_s.slice(at).find((time) => time !== null);
      const start = known(from);
      const last = this.data.reduce((most, { x }) => Math.max(most, x[x.length - 1] ?? 0), 0);
      return start === undefined ? [null, null] : [start, known(until) ?? last];
    }
  }

  Object.assign(torchlens, { Memory, Telemetry });
}
