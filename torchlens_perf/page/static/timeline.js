// One step: all ranks beside each other, what each did when, on the host and on the device, and who waited for whom.
{
  const { duration, short, element, source, fields } = torchlens;
  const LABEL = 44; // from so many pixels on, a span has its name in it
  const LETTER = 6.3;
  const PARTS = new Map([
    ["wait", "communication"],
    ["closure", "host"],
  ]);
  const HINT =
    "Left and right arrows go from one collective to the next, and say who came when; plus and minus zoom, 0 shows " +
    "the whole step; Page Up and Page Down go to the recorded step before and after.";

  class Timeline extends torchlens.Chart {
    static FOLLOWS = ["rank"];

    constructor(page, figure) {
      super(page, figure);
      this.words = element("p", { className: "chart-words" });
      figure.append(this.words);
      figure.classList.add("own-words");
      this.steppicker = new torchlens.StepPicker(page, this);
      this.place.before(this.steppicker.element);
      this.tables = new torchlens.StepTables(figure, this);
      this.said = element("p", { className: "hidden-words", role: "status" });
      figure.append(this.said);
      Object.entries({
        tabindex: "0",
        role: "application",
        "aria-roledescription": "time line",
        "aria-label": `Time line of one step. ${HINT}`,
      }).forEach(([key, value]) => this.place.setAttribute(key, value));
      this.place.addEventListener("keydown", (event) => this.key(event));
    }

    // On the live page any step can be asked for; a file has what it has.
    async draw() {
      this.trace = await this.steppicker.trace();
      await super.draw();
      this.steppicker.show(this.trace);
      this.tables.show(this.trace);
      if (!this.trace) return;
      const finding = element("strong", { text: torchlens.stepFinding(this.trace) });
      this.words.replaceChildren(finding, ` ${torchlens.stepNotes(this.trace, this.view)}`);
    }

    // A step that was recorded does not change any more, but for ranks that come later.
    shape() {
      return this.trace ? `${this.trace.step} ${this.trace.ranks.map(({ rank }) => rank)}` : "";
    }

    renewed() {
      this.tables = new torchlens.StepTables(this.figure, this);
    }

    build() {
      const { trace, colours } = this;
      if (!trace) return null;
      const names = trace.names ?? this.page.contents.traces.names;
      Object.assign(this, torchlens.laidOut(trace, names, this.isNarrow));
      const { height, end, begin } = this;
      const plot = this.plotOf({
        height: height + 52,
        left: this.left,
        right: 14,
        xLabel: "since the first rank began the step",
        xText: torchlens.tick((ms) => duration(ms / 1e3)),
        yText: (at) => this.labels.get(at) ?? "",
        yTicker: new Bokeh.FixedTicker({ ticks: [...this.labels.keys()], minor_ticks: [] }),
        xTicker: new Bokeh.BasicTicker({ desired_num_ticks: this.isNarrow ? 4 : 8, num_minor_ticks: 0 }),
        x_range: (this.times = new Bokeh.Range1d({ start: begin, end, bounds: [begin, end] })),
        y_range: new Bokeh.Range1d({ start: height, end: 0 }),
        tools: [
          new Bokeh.BoxZoomTool({ dimensions: "width" }),
          new Bokeh.WheelZoomTool({ dimensions: "width", modifiers: { ctrl: true } }),
        ],
      });
      plot.toolbar.tools[0].overlay.setv({
        fill_color: colours.link,
        fill_alpha: 0.15,
        line_color: colours.link,
        line_dash: [],
      });
      plot.ygrid.grid_line_color = null;
      const ground = source({
        left: this.ranks.map(({ begin: at }) => at),
        right: this.ranks.map(({ end: at }) => at),
        top: this.ranks.map(({ top }) => top),
        bottom: this.ranks.map(({ hostBottom }) => hostBottom),
      });
      const sides = fields("left", "right", "top", "bottom");
      const named = torchlens.namedRanks(this.page.contents.report);
      const stands = this.ranks.filter(({ rank }) => named.has(rank));
      plot.quad({
        ...sides,
        fill_color: colours.mark,
        line_color: null,
        source: source({
          left: stands.map(() => begin),
          right: stands.map(() => end),
          top: stands.map(({ top }) => top - 3),
          bottom: stands.map(({ bottom }) => bottom + 3),
        }),
      });
      plot.quad({ ...sides, source: ground, fill_color: colours.raised, line_color: colours.rule });
      this.spans.colour = this.spans.kind.map((kind) => this.colour(kind));
      this.source = source(this.spans);
      plot.quad({
        ...sides,
        source: this.source,
        fill_color: { field: "colour" },
        line_color: colours.ground,
        line_width: 0.5,
      });
      plot.quad({
        ...sides,
        source: source(this.waits),
        fill_color: colours.ground,
        fill_alpha: 0.75,
        hatch_pattern: "/",
        hatch_color: colours.bad,
        hatch_alpha: 0.45,
        hatch_scale: 8,
        hatch_weight: 1,
        line_color: colours.bad,
        line_width: 0.8,
      });
      this.texts = source({ x: [], y: [], text: [], colour: [] });
      plot.text({
        ...fields("x", "y", "text"),
        source: this.texts,
        x_offset: 3,
        text_baseline: "middle",
        ...this.textLook("10px", { field: "colour" }),
      });
      plot.scatter({
        x: { field: "x" },
        y: { field: "y" },
        source: source(this.lasts),
        marker: "inverted_triangle",
        size: 9,
        fill_color: colours.bad,
        line_color: colours.ground,
      });
      this.focus = {
        spans: source({ left: [], right: [], top: [], bottom: [] }),
        front: source({ x: [], y: [] }),
      };
      plot.quad({ ...sides, source: this.focus.spans, fill_color: null, line_color: colours.text, line_width: 2 });
      plot.line({
        x: { field: "x" },
        y: { field: "y" },
        source: this.focus.front,
        line_color: colours.text,
        line_width: 1.5,
        line_dash: [4, 3],
      });
      this.chosen = source({ left: [], right: [], top: [], bottom: [] });
      plot.quad({ ...sides, source: this.chosen, fill_color: null, line_color: colours.link, line_width: 2 });
      this.activate(plot);
      const changed = () => this.later();
      this.times.properties.start.change.connect(changed);
      this.times.properties.end.change.connect(changed);
      plot.on_event("mousemove", ({ x, y: at }) => this.hover(x, at));
      plot.on_event("mouseleave", () => {
        this.tip.hide();
        this.point(this.pinned);
      });
      plot.on_event("tap", ({ x, y: at }) => this.pin(this.joinedAt(this.spanAt(x, at))));
      plot.on_event("doubletap", () => this.whole());
      this.pinned = null;
      return plot;
    }

    colour(kind) {
      const { colours } = this;
      return (
        colours[PARTS.get(kind) ?? kind] ||
        {
          module: colours.module,
          module_backward: colours.module_backward,
          section: colours.section,
          collective: colours.collective,
        }[kind] ||
        colours.raised
      );
    }

    later() {
      if (this.waiting) return;
      this.waiting = true;
      requestAnimationFrame(() => {
        this.waiting = false;
        this.write();
      });
    }

    // Names in the spans that have room for them.
    write() {
      const { spans, times } = this;
      const texts = { x: [], y: [], text: [], colour: [] };
      const scale = (this.width - this.left - 14) / (times.end - times.start);
      for (let at = 0; at < spans.left.length; at++) {
        const left = Math.max(spans.left[at], times.start);
        const room = (Math.min(spans.right[at], times.end) - left) * scale;
        if (room < LABEL) continue;
        const { kind, name, key } = this.about[at];
        const text = kind === "wait" ? "wait" : key ? key.split(" ")[0] : short(name, 200);
        const most = Math.floor((room - 6) / LETTER); // of modules, the end of the name tells them apart
        const shortened =
          text.length <= most
            ? text
            : kind.startsWith("module")
              ? `\u2026${text.slice(1 - most)}`
              : `${text.slice(0, most - 1)}\u2026`;
        texts.x.push(left);
        texts.y.push((spans.top[at] + spans.bottom[at]) / 2 + 0.5);
        texts.text.push(shortened);
        texts.colour.push(
          key && this.isWaiting.has(at)
            ? this.colours.text
            : torchlens.isDark(spans.colour[at])
              ? "#ffffff"
              : this.colours.in_span,
        );
      }
      this.texts.data = texts;
    }

    fill(changed) {
      if (changed.has("theme")) this.write();
      const chosen = this.ranks.find(({ rank }) => rank === this.view.rank);
      this.chosen.data = chosen
        ? { left: [chosen.begin], right: [chosen.end], top: [chosen.top - 1], bottom: [chosen.bottom + 1] }
        : { left: [], right: [], top: [], bottom: [] };
    }

    // -- what is pointed at

    spanAt(x, y) {
      const { left, right, bottom, top } = this.spans;
      const near = (1.5 * (this.times.end - this.times.start)) / this.width;
      let found = -1; // the shortest that is here: short ones are drawn wider than they are
      for (let at = 0; at < left.length; at++) {
        if (
          left[at] - near <= x &&
          x <= right[at] + near &&
          top[at] <= y &&
          y <= bottom[at] &&
          (found < 0 || right[at] - left[at] < right[found] - left[found])
        ) {
          found = at;
        }
      }
      return found;
    }

    joinedAt(at) {
      return at >= 0 && this.joined.has(this.about[at].key) ? this.about[at].key : null;
    }

    hover(x, y) {
      const at = this.spanAt(x, y);
      this.point(this.joinedAt(at) ?? this.pinned);
      if (at < 0) {
        this.tip.hide();
        return;
      }
      const { rank, lane, kind, name, key, start_us, duration_us } = this.about[at];
      const joined = this.joined.get(key);
      const isPlain = kind === "wait" || kind === "collective" || name.startsWith(kind);
      const words = kind === "wait" ? "wait" : short(name);
      const what = isPlain ? words : `${words} (${kind.replace("_", " ")})`;
      this.tip.show([
        `rank ${rank}: ${what}`,
        `${duration(duration_us / 1e6)}, from ${duration(start_us / 1e6)} on${lane === "host" ? "" : `; ${lane}`}`,
        ...(joined ? this.whoWaited(joined, rank) : []),
      ]);
    }

    whoWaited({ group, number, bytes, arrival_us, wait_us, last_rank, asynchronous }, rank) {
      const us = (value) => duration(value / 1e6);
      const found = [
        `${short(group, 30)}, number ${number}${bytes === null ? "" : `, ${torchlens.amount(bytes, "B")}`}`,
      ];
      const arrival = arrival_us[rank];
      const wait = wait_us[rank];
      if (last_rank === rank) found.push("came last: the others wait for it");
      else if (last_rank !== null) found.push(`rank ${last_rank} came last`);
      if (typeof arrival === "number") found.push(arrival ? `came ${us(arrival)} after the first` : "came first");
      if (typeof wait === "number" && wait > 0) {
        found.push(asynchronous ? `issued ${us(wait)} before the last: not blocked by it` : `waited ${us(wait)}`);
      }
      return found;
    }

    // Frames a collective on all ranks, and joins its arrivals.
    point(key) {
      const { spans } = this;
      const places = key ? (this.byKey.get(key) ?? []) : [];
      if (this.pointed === key) return;
      this.pointed = key;
      const of = (name) => places.map((at) => spans[name][at]);
      this.focus.spans.data = { left: of("left"), right: of("right"), top: of("top"), bottom: of("bottom") };
      this.focus.front.data = {
        x: places.flatMap((at) => [spans.left[at], spans.left[at]]),
        y: places.flatMap((at) => [spans.top[at], spans.bottom[at]]),
      };
    }

    pin(key) {
      this.pinned = this.pinned === key ? null : key;
      this.point(this.pinned);
    }

    // -- the keyboard, and zooming

    key(event) {
      if (event.ctrlKey || event.metaKey || event.altKey || !this.trace) return;
      if (event.key === "ArrowRight") this.next(1);
      else if (event.key === "ArrowLeft") this.next(-1);
      else if (event.key === "+" || event.key === "=") this.zoomBy(0.5);
      else if (event.key === "-") this.zoomBy(2);
      else if (event.key === "0") this.whole();
      else if (event.key === "PageUp") this.steppicker.next(-1);
      else if (event.key === "PageDown") this.steppicker.next(1);
      else if (event.key === "Escape") this.pin(null);
      else return;
      event.preventDefault();
    }

    next(by) {
      const keys = [...this.joined.keys()];
      const at = keys.indexOf(this.pinned);
      if (!keys.length) return;
      this.pinned = keys[at < 0 ? (by > 0 ? 0 : keys.length - 1) : (at + by + keys.length) % keys.length];
      this.point(this.pinned);
      const { name, group, number, last_rank, wait_us } = this.joined.get(this.pinned);
      const waits = Object.values(wait_us).filter((wait) => wait !== null);
      this.said.textContent =
        `${short(name)} of ${short(group, 30)}, number ${number}: ` +
        `${last_rank === null ? "who came last is not known" : `rank ${last_rank} came last`}; ` +
        `longest wait ${waits.length ? duration(Math.max(...waits) / 1e6) : "not known"}.`;
    }

    zoomBy(factor) {
      const { start, end } = this.times;
      const places = this.pinned ? this.byKey.get(this.pinned) : null;
      const middle = places
        ? (Math.min(...places.map((at) => this.spans.left[at])) +
            Math.max(...places.map((at) => this.spans.right[at]))) /
          2
        : (start + end) / 2;
      const half = Math.min(this.end - this.begin, (end - start) * factor) / 2;
      const from = Math.max(this.begin, Math.min(this.end - 2 * half, middle - half));
      this.times.setv({ start: from, end: from + 2 * half });
    }

    whole() {
      this.times.setv({ start: this.begin, end: this.end });
    }
  }

  torchlens.Timeline = Timeline;
}
