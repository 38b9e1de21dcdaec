// What is known of the whole run only, not by step: modules by rank, and waiting in collectives by rank.
{
  const { duration, percent, short, element, source, fields } = torchlens;
  const ROW = 22;
  const MOST_MODULES = 24;
  const MOST_COLLECTIVES = 32;
  const MOST_RANKS = 32;

  // A subclass has rows(): {label, bars: [[seconds, colour]], dots: [[seconds, rank, text]], text, tip, rank} each.
  class Bars extends torchlens.Chart {
    static FOLLOWS = ["rank"];

    shape() {
      this.colours ??= torchlens.colours();
      return `${this.page.version} ${this.chosen ?? ""}`;
    }

    build() {
      this.data = this.rows();
      const { colours } = this;
      const count = this.data.length;
      if (!count) return null;
      const longest = Math.max(
        ...this.data.map(({ bars, dots }) =>
          Math.max(
            bars.reduce((sum, [seconds]) => sum + seconds, 0),
            ...dots.map(([seconds]) => seconds),
            0,
          ),
        ),
      );
      const plot = this.plotOf({
        height: ROW * count + 54,
        xLabel: this.axisWords,
        xText: torchlens.tick(duration),
        yText: (y) => this.data[count - 1 - Math.floor(y)]?.label ?? "",
        yTicker: new Bokeh.FixedTicker({ ticks: Array.from({ length: count }, (_, at) => at + 0.5), minor_ticks: [] }),
        xTicker: new Bokeh.BasicTicker({ desired_num_ticks: this.isNarrow ? 3 : 7, num_minor_ticks: 0 }),
        x_range: new Bokeh.Range1d({
          start: 0,
          end: longest * (this.isNarrow || !this.data.some(({ text }) => text) ? 1.04 : 1.12) || 1,
        }),
        y_range: new Bokeh.Range1d({ start: 0, end: count }),
      });
      plot.ygrid.grid_line_color = null;
      const quads = { left: [], right: [], bottom: [], top: [], colour: [] };
      const texts = { x: [], y: [], text: [] };
      this.data.forEach(({ bars, text }, at) => {
        let sum = 0;
        for (const [seconds, colour] of bars) {
          quads.left.push(sum);
          quads.right.push((sum += seconds));
          quads.bottom.push(count - at - 0.82);
          quads.top.push(count - at - 0.18);
          quads.colour.push(colour);
        }
        texts.x.push(sum);
        texts.y.push(count - at - 0.5);
        texts.text.push(this.isNarrow ? "" : text);
      });
      plot.quad({
        ...fields("left", "right", "bottom", "top"),
        source: source(quads),
        fill_color: { field: "colour" },
        line_color: null,
      });
      plot.text({
        ...fields("x", "y", "text"),
        source: source(texts),
        x_offset: 6,
        text_baseline: "middle",
        ...this.textLook("12px", colours.text),
      });
      this.dots = source({ x: [], y: [], colour: [], size: [] });
      plot.scatter({
        ...fields("x", "y", "size"),
        source: this.dots,
        fill_color: { field: "colour" },
        line_color: colours.ground,
        line_width: 0.7,
      });
      this.names = source({ x: [], y: [], text: [] });
      plot.text({
        ...fields("x", "y", "text"),
        source: this.names,
        text_align: "right",
        x_offset: -8,
        text_baseline: "middle",
        ...this.textLook("11px"),
      });
      plot.on_event("mousemove", ({ x, y }) => this.hover(x, y, longest));
      plot.on_event("mouseleave", () => this.tip.hide());
      plot.on_event("tap", ({ x, y }) => {
        const rank = this.rankAt(x, y, longest);
        if (rank !== null) this.page.view.set({ rank });
      });
      return plot;
    }

    fill() {
      const { colours, view } = this;
      const named = torchlens.namedRanks(this.page.contents.report);
      const found = { x: [], y: [], colour: [], size: [] };
      this.data.forEach(({ dots, rank: of }, at) => {
        const stands = (rank) => (rank === view.rank ? 2 : named.has(rank) ? 1 : 0);
        for (const [seconds, rank] of [...dots].sort(([, one], [, other]) => stands(one) - stands(other))) {
          found.x.push(seconds);
          found.y.push(this.data.length - at - 0.5);
          found.colour.push([colours.text, colours.bad, colours.link][stands(rank)]);
          found.size.push([5, 8, 10][stands(rank)]);
        }
        if (of !== undefined && of === view.rank) {
          found.x.push(0);
          found.y.push(this.data.length - at - 0.5);
          found.colour.push(colours.link);
          found.size.push(10);
        }
      });
      this.dots.data = found;
      this.names.data = this.ranksByName(named);
    }

    // The ranks that stand out, beside their dots in the first row.
    ranksByName(named) {
      const dots = this.data[0].dots.filter(([, rank]) => rank === this.view.rank || named.has(rank)).slice(0, 3);
      const y = this.data.length - 0.5;
      return {
        x: dots.map(([seconds]) => seconds),
        y: dots.map(() => y),
        text: dots.map(([, rank]) => `rank ${rank}`),
      };
    }

    dotAt(row, x, longest) {
      const near = row.dots.map((dot) => [Math.abs(dot[0] - x), dot]).sort(([one], [other]) => one - other)[0];
      return near && near[0] < longest / 80 ? near[1] : null;
    }

    rankAt(x, y, longest) {
      const row = this.data[this.data.length - 1 - Math.floor(y)];
      return row ? (row.rank ?? this.dotAt(row, x, longest)?.[1] ?? null) : null;
    }

    hover(x, y, longest) {
      const row = this.data[this.data.length - 1 - Math.floor(y)];
      if (!row || x < 0) {
        this.tip.hide();
        return;
      }
      const dot = this.dotAt(row, x, longest);
      this.tip.show([...row.tip, ...(dot ? [`rank ${dot[1]}: ${duration(dot[0])}`] : [])]);
    }
  }

  // Own time of modules: the mean over ranks, and each rank.
  class Modules extends Bars {
    get axisWords() {
      const where = this.onDevice ? "in a step on the device, over the whole run" : "in a typical step of the whole run";
      return this.isNarrow ? where : `${where}; bar: mean over ranks${this.onDevice ? "" : ", dots: each rank"}`;
    }

    rows() {
      const { modules } = this.page.contents.report;
      const { colours } = this;
      this.onDevice = modules.some(({ device_s }) => device_s !== null);
      return modules.slice(0, MOST_MODULES).map((module) => {
        const mean = this.onDevice ? (module.device_own_s_per_step ?? 0) : module.own_s_per_step;
        const ranks = Object.entries(module.by_rank);
        const slowest = ranks.reduce((one, other) => (one && one[1] >= other[1] ? one : other), null);
        return {
          label: short(module.name, this.isNarrow ? 8 : 16),
          bars: [[mean, colours.forward]],
          text: "",
          dots: this.onDevice || ranks.length < 2 ? [] : ranks.map(([rank, seconds]) => [seconds, Number(rank)]),
          tip: [
            short(module.name, 80),
            `mean over ranks: ${duration(mean)} a step, own`,
            `${module.calls} calls`,
            ...(slowest && ranks.length > 1
              ? [`slowest${this.onDevice ? " by the host's clock" : ""}: rank ${slowest[0]}, ${duration(slowest[1])}`]
              : []),
          ],
        };
      });
    }
  }

  // Waiting in one collective, by rank: who waits least is whom the others wait for.
  class Collectives extends Bars {
    axisWords = "waited, in all";

    constructor(page, figure) {
      super(page, figure);
      this.chosen = 0;
      const { label, select } = torchlens.choice("Collective", "collective", [], (at) => {
        this.chosen = Number(at);
        this.ask(["contents"]);
        page.draw();
      });
      this.select = select;
      this.place.before(element("div", { className: "controls" }, label));
      this.words = element("p", { className: "chart-words" });
      figure.append(this.words);
    }

    rows() {
      const { report } = this.page.contents;
      const { colours } = this;
      const named = torchlens.namedRanks(report);
      const all = report.collectives
        .filter((row) => row.joined && Object.keys(row.by_rank).length)
        .slice(0, MOST_COLLECTIVES);
      const text = (row) => {
        const ranks = row.pair ? row.pair.join(" and ") : short(row.ranks ?? row.ranks_seen, 30);
        const what = short(row.dtype ? `${row.operation} ${row.dtype}` : row.operation, 40);
        return `${what}, ${short(row.description || row.group, 24)} of ranks ${ranks}`;
      };
      this.select.replaceChildren(...all.map((row, at) => torchlens.option(at, text(row))));
      const row = all[this.chosen] ?? all[(this.chosen = 0)];
      if (!row) return [];
      this.select.value = String(this.chosen);
      const ranks = Object.entries(row.by_rank).map(([rank, of]) => [Number(rank), of]);
      ranks.sort(([one, a], [other, b]) => named.has(other) - named.has(one) || b.last - a.last || one - other);
      const shown = ranks.slice(0, MOST_RANKS);
      const share = (of) => percent(of.last / row.joined);
      const [first, most] = ranks.reduce((one, next) => (next[1].last > one[1].last ? next : one));
      this.figure.classList.add("own-words");
      const last = row.joined_whole && most.last ? ` Rank ${first} came last in ${share(most)} of ${row.joined}.` : "";
      this.words.replaceChildren(
        element("strong", { text: `What each rank waited in ${text(row)}, over the whole run.${last}` }),
        row.asynchronous ? " Lighter: how much earlier a rank issued one, not time that it was blocked." : "",
        " Who waits least is whom the others wait for.",
        shown.length < ranks.length ? ` ${shown.length} of ${ranks.length} ranks.` : "",
      );
      return shown.map(([rank, of]) => ({
        rank,
        label: this.isNarrow ? String(rank) : `rank ${rank}`,
        dots: [],
        bars: [
          [of.exposed_wait_s, colours.communication],
          ...(row.asynchronous ? [[of.overlapped_wait_s, colours.rule]] : []),
        ],
        text: row.joined_whole ? `last: ${share(of)}` : "",
        tip: [
          `rank ${rank}`,
          `waited ${duration(of.exposed_wait_s)} in all`,
          ...(row.asynchronous ? [`issued ${duration(of.overlapped_wait_s)} earlier, in all`] : []),
          ...(row.joined_whole
            ? [`came last in ${of.last} of ${row.joined} (${share(of)})`]
            : ["who came last is not known"]),
        ],
      }));
    }
  }

  Object.assign(torchlens, { Modules, Collectives });
}
