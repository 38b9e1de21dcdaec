// Line charts: step time with its band, compute time of few ranks, memory, and hardware.
{
  const { duration, short } = torchlens;
  // An axis of times ends at most at nearly the longest one times this. Longer times are cut off and written.
  const HEADROOM = 2;
  const MOST_LINES = 16;
  const MOST_IN_TIP = 6;
  const FEW = [
    { stroke: "text", width: 1.5 },
    { stroke: "dim", width: 1.5 },
    { stroke: "text", width: 1.5, dash: [6, 4], word: " (dashed)" },
    { stroke: "dim", width: 1.5, dash: [2, 3], word: " (dotted)" },
  ];

  function topOf(values) {
    const known = values.filter((value) => value !== null).sort((one, other) => one - other);
    return Math.min(known[known.length - 1] ?? 0, HEADROOM * (known[Math.floor(0.95 * (known.length - 1))] ?? 0));
  }

  // Writes the times that are cut off where they leave the plot.
  function paintCut(ctx, { x }, xs, values, top, y) {
    let free = 0;
    values.forEach((value, at) => {
      if (value <= top || x(xs[at]) < free) return;
      ctx.fillText(`\u2191 ${duration(value)}`, x(xs[at]) + 3, y);
      free = x(xs[at]) + 60;
    });
  }

  // -- step time over the run

  class StepTimes extends torchlens.Chart {
    isOverSteps = true;

    shape() {
      return this.view.rank;
    }

    options() {
      const { steps, colours, view } = this;
      const { bands } = steps;
      const row = steps.rowOf.get(view.rank);
      const own = row === undefined ? steps.first.map(() => null) : steps.row(steps.step, row);
      this.x = steps.first.map((first) => first + steps.width / 2);
      this.warmUp = Math.min(steps.end, steps.begin + (this.page.contents.report.steps.warm_up ?? 0));
      this.slow = steps.slow.filter((each) => each.label).slice(0, 3);
      this.top = (1.08 + 0.08 * this.slow.length) * topOf(bands.max_s.filter((_, at) => steps.first[at] >= this.warmUp)) || Math.max(0, ...bands.max_s) || 1;
      this.explain([
        [colours.median, this.page.contents.report.run.world_size > 1 ? "median of all ranks" : "median"],
        [colours.band, "5th to 95th percentile"],
        [colours.thin, "longest"],
        ...(row === undefined ? [] : [[colours.chosen, `rank ${view.rank}`]]),
        ...(steps.slow.length ? [[colours.slower, "a rank is slow"]] : []),
        ...(this.warmUp > steps.begin ? [[colours.rule, "warm-up"]] : []),
        ...this.flagLegend(),
      ]);
      return {
        data: [this.x, bands.p95_s, bands.p50_s, bands.p5_s, bands.max_s, own],
        series: [
          { stroke: "transparent" },
          { stroke: colours.median, width: 2 },
          { stroke: "transparent" },
          { stroke: colours.thin, width: 1 },
          { stroke: colours.chosen, width: 1.5 },
        ],
        bands: [{ series: [1, 3], fill: colours.band }],
        x: this.stepAxis(),
        y: { label: "step time", text: torchlens.tick(duration), range: [0, this.top], space: 40 },
        height: 220,
        under: (ctx, area) => this.paintTimes(ctx, area),
        over: (ctx, area) => {
          this.paintSelection(ctx, area);
          this.paintFlags(ctx, area);
          ctx.fillStyle = colours.text;
          paintCut(ctx, area, this.x, bands.max_s, this.top, 16 * this.slow.length + 12);
        },
      };
    }

    // Paints the warm-up as a grey background, and slow times as labelled bars at the top.
    paintTimes(ctx, { x: at, height }) {
      const { steps, colours } = this;
      ctx.fillStyle = colours.raised;
      ctx.fillRect(at(steps.begin), 0, at(this.warmUp) - at(steps.begin), height);
      for (const [place, { label, since_step, until_step }] of this.slow.entries()) {
        const left = Math.max(0, at(Math.max(since_step, steps.begin)));
        const right = at(until_step ?? steps.end);
        torchlens.shade(ctx, colours.slower, 0.25, left, place * 16, right - left, 15);
        ctx.fillStyle = colours.text;
        ctx.fillText(`${label} slow`, left + 4, place * 16 + 12);
      }
    }

    hover(x) {
      const { steps, view } = this;
      if (!steps.has(x)) return null;
      const column = steps.column(x);
      const { bands } = steps;
      const row = steps.rowOf.get(view.rank);
      return [
        steps.words(column),
        `median ${duration(bands.p50_s[column])}, p95 ${duration(bands.p95_s[column])}`,
        `longest ${duration(bands.max_s[column])}`,
        ...(row === undefined ? [] : [`rank ${view.rank}: ${duration(steps.step[row * steps.columns + column])}`]),
        ...this.slow
          .filter((slow) => slow.since_step <= x && x < (slow.until_step ?? steps.end))
          .map((slow) => `${slow.label} is slow in ${short(slow.phase, 40)}`),
        ...(steps.first[column] < this.warmUp ? ["warm-up"] : []),
        ...(steps.flags[column].length ? [`also: ${short(steps.flags[column].join(", "), 80)}`] : []),
      ];
    }

    selectedWords() {
      const { steps, view } = this;
      const found = steps.spread(steps.range(view.steps));
      const where = torchlens.steps(...this.page.whole(view.steps));
      if (!found) return `No step was measured in ${where}.`;
      const longest = `rank ${found.rank}, ${steps.words(found.column)}`;
      const times = `p50 ${duration(found.p50_s)}, p95 ${duration(found.p95_s)}, longest ${duration(found.max_s)}`;
      return `Selected ${where}: ${times} (${longest}).`;
    }

    rows() {
      const { first, bands } = this.steps;
      return [
        ["first_step", "p5_s", "p50_s", "p95_s", "max_s"],
        ...first.map((step, at) => [step, bands.p5_s[at], bands.p50_s[at], bands.p95_s[at], bands.max_s[at]]),
      ];
    }
  }

  // -- one line for each rank, GPU or port

  // A subclass implements lines() (objects {label, rank, x, y}), axis() (the x axis), label (of the y axis) and text()
  // (a value with its unit).
  class Lines extends torchlens.Chart {
    isOverSteps = true;
    othersText = "other ranks";

    shape() {
      return this.view.rank;
    }

    options() {
      const { colours, view } = this;
      this.data = this.lines();
      if (!this.data.some(({ y }) => y.some(Boolean))) return null;
      const slow = new Set(this.page.contents.named_ranks);
      const isFew = this.data.length <= 4;
      const look = ({ rank }, at) => {
        if (slow.has(rank)) return { stroke: colours.slower, width: 2 };
        if (rank !== null && rank === view.rank) return { stroke: colours.chosen, width: 2.5 };
        return isFew ? { ...FEW[at], stroke: colours[FEW[at].stroke] } : { stroke: colours.dim, width: 1 };
      };
      const looks = this.data.map(look);
      const named = this.data.map(({ label }, at) => [looks[at].stroke, short(label, 32) + (looks[at].word ?? "")]);
      const stands = named.filter((_, at) => looks[at].width >= 2);
      this.explain(isFew ? named : [...stands, [colours.dim, this.othersText]]);
      const text = torchlens.tick((value) => this.text(value));
      const order = [...this.data.keys()].sort((one, other) => looks[one].width - looks[other].width);
      const known = this.data.flatMap(({ y }) => y.filter((value) => value !== null)).sort((one, other) => one - other);
      const range = this.range(known[0] ?? 0, this.isCut ? topOf(known) : (known[known.length - 1] ?? 1));
      return {
        data: uPlot.join(order.map((at) => [this.data[at].x, this.data[at].y])),
        series: order.map((at) => looks[at]),
        x: this.axis(),
        y: { label: this.label, text, range, space: 34 },
        height: 150,
        over: (ctx, area) => {
          this.paintSelection(ctx, area);
          ctx.fillStyle = colours.text;
          if (this.isCut) for (const { x, y } of this.data) paintCut(ctx, area, x, y, range[1], 12);
        },
      };
    }

    axis() {
      return this.stepAxis();
    }
    where(x) {
      return this.steps.words(this.steps.column(x));
    }

    // Returns the range of the y axis: from zero, or only around the values if they differ little.
    range(low, high) {
      const from = low < 0.5 * high ? Math.min(0, low) : low - 0.3 * (high - low || high * 0.1);
      return [from, high + 0.18 * (high - from || 10)];
    }

    // Shows the values of the lines nearest to the pointer.
    hover(x, y) {
      const found = this.data
        .map(({ label, x: xs, y: ys }) => {
          const at = torchlens.indexOf(xs, x);
          return { label, at: xs[at], value: ys[at], far: Math.abs(ys[at] - y) };
        })
        .filter(({ at, value }) => at !== undefined && value !== null);
      if (!found.length) return null;
      found.sort((one, other) => one.far - other.far);
      const left = found.length - MOST_IN_TIP;
      return [
        this.where(x),
        ...found.slice(0, MOST_IN_TIP).map(({ label, value }) => `${short(label, 40)}: ${this.text(value)}`),
        ...(left > 0 ? [`and ${left} others`] : []),
      ];
    }

    rows() {
      const xs = [...new Set(this.data.flatMap(({ x }) => x))].sort((one, other) => one - other);
      const columns = this.data.map(({ x, y }) => new Map(x.map((at, place) => [at, y[place]])));
      const head = [this.isOverSteps ? "step" : "time_s", ...this.data.map(({ label }) => label)];
      return [head, ...xs.map((x) => [x, ...columns.map((column) => column.get(x) ?? "")])];
    }
  }

  // Compute time of two to four ranks. For so few rows, lines show more than a heat map.
  class Compute extends Lines {
    label = "compute";
    isCut = true;

    lines() {
      const { steps } = this;
      return steps.places.map(({ rank }, row) => ({
        label: `rank ${rank}`,
        rank,
        x: Array.from(steps.first),
        y: steps.row(steps.work, row),
      }));
    }
    text(value) {
      return duration(value);
    }
  }

  class Memory extends Lines {
    label = "memory";

    lines() {
      const { steps } = this;
      if (!steps.memory_bytes) return [];
      const prominent = this.page.contents.prominent_ranks.filter((rank) => steps.rowOf.has(rank));
      if (steps.rowOf.has(this.view.rank) && !prominent.includes(this.view.rank)) prominent.push(this.view.rank);
      return prominent
        .map((rank) => {
          const values = steps.memory_bytes[steps.rowOf.get(rank)];
          const together = Math.ceil(steps.columns / values.length);
          return { label: `rank ${rank}`, rank, x: values.map((_, at) => steps.first[at * together]), y: values };
        })
        .filter(({ y }) => y.some((value) => value !== null));
    }
    text(value) {
      return torchlens.amount(value, "B");
    }
  }

  // One quantity of hardware over time.
  class Telemetry extends Lines {
    isOverSteps = false;
    othersText = "others";

    lines() {
      const { telemetry, named_ranks: named } = this.page.contents;
      const of = telemetry.filter(({ title }) => title === this.figure.dataset.title);
      this.unit = of[0]?.unit ?? "1";
      const isFirst = ({ rank }) => named.includes(rank) || rank === this.view.rank;
      return of
        .sort((one, other) => isFirst(other) - isFirst(one))
        .slice(0, MOST_LINES)
        .map(({ where, rank, time_s, value }) => ({ label: where, rank, x: time_s, y: value }));
    }
    get label() {
      return this.figure.dataset.unit;
    }
    axis() {
      const times = this.data.flatMap(({ x }) => [x[0], x[x.length - 1]]).filter((time) => time !== undefined);
      const range = [Math.min(0, ...times), Math.max(1e-9, ...times)];
      const text = (x) => String(Number(x.toPrecision(6)));
      return { label: "seconds since the first step", text, range };
    }
    text(value) {
      return torchlens.measured(value, this.unit);
    }
    where(x) {
      return `${x.toFixed(1)} s`;
    }

    // Returns the time range of the selected steps.
    selected() {
      const { steps, view } = this;
      if (!steps || !view.steps) return null;
      const [from, until] = steps.range(view.steps);
      const known = (at) => steps.started_s.slice(at).find((time) => time !== null);
      const last = this.data.reduce((most, { x }) => Math.max(most, x[x.length - 1] ?? 0), 0);
      return known(from) === undefined ? null : [known(from), known(until) ?? last];
    }
  }

  Object.assign(torchlens, { StepTimes, Compute, Memory, Telemetry });
}
