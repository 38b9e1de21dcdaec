// Ranks by steps: any quantity, grouped and ordered; brushed, zoomed, and walked through by the keyboard.
{
  const ROW = 14, MOST_HEIGHT = 560, LABEL_ROOM = 15;

  class Heat extends torchlens.Chart {
    static REBUILDS = ["group"];
    static FILLS = ["quantity", "order", "steps", "step", "rank"];

    constructor(page, figure) {
      super(page, figure);
      this.controls = page.heatControls();
      this.place.before(this.controls);
      this.legend = torchlens.element("div", { className: "scale" });
      this.words = torchlens.element("p", { className: "chart-words" });
      this.place.after(this.legend);
      figure.classList.add("own-words");
      figure.append(this.words);
      this.found = figure.querySelector("figcaption strong")?.textContent ?? "";
      Object.entries({
        tabindex: "0", role: "application", "aria-roledescription": "heat map",
        "aria-label": "Ranks by step. Left and right arrows choose a step, up and down a rank, with Shift a range of steps; "
          + "Enter opens the step; plus and minus zoom, 0 shows all; Escape clears the selection.",
      }).forEach(([key, value]) => this.place.setAttribute(key, value));
      this.place.addEventListener("keydown", (event) => this.key(event));
    }

    get quantity() { return this.steps.quantities.has(this.view.quantity) ? this.view.quantity : "excess"; }

    // Of a row: its node, or its coordinate in a dimension of the mesh.
    groupOf(row) {
      const { group } = this.view, place = this.steps.places[row];
      if (group === "node") return place.host;
      const dimension = group.startsWith("mesh ") ? group.slice(5) : null;
      if (dimension === null) return null;
      return Object.hasOwn(place.mesh, dimension) ? `${dimension} ${place.mesh[dimension]}` : `no ${dimension}`;
    }

    // Rows from the top, by rank or by the mean of what they have more of, inside of their groups.
    sorted() {
      const { steps, view } = this, rows = Array.from(steps.places.keys()), groups = rows.map((row) => this.groupOf(row));
      const means = new Float64Array(rows.length);
      if (view.order === "slowness") {
        const values = steps.values("excess"), range = steps.range(view.steps);
        for (const row of rows) means[row] = steps.mean(values, row, range);
      }
      const less = (value) => (value === value ? value : -Infinity);
      return rows.sort((one, other) => (groups[one] === groups[other] ? 0 : torchlens.compare(groups[one], groups[other]))
        || (less(means[other]) - less(means[one]) || 0) || one - other);
    }

    build() {
      const { steps, colours } = this, count = steps.ranks;
      this.height = Math.min(MOST_HEIGHT, Math.max(60, ROW * count));
      this.ticker = new Bokeh.FixedTicker({ ticks: [], minor_ticks: [] });
      const [select, zoom] = this.brushTools();
      zoom.dimensions = "both";
      const left = this.view.group === "none" || this.isNarrow ? this.left : 168;
      const plot = this.plotOf({
        height: this.height + 52, left, xLabel: steps.width > 1 ? `step; a column is ${steps.width} steps` : "step",
        xText: String, yText: (y) => this.label(y), yTicker: this.ticker, xTicker: this.stepTicks(), tools: [select, zoom],
        x_range: this.stepRange(), y_range: (this.rows = new Bokeh.Range1d({ start: 0, end: count, bounds: [0, count], min_interval: Math.min(4, count) })),
      });
      [plot.ygrid].flat()[0].grid_line_color = null;
      this.image = torchlens.source({ image: [], x: [], y: [], dw: [], dh: [] });
      plot.image_rgba({ ...torchlens.fields("image", "x", "y", "dw", "dh"), source: this.image });
      this.slow = torchlens.source({ left: [], right: [], bottom: [], top: [] });
      plot.quad({
        ...torchlens.fields("left", "right", "bottom", "top"), source: this.slow, fill_color: null,
        line_color: colours.slow_line, line_width: 1.5,
      });
      this.borders = torchlens.source({ x0: [], x1: [], y: [] });
      plot.segment({
        x0: { field: "x0" }, x1: { field: "x1" }, y0: { field: "y" }, y1: { field: "y" }, source: this.borders, line_color: colours.text,
      });
      this.box = this.stepBox(plot);
      this.cell = new Bokeh.BoxAnnotation({ fill_color: null, line_color: colours.text, line_width: 2, visible: false });
      plot.add_layout(this.cell);
      this.activate(plot);
      this.brush(plot);
      plot.on_event("tap", ({ x, y }) => { const at = this.at(x, y); if (at) this.page.view.set({ rank: at.rank, step: at.step }); });
      plot.on_event("mousemove", ({ x, y }) => this.hover(x, y));
      plot.on_event("mouseleave", () => this.tip.hide());
      for (const range of [this.range, this.rows]) {
        const changed = () => this.later();
        range.properties.start.change.connect(changed);
        range.properties.end.change.connect(changed);
      }
      return plot;
    }

    // Zooming changes both ends, and often: one picture for each frame is enough.
    later() {
      if (this.waits) return;
      this.waits = true;
      requestAnimationFrame(() => { this.waits = false; this.paint(); });
    }

    fill(changed) {
      const { steps, view } = this, has = (...keys) => keys.some((key) => changed.has(key));
      if (has("order", "group", "theme", "contents") || (changed.has("steps") && view.order === "slowness") || !this.order) {
        this.order = this.sorted();
        this.placeOf = new Map(this.order.map((row, at) => [row, at]));
        this.outline();
      }
      if (has("quantity", "theme", "contents") || this.scaleOf !== this.quantity) {
        this.scaleOf = this.quantity;
        this.scale = new torchlens.HeatScale(this.quantity, steps.values(this.quantity), this.colours);
        this.explain();
      }
      if (has("order", "group", "quantity", "theme", "contents") || (changed.has("steps") && view.order === "slowness")) this.paint();
      this.mark();
      this.say();
    }

    // The cells that are in sight.
    paint() {
      const { steps, order, range, rows } = this, count = order.length, values = steps.values(this.quantity);
      const from = steps.column(Math.max(steps.begin, Math.floor(range.start)));
      const until = steps.column(Math.min(steps.end - 1, Math.ceil(range.end))) + 1;
      const top = Math.max(0, Math.floor(count - rows.end)), bottom = Math.min(count, Math.ceil(count - rows.start));
      const most = { rows: this.height, columns: Math.max(60, this.width - this.left) };
      this.shown = { top, from, ...torchlens.heatPixels(values, steps.columns, order, [top, bottom], [from, until], most, this.scale) };
      const { pixels, height, width, down, across } = this.shown;
      const { ndarray } = Bokeh.require("core/util/ndarray"); // the one thing here that is not in Bokeh's documented interface
      this.image.data = {
        image: [ndarray(pixels.buffer, { dtype: "uint32", shape: [height, width] })], x: [steps.first[from]],
        y: [count - top - height * down], dw: [width * across * steps.width], dh: [height * down],
      };
      const room = Math.max(1, Math.ceil((LABEL_ROOM * (bottom - top)) / this.height)), ticks = [];
      for (let at = top; at < bottom; at++) if (at % room === 0) ticks.push(count - at - 0.5);
      this.ticker.ticks = ticks;
    }

    // Times of slowness, and lines between groups.
    outline() {
      const { steps, order } = this, count = order.length, slow = { left: [], right: [], bottom: [], top: [] }, borders = { x0: [], x1: [], y: [] };
      for (const { rank, since_step, until_step } of steps.slow) {
        const at = this.placeOf.get(steps.rowOf.get(rank));
        if (at === undefined) continue;
        slow.left.push(Math.max(since_step, steps.begin));
        slow.right.push(until_step ?? steps.end);
        slow.bottom.push(count - at - 1);
        slow.top.push(count - at);
      }
      for (let at = 1; at < count; at++) {
        if (this.groupOf(order[at]) === this.groupOf(order[at - 1])) continue;
        borders.x0.push(steps.begin);
        borders.x1.push(steps.end);
        borders.y.push(count - at);
      }
      this.slow.data = slow;
      this.borders.data = borders;
    }

    label(y) {
      const at = this.order.length - Math.floor(y) - 1, row = this.order[at];
      if (row === undefined) return "";
      const { rank } = this.steps.places[row], group = this.groupOf(row);
      if (this.isNarrow) return String(rank);
      return group === null ? `rank ${rank}` : `${torchlens.short(group, 15)} · ${rank}`;
    }

    // The cell whose value is seen at this place.
    at(x, y) {
      const { steps, shown } = this, count = this.order.length;
      if (!shown || !(x >= steps.begin && x < steps.end && y >= 0 && y < count)) return null;
      const down = Math.floor((count - y - shown.top) / shown.down), across = Math.floor((steps.column(x) - shown.from) / shown.across);
      if (down < 0 || down >= shown.height || across < 0 || across >= shown.width) return null;
      const index = (shown.height - 1 - down) * shown.width + across;
      const [row, column] = shown.down * shown.across > 1
        ? [shown.rows[index], shown.columns[index]] : [this.order[shown.top + down], steps.column(x)];
      const step = column === steps.column(x) ? Math.floor(x) : steps.first[column];
      return { row, column, rank: steps.places[row].rank, step };
    }

    hover(x, y) {
      const at = this.at(x, y);
      if (!at) { this.tip.hide(); return; }
      const { steps, shown } = this, { rank, host } = steps.places[at.row], flags = steps.flags[at.column];
      const first = steps.first[at.column];
      this.tip.show([
        `rank ${rank} on ${torchlens.short(host, 40)}, ${torchlens.steps(first, first + steps.width)}`,
        ...this.page.figures(at.row, at.column, this.quantity),
        ...(flags.length ? [`did: ${flags.join(", ")}`] : []),
        ...(shown.down > 1 ? [`the most of ${shown.down} ranks that share a line here`] : []),
      ]);
    }

    // Shows what is selected, without painting anew.
    mark() {
      const { steps, view, cell } = this, count = this.order.length;
      this.showSteps(this.box, ...(view.steps ?? [null, null]));
      const at = this.placeOf.get(steps.rowOf.get(view.rank)), hasStep = view.step !== null && view.step >= steps.begin && view.step < steps.end;
      const first = hasStep ? steps.first[steps.column(view.step)] : null;
      cell.visible = hasStep || at !== undefined;
      if (cell.visible) {
        cell.setv({
          left: hasStep ? first : steps.begin, right: hasStep ? first + steps.width : steps.end,
          bottom: at === undefined ? 0 : count - at - 1, top: at === undefined ? count : count - at,
        });
      }
    }

    // The legend of the quantity.
    explain() {
      const text = (value) => (this.scale.isShare && value === 0 ? "as the others" : torchlens.quantityText(this.quantity, value));
      const swatch = (colour) => {
        const made = torchlens.element("span", { className: "swatch" });
        if (colour === null) made.classList.add("unknown"); else made.style.background = torchlens.cssColour(colour);
        return made;
      };
      const entries = this.scale.legend(), last = entries.length - 1;
      this.legend.replaceChildren(...entries.map(([value, colour], at) => torchlens.element(
        "span", {}, swatch(colour), ` ${text(value)}${at === last ? " and more" : at === 0 && this.scale.isShare ? " and less" : ""}`,
      )), torchlens.element("span", {}, swatch(null), this.scale.isShare ? " not compared" : " not measured"));
    }

    // What is shown, and who is most above the others in the selected steps.
    say() {
      const { steps, view } = this, strong = torchlens.element("strong", { text: this.found }), words = [strong];
      if (view.steps) {
        const values = steps.values("excess"), range = steps.range(view.steps);
        let most = NaN, row = -1;
        for (let each = 0; each < steps.ranks; each++) {
          const mean = steps.mean(values, each, range);
          if (mean === mean && !(mean <= most)) { most = mean; row = each; }
        }
        const where = torchlens.steps(...this.page.whole(view.steps));
        words.push(torchlens.element("strong", {
          text: row < 0 ? ` In ${where} no rank was compared.`
            : ` In ${where}, rank ${steps.places[row].rank} is most above the others: ${torchlens.signed(most)} in the mean.`,
        }));
      }
      const mean = steps.width > 1 ? `the mean of ${steps.width} steps` : "one step";
      words.push(this.scale.isShare
        ? " Work beside the median of the other ranks that do the same."
        : ` ${torchlens.quantityWords(this.quantity)} of each rank: ${this.quantity.startsWith("device") ? "" : "by the host's clock, "}dark is little.`);
      words.push(` A cell is ${mean}. Drag to select steps, click to choose one.`);
      if (steps.slow.length) words.push(" Framed: named as slow.");
      this.words.replaceChildren(...words);
    }

    // -- the keyboard

    key(event) {
      const by = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1], Home: [-Infinity, 0], End: [Infinity, 0] }[event.key];
      if (event.ctrlKey || event.metaKey || event.altKey || !this.order) return;
      if (by) this.walk(by, event.shiftKey);
      else if (event.key === "Enter" && this.view.step !== null) this.page.openStep();
      else if (event.key === "Escape") this.page.clear();
      else if (event.key === "+" || event.key === "=") this.page.zoomBy(0.5);
      else if (event.key === "-") this.page.zoomBy(2);
      else if (event.key === "0") this.page.showAll();
      else return;
      event.preventDefault();
    }

    walk([across, down], extends_) {
      const { steps, view, order } = this, clamp = (value, most) => Math.max(0, Math.min(most, value));
      const at = this.placeOf.get(steps.rowOf.get(view.rank));
      const next = order[clamp(at === undefined ? 0 : at + down, order.length - 1)];
      const column = view.step === null ? 0 : clamp(steps.column(view.step) + across, steps.columns - 1);
      const step = steps.first[column], changes = { rank: steps.places[next].rank, step };
      if (extends_ && across) {
        const from = view.steps && this.anchor !== undefined ? this.anchor : view.step ?? step;
        this.anchor = from;
        changes.steps = [Math.min(from, step), Math.max(from, step) + steps.width];
      } else if (!extends_) this.anchor = undefined;
      this.page.view.set(changes);
      this.page.bringIntoZoom(step, step + steps.width);
    }
  }

  torchlens.Heat = Heat;
}
