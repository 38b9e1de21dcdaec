// Ranks by steps: any quantity, grouped and ordered; brushed, zoomed, and walked through by the keyboard.
{
  const { signed, short, element, source, fields } = torchlens;
  const ROW = 14;
  const MOST_HEIGHT = 560;
  const LABEL_ROOM = 13;

  class Heat extends torchlens.Chart {
    static FOLLOWS = ["group", "quantity", "order", "steps", "step", "rank"];

    constructor(page, figure) {
      super(page, figure);
      this.controls = element("div");
      this.place.before(this.controls);
      this.legend = element("div", { className: "scale" });
      this.words = element("p", { className: "chart-words" });
      this.place.after(this.legend);
      figure.classList.add("own-words");
      figure.append(this.words);
      this.renewed();
      torchlens.heatKeys(page, this);
    }

    renewed() {
      this.found = this.figure.querySelector("figcaption strong")?.textContent ?? "";
      const controls = this.page.heatControls();
      this.controls.replaceWith(controls);
      this.controls = controls;
    }

    shape() {
      return `${this.steps.ranks} ${this.steps.width} ${this.view.group === "none"}`;
    }

    get quantity() {
      return this.steps.quantities.has(this.view.quantity) ? this.view.quantity : "excess";
    }

    // Of a row: its node, or its coordinate in a dimension of the mesh.
    groupOf(row) {
      const { group } = this.view;
      const place = this.steps.places[row];
      if (group === "node") return place.host;
      const dimension = group.startsWith("mesh ") ? group.slice(5) : null;
      if (dimension === null) return null;
      return Object.hasOwn(place.mesh, dimension) ? `${dimension} ${place.mesh[dimension]}` : `no ${dimension}`;
    }

    // Rows from the top, by rank or by the mean of what they have more of, inside of their groups.
    sorted() {
      const { steps, view } = this;
      const rows = Array.from(steps.places.keys());
      const groups = rows.map((row) => this.groupOf(row));
      const means = new Float64Array(rows.length);
      if (view.order === "slowness") {
        const values = steps.values("excess");
        const range = steps.range(view.steps);
        for (const row of rows) means[row] = steps.mean(values, row, range);
      }
      const less = (value) => (value === value ? value : -Infinity);
      return rows.sort(
        (one, other) =>
          (groups[one] === groups[other] ? 0 : torchlens.compare(groups[one], groups[other])) ||
          less(means[other]) - less(means[one]) ||
          0 ||
          one - other,
      );
    }

    build() {
      const { steps, colours } = this;
      const count = steps.ranks;
      this.height = Math.min(MOST_HEIGHT, Math.max(60, ROW * count));
      this.ticker = new Bokeh.FixedTicker({ ticks: [], minor_ticks: [] });
      const [select, zoom] = this.brushTools();
      zoom.dimensions = "both";
      const left = this.view.group === "none" || this.isNarrow ? this.left : 168;
      const plot = this.plotOf({
        height: this.height + 52,
        left,
        xLabel: steps.width > 1 ? `step; a column is ${steps.width} steps` : "step",
        xText: String,
        yText: (y) => this.label(y),
        yTicker: this.ticker,
        xTicker: this.stepTicks(),
        tools: [select, zoom],
        x_range: this.stepRange(),
        y_range: (this.rows = new Bokeh.Range1d({
          start: 0,
          end: count,
          bounds: [0, count],
          min_interval: Math.min(4, count),
        })),
      });
      plot.ygrid.grid_line_color = null;
      this.image = source({ image: [], x: [], y: [], dw: [], dh: [] });
      plot.image_rgba({ ...fields("image", "x", "y", "dw", "dh"), source: this.image });
      this.slow = source({ left: [], right: [], bottom: [], top: [] });
      plot.quad({
        ...fields("left", "right", "bottom", "top"),
        source: this.slow,
        fill_color: null,
        line_color: colours.slow_line,
        line_width: 1.5,
      });
      this.borders = source({ x0: [], x1: [], y: [] });
      plot.segment({
        x0: { field: "x0" },
        x1: { field: "x1" },
        y0: { field: "y" },
        y1: { field: "y" },
        source: this.borders,
        line_color: colours.text,
      });
      this.box = this.stepBox(plot);
      this.cell = new Bokeh.BoxAnnotation({
        fill_color: null,
        line_color: colours.text,
        line_width: 2,
        visible: false,
      });
      plot.add_layout(this.cell);
      this.activate(plot);
      this.brush(plot);
      plot.on_event("tap", ({ x, y }) => {
        const at = this.at(x, y);
        if (at) this.page.view.set({ rank: at.rank, step: at.step });
      });
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
      requestAnimationFrame(() => {
        this.waits = false;
        this.paint();
      });
    }

    fill(changed) {
      const { steps, view } = this;
      const has = (...keys) => keys.some((key) => changed.has(key));
      if (
        has("order", "group", "theme", "contents") ||
        (changed.has("steps") && view.order === "slowness") ||
        !this.order
      ) {
        this.order = this.sorted();
        this.placeOf = new Map(this.order.map((row, at) => [row, at]));
        this.outline();
      }
      if (has("quantity", "theme", "contents") || this.scaleOf !== this.quantity) {
        this.scaleOf = this.quantity;
        this.scale = new torchlens.HeatScale(this.quantity, steps.values(this.quantity), this.colours);
        this.explain();
      }
      if (
        has("order", "group", "quantity", "theme", "contents") ||
        (changed.has("steps") && view.order === "slowness")
      ) {
        this.paint();
      }
      this.mark();
      this.say();
    }

    // The cells that are in sight.
    paint() {
      const { steps, order, range, rows } = this;
      const count = order.length;
      const values = steps.values(this.quantity);
      const from = steps.column(Math.max(steps.begin, Math.floor(range.start)));
      const until = steps.column(Math.min(steps.end - 1, Math.ceil(range.end))) + 1;
      const top = Math.max(0, Math.floor(count - rows.end));
      const bottom = Math.min(count, Math.ceil(count - rows.start));
      const most = { rows: this.height, columns: Math.max(60, this.width - this.left) };
      this.shown = {
        top,
        from,
        ...torchlens.heatPixels(values, steps.columns, order, [top, bottom], [from, until], most, this.scale),
      };
      const { pixels, height, width, down, across } = this.shown;
      const { ndarray } = Bokeh.require("core/util/ndarray"); // the one thing here that Bokeh does not document
      this.image.data = {
        image: [ndarray(pixels.buffer, { dtype: "uint32", shape: [height, width] })],
        x: [steps.first[from]],
        y: [count - top - height * down],
        dw: [width * across * steps.width],
        dh: [height * down],
      };
      const room = Math.max(1, Math.ceil((LABEL_ROOM * (bottom - top)) / this.height));
      const ticks = [];
      for (let at = top; at < bottom; at++) if (at % room === 0) ticks.push(count - at - 0.5);
      this.ticker.ticks = ticks;
    }

    // Times of slowness, and lines between groups.
    outline() {
      const { steps, order } = this;
      const count = order.length;
      const slow = { left: [], right: [], bottom: [], top: [] };
      const borders = { x0: [], x1: [], y: [] };
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
      const at = this.order.length - Math.floor(y) - 1;
      const row = this.order[at];
      if (row === undefined) return "";
      const { rank } = this.steps.places[row];
      const group = this.groupOf(row);
      if (this.isNarrow) return String(rank);
      return group === null ? `rank ${rank}` : `${short(group, 15)} · ${rank}`;
    }

    // The cell whose value is seen at this place.
    at(x, y) {
      const { steps, shown } = this;
      const count = this.order.length;
      if (!shown || !(x >= steps.begin && x < steps.end && y >= 0 && y < count)) return null;
      const down = Math.floor((count - y - shown.top) / shown.down);
      const across = Math.floor((steps.column(x) - shown.from) / shown.across);
      if (down < 0 || down >= shown.height || across < 0 || across >= shown.width) return null;
      const index = (shown.height - 1 - down) * shown.width + across;
      const [row, column] =
        shown.down * shown.across > 1
          ? [shown.rows[index], shown.columns[index]]
          : [this.order[shown.top + down], steps.column(x)];
      const step = column === steps.column(x) ? Math.floor(x) : steps.first[column];
      return { row, column, rank: steps.places[row].rank, step };
    }

    hover(x, y) {
      const at = this.at(x, y);
      if (!at) {
        this.tip.hide();
        return;
      }
      const { steps, shown } = this;
      const { rank, host } = steps.places[at.row];
      const flags = steps.flags[at.column];
      const first = steps.first[at.column];
      this.tip.show([
        `rank ${rank} on ${short(host, 40)}, ${torchlens.steps(first, first + steps.width)}`,
        ...this.page.figures(at.row, at.column, this.quantity),
        ...(flags.length ? [`did: ${flags.join(", ")}`] : []),
        ...(shown.down > 1 ? [`the most of ${shown.down} ranks that share a line here`] : []),
      ]);
    }

    // Shows what is selected, without painting anew.
    mark() {
      const { steps, view, cell } = this;
      const count = this.order.length;
      this.showSteps(this.box, ...(view.steps ?? [null, null]));
      const at = this.placeOf.get(steps.rowOf.get(view.rank));
      const hasStep = view.step !== null && view.step >= steps.begin && view.step < steps.end;
      const first = hasStep ? steps.first[steps.column(view.step)] : null;
      cell.visible = hasStep || at !== undefined;
      if (cell.visible) {
        cell.setv({
          left: hasStep ? first : steps.begin,
          right: hasStep ? first + steps.width : steps.end,
          bottom: at === undefined ? 0 : count - at - 1,
          top: at === undefined ? count : count - at,
        });
      }
    }

    // The legend of the quantity.
    explain() {
      const text = (value) =>
        value !== 0 ? torchlens.quantityText(this.quantity, value) : this.scale.isShare ? "as the others" : "0";
      const swatch = (colour) => {
        const made = element("span", { className: "swatch" });
        if (colour === null) made.classList.add("unknown");
        else made.style.background = torchlens.cssColour(colour);
        return made;
      };
      const entries = this.scale.legend();
      const last = entries.length - 1;
      this.legend.replaceChildren(
        ...entries.map(([value, colour], at) =>
          element(
            "span",
            {},
            swatch(colour),
            ` ${text(value)}${at === last ? " and more" : at === 0 && this.scale.isShare ? " and less" : ""}`,
          ),
        ),
        element("span", {}, swatch(null), this.scale.isShare ? " not compared" : " not measured"),
      );
    }

    // What is shown, and who is most above the others in the selected steps.
    say() {
      const { steps, view, quantity } = this;
      const words = [element("strong", { text: this.found })];
      if (view.steps) words.push(element("strong", { text: ` ${this.selectedWords()}` }));
      const clock = quantity.startsWith("device ") ? "device" : "host";
      words.push(
        this.scale.isShare
          ? " Work beside the median of the other ranks that do the same."
          : ` By the ${clock}'s clock, ${torchlens.partWord(quantity.replace("device ", ""))}: dark is little.`,
        ` A cell is ${steps.width > 1 ? `the mean of ${steps.width} steps` : "one step"}.`,
        " Drag to select steps, click to choose one.",
        steps.slow.length ? " Framed: named as slow." : "",
      );
      this.words.replaceChildren(...words);
    }

    selectedWords() {
      const { steps, view } = this;
      const values = steps.values("excess");
      const range = steps.range(view.steps);
      const where = torchlens.steps(...this.page.whole(view.steps));
      let most = NaN;
      let highest = -1;
      for (let row = 0; row < steps.ranks; row++) {
        const mean = steps.mean(values, row, range);
        if (mean === mean && !(mean <= most)) {
          most = mean;
          highest = row;
        }
      }
      if (highest < 0) return `In ${where} no rank was compared.`;
      const { rank } = steps.places[highest];
      return `In ${where}, rank ${rank} is most above the others: ${signed(most)} in the mean.`;
    }
  }

  torchlens.Heat = Heat;
}
