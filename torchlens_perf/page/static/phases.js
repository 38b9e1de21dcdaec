// What steps are made of, by rank: typical ones of the whole run as in the picture, or means over the selected steps.
{
  const { duration, element, source, fields } = torchlens;
  const ROW = 22;
  const MOST_BARS = 24; // as page/sections/phases.py

  class Phases extends torchlens.Chart {
    static FOLLOWS = ["steps", "rank", "clock"];

    constructor(page, figure) {
      super(page, figure);
      this.words = element("p", { className: "chart-words" });
      figure.append(this.words);
      this.legend = element("ul", { className: "legend of-chart", "aria-label": "Colours" });
      this.place.after(this.legend);
      if (this.steps.device_parts.size) {
        const options = [
          ["host", "the host's clock"],
          ["device", "the device's clock"],
        ];
        const { label, select } = torchlens.choice("Times by", "clock", options, (clock) => page.view.set({ clock }));
        this.select = select;
        this.place.before(element("div", { className: "controls" }, label));
      }
    }

    // By rank, seconds by part: [rank, whether it is named, Map]. The ranks that stand out first.
    bars() {
      const { steps, view } = this;
      const { report } = this.page.contents;
      const named = torchlens.namedRanks(report);
      const byDevice = view.clock === "device" && steps.device_parts.size > 0;
      const range = steps.range(view.steps);
      const parts = byDevice ? steps.device_parts : steps.parts;
      let rows;
      if (view.steps) {
        const work = (rank) => steps.mean(steps.work, steps.rowOf.get(rank), range) || 0;
        const works = new Map(steps.places.map(({ rank }) => [rank, work(rank)]));
        rows = steps.places
          .map(({ rank }) => rank)
          .sort((one, other) => named.has(other) - named.has(one) || works.get(other) - works.get(one) || one - other);
      } else {
        rows = torchlens
          .byProminence(report)
          .map(({ rank }) => rank)
          .filter((rank) => steps.rowOf.has(rank));
      }
      const typical = new Map(
        report.ranks.map((rank) => [rank.rank, byDevice ? (rank.device?.parts ?? {}) : (rank.typical?.parts ?? {})]),
      );
      const all = rows
        .map((rank) => {
          const row = steps.rowOf.get(rank);
          const seconds = view.steps
            ? [...parts].map(([part, values]) => [part, steps.mean(values, row, range)])
            : [...parts.keys()].map((part) => [part, typical.get(rank)?.[part] ?? NaN]);
          return [rank, named.has(rank), new Map(seconds)];
        })
        .filter(([, , seconds]) => [...seconds.values()].some((value) => value === value));
      const shown = all.slice(0, MOST_BARS);
      const chosen = all.find(([rank]) => rank === view.rank);
      if (chosen && !shown.includes(chosen)) shown[shown.length - 1] = chosen;
      this.others = all.length - shown.length;
      return shown;
    }

    shape() {
      this.data = this.bars();
      return this.data.length;
    }

    build() {
      const count = this.data.length;
      const { colours } = this;
      if (!count) return null;
      this.rows = count;
      const plot = this.plotOf({
        height: ROW * count + 54,
        right: this.isNarrow ? 14 : 76,
        xLabel: "time in a step",
        xText: torchlens.tick(duration),
        yText: (y) => this.label(y),
        yTicker: new Bokeh.FixedTicker({ ticks: Array.from({ length: count }, (_, at) => at + 0.5), minor_ticks: [] }),
        xTicker: new Bokeh.BasicTicker({ desired_num_ticks: this.isNarrow ? 4 : 7, num_minor_ticks: 0 }),
        x_range: (this.lengths = new Bokeh.Range1d({ start: 0, end: 1 })),
        y_range: new Bokeh.Range1d({ start: 0, end: count }),
      });
      plot.ygrid.grid_line_color = null;
      this.quads = source({ left: [], right: [], bottom: [], top: [], colour: [] });
      plot.quad({
        ...fields("left", "right", "bottom", "top"),
        source: this.quads,
        fill_color: { field: "colour" },
        line_color: null,
      });
      this.totals = source({ x: [], y: [], text: [] });
      if (!this.isNarrow) {
        plot.text({
          ...fields("x", "y", "text"),
          source: this.totals,
          x_offset: 6,
          text_baseline: "middle",
          ...this.textLook("12px", colours.text),
        });
      }
      this.ring = new Bokeh.BoxAnnotation({
        left: 0,
        fill_color: null,
        line_color: colours.link,
        line_width: 2,
        visible: false,
      });
      plot.add_layout(this.ring);
      plot.on_event("mousemove", ({ x, y }) => this.hover(x, y));
      plot.on_event("mouseleave", () => this.tip.hide());
      plot.on_event("tap", ({ y }) => {
        const bar = this.data[this.rows - 1 - Math.floor(y)];
        if (bar) this.page.view.set({ rank: bar[0] });
      });
      return plot;
    }

    fill() {
      const { colours, rows } = this;
      const quads = { left: [], right: [], bottom: [], top: [], colour: [] };
      const totals = { x: [], y: [], text: [] };
      this.data.forEach(([, , seconds], at) => {
        let sum = 0;
        for (const [part, value] of seconds) {
          if (!(value > 0)) continue;
          quads.left.push(sum);
          quads.right.push((sum += value));
          quads.bottom.push(rows - at - 0.86);
          quads.top.push(rows - at - 0.14);
          quads.colour.push(colours[part]);
        }
        totals.x.push(sum);
        totals.y.push(rows - at - 0.5);
        totals.text.push(duration(sum));
      });
      this.quads.data = quads;
      this.totals.data = totals;
      this.lengths.end = Math.max(...totals.x) * (this.isNarrow ? 1.02 : 1.09) || 1;
      const at = this.data.findIndex(([rank]) => rank === this.view.rank);
      this.ring.visible = at >= 0;
      if (at >= 0) this.ring.setv({ right: totals.x[at], bottom: rows - at - 0.9, top: rows - at - 0.1 });
      if (this.select) this.select.value = this.view.clock;
      this.explain();
    }

    label(y) {
      const bar = this.data[this.rows - 1 - Math.floor(y)];
      return bar === undefined ? "" : this.isNarrow ? String(bar[0]) : `rank ${bar[0]}`;
    }

    hover(x, y) {
      const bar = this.data[this.rows - 1 - Math.floor(y)];
      if (!bar || x < 0) {
        this.tip.hide();
        return;
      }
      const [rank, , seconds] = bar;
      this.tip.show([
        `rank ${rank}`,
        ...[...seconds].map(([part, value]) => `${torchlens.partWord(part)}: ${duration(value)}`),
      ]);
    }

    // Which part makes the named or chosen rank longer than the mean of the others that are shown.
    explain() {
      const { view, data } = this;
      const parts = [...(data[0]?.[2].keys() ?? [])];
      const strong = element("strong");
      this.legend.replaceChildren(
        ...parts.map((part) => {
          const swatch = element("span", { className: "swatch" });
          swatch.style.background = `var(--${part})`;
          return element("li", {}, swatch, torchlens.partWord(part));
        }),
      );
      const isOwn = view.steps !== null || view.clock === "device";
      this.figure.classList.toggle("own-words", isOwn);
      this.words.hidden = !isOwn;
      const clock = view.clock === "device" && this.steps.device_parts.size ? "device" : "host";
      const what = view.steps
        ? `Means over ${torchlens.steps(...this.page.whole(view.steps))}`
        : "A typical step of each rank";
      const one = data.find(([rank]) => rank === view.rank) ?? data.find(([, isNamed]) => isNamed);
      const others = data.filter((bar) => bar !== one);
      let text = `${what}, by the ${clock}'s clock.`;
      const isHidden = clock === "device" && this.page.contents.report.steps.own_time?.is_hidden;
      if (isHidden) {
        text += " A device that waits for other ranks does not show what its host does meanwhile.";
      } else if (one && others.length) {
        const mean = (part) => others.reduce((sum, [, , seconds]) => sum + (seconds.get(part) || 0), 0) / others.length;
        const more = parts
          .filter((part) => part !== "communication")
          .map((part) => [(one[2].get(part) || 0) - mean(part), part])
          .sort(([a], [b]) => b - a)[0];
        if (more && more[0] > 0) {
          const [own, usual] = [one[2].get(more[1]), mean(more[1])].map(duration);
          text += ` Rank ${one[0]} takes most longer in ${torchlens.partWord(more[1])}: ${own} against ${usual}, `;
          text += "the mean of the others shown.";
        }
      }
      strong.textContent = text;
      this.words.replaceChildren(
        strong,
        this.others > 0 ? ` ${data.length} of ${data.length + this.others} ranks, those that stand out first.` : "",
      );
    }
  }

  Object.assign(torchlens, { Phases });
}
