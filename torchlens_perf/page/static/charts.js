// Charts of steps and ranks, drawn with BokehJS: https://docs.bokeh.org/en/latest/docs/user_guide/advanced/bokehjs.html.
// Each has draw(), and follows the view. Texts from outside only ever become text.
"use strict";

{
  const FLAG_MARKS = { checkpoint: "S", evaluation: "E", compile: "C", capture: "P", "garbage collection": "G" };
  const PART_COLORS = {
    data: "#b07aa1", forward: "#4e79a7", recompute: "#76b7b2", backward: "#59a14f", optimizer: "#edc948",
    communication: "#e15759", host: "#9c755f", tool: "#bab0ac",
  };
  const MAX_BARS = 32;

  torchlens.partColor = (part) => PART_COLORS[part] ?? "#79706e";

  torchlens.colors = () => {
    const style = getComputedStyle(document.body);
    const dark = torchlens.isDark();
    return {
      ink: style.color, paper: "rgba(0,0,0,0)", grid: dark ? "#3d444d" : "#d8dee4",
      line: dark ? "#58a6ff" : "#0969da", band: dark ? "#1f6feb" : "#54aeff", missing: dark ? "#2d333b" : "#eaeef2",
      slow: dark ? "#f85149" : "#cf222e", mark: dark ? "#d29922" : "#9a6700",
    };
  };
  torchlens.isDark = () => {
    const theme = document.documentElement.dataset.theme;
    return theme ? theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  };

  // The excess diverges from 0, which has the colour of the paper; all else goes from little to much.
  const DIVERGING_DARK = ["#58a6ff", "#4184d6", "#3168ab", "#264b77", "#1f3350", "#22272e", "#4f2a2a", "#7a3030", "#a83b36", "#d4483f", "#ff6a5e"];
  function palette(quantity) {
    if (quantity !== "excess") return Bokeh.Palettes.Viridis256;
    return torchlens.isDark() ? DIVERGING_DARK : Bokeh.Palettes.RdBu11;
  }

  torchlens.figure = (place, { width, height, ...options }) => {
    const colors = torchlens.colors();
    const figure = Bokeh.Plotting.figure({
      width, height, toolbar_location: "above", background_fill_color: colors.paper, border_fill_color: colors.paper,
      outline_line_color: colors.grid, ...options,
    });
    for (const axis of [...figure.xaxes ?? [], ...figure.yaxes ?? [], figure.xaxis, figure.yaxis].flat()) {
      if (!axis) continue;
      axis.axis_label_text_color = axis.major_label_text_color = colors.ink;
      axis.axis_line_color = axis.major_tick_line_color = axis.minor_tick_line_color = colors.grid;
      axis.axis_label_text_font_style = "normal";
    }
    for (const grid of [figure.xgrid, figure.ygrid].flat()) if (grid) grid.grid_line_color = colors.grid;
    figure.toolbar.logo = null;
    const brush = figure.toolbar.tools.find((tool) => tool instanceof Bokeh.BoxSelectTool);
    if (brush) figure.toolbar.active_drag = brush;
    return figure;
  };

  torchlens.show = async (figure, place) => {
    place.replaceChildren();
    await Bokeh.Plotting.show(figure, place);
  };

  // A line of text that follows the pointer.
  class Tip {
    constructor(place) {
      this.element = document.createElement("div");
      this.element.className = "tip";
      this.element.hidden = true;
      this.place = place;
      place.after(this.element);
      place.addEventListener("pointermove", (event) => { this.at = [event.clientX, event.clientY]; });
      place.addEventListener("pointerleave", () => this.hide());
    }

    show(lines) {
      this.element.replaceChildren(...lines.map((line) => {
        const row = document.createElement("div");
        row.textContent = line;
        return row;
      }));
      const [x, y] = this.at ?? [0, 0];
      this.element.hidden = false;
      const room = document.documentElement.clientWidth - this.element.offsetWidth - 8;
      this.element.style.left = `${Math.max(8, Math.min(x + 14, room))}px`;
      this.element.style.top = `${y + 14}px`;
    }

    hide() { this.element.hidden = true; }
  }
  torchlens.Tip = Tip;

  // -- ranks by steps

  class Heat {
    constructor(page, place) {
      this.page = page;
      this.place = place;
      this.tip = new Tip(place);
    }

    // Rows from the top: by rank or by slowness, within groups.
    rows() {
      const { steps, view } = this.page;
      const range = steps.range(view.now.steps);
      const slowness = new Map();
      if (view.now.order === "slowness") {
        const values = steps.values("excess");
        for (let row = 0; row < steps.ranks; row++) slowness.set(row, steps.mean(values, row, range) || 0);
      }
      const group = (row) => {
        const place = steps.places[row], by = view.now.group;
        return by === "node" ? place.host : by in place.mesh ? place.mesh[by] : "";
      };
      const rows = [...steps.places.keys()];
      const text = (one, other) => String(one).localeCompare(String(other), "en", { numeric: true });
      rows.sort((one, other) => text(group(one), group(other))
        || (slowness.get(other) ?? 0) - (slowness.get(one) ?? 0) || one - other);
      return rows.map((row) => ({ row, group: group(row) }));
    }

    async draw() {
      const { steps, view } = this.page;
      const quantity = steps.quantities.has(view.now.quantity) ? view.now.quantity : "excess";
      const values = steps.values(quantity), colors = torchlens.colors();
      this.order = this.rows();
      const count = this.order.length;
      const image = new Float32Array(values.length);
      let low = Infinity, high = -Infinity;
      const known = [];
      this.order.forEach(({ row }, at) => { // Bokeh's rows go up
        const line = values.subarray(row * steps.columns, (row + 1) * steps.columns);
        image.set(line, (count - 1 - at) * steps.columns);
        for (let column = 0; column < line.length; column += 1 + (line.length >> 8)) if (!Number.isNaN(line[column])) known.push(line[column]);
      });
      known.sort((one, other) => one - other);
      low = known[Math.floor(known.length * 0.01)] ?? 0;
      high = known[Math.ceil(known.length * 0.99) - 1] ?? 1;
      if (quantity === "excess") { high = Math.max(0.1, Math.abs(low), Math.abs(high)); low = -high; }
      const { ndarray } = Bokeh.require("core/util/ndarray");
      const mapper = new Bokeh.LinearColorMapper({
        palette: palette(quantity), low, high: high > low ? high : low + 1e-9, nan_color: colors.missing,
      });
      const height = Math.max(160, Math.min(620, 90 + count * (count > 64 ? 1 : 18)));
      const figure = torchlens.figure(this.place, {
        width: this.page.width(this.place), height, x_range: (this.range = this.page.range()), x_axis_label: "step",
        y_range: new Bokeh.Range1d({ start: 0, end: count, bounds: [0, count] }),
        tools: [new Bokeh.BoxSelectTool({ dimensions: "width", persistent: true }),
          new Bokeh.BoxZoomTool({ dimensions: "both" }), new Bokeh.PanTool({ dimensions: "both" }),
          new Bokeh.WheelZoomTool({ dimensions: "width" }), new Bokeh.ResetTool(), new Bokeh.SaveTool()],
      });
      figure.image({
        image: [ndarray(image.buffer, { dtype: "float32", shape: [count, steps.columns] })],
        x: steps.first[0], y: 0, dw: steps.end - steps.first[0], dh: count, color_mapper: mapper,
      });
      const axis = [figure.yaxis].flat()[0];
      const every = Math.max(1, Math.ceil(count / 32));
      const ticks = this.order.map((each, at) => at).filter((at) => at % every === 0);
      axis.ticker = new Bokeh.FixedTicker({ ticks: ticks.map((at) => count - at - 0.5), minor_ticks: [] });
      axis.major_label_overrides = new Map(ticks.map((at) => [count - at - 0.5, this.label(this.order[at])]));
      for (let at = 1; at < count; at++) {
        if (this.order[at].group !== this.order[at - 1].group) {
          figure.add_layout(new Bokeh.Span({ location: count - at, dimension: "width", line_color: colors.ink, line_width: 1.5 }));
        }
      }
      const format = quantity === "excess"
        ? new Bokeh.NumeralTickFormatter({ format: "0 %" }) : new Bokeh.NumeralTickFormatter({ format: "0.0000" });
      figure.add_layout(new Bokeh.ColorBar({
        color_mapper: mapper, width: 10, formatter: format, background_fill_color: colors.paper,
        major_label_text_color: colors.ink, title: quantity === "excess" ? "more work" : "s", title_text_color: colors.ink,
      }), "right");
      this.marked = {
        cell: new Bokeh.BoxAnnotation({ fill_color: null, line_color: colors.ink, line_width: 2, visible: false }),
        steps: new Bokeh.BoxAnnotation({ fill_color: colors.line, fill_alpha: 0.08, line_color: colors.line, visible: false }),
      };
      figure.add_layout(this.marked.cell);
      figure.add_layout(this.marked.steps);
      figure.on_event("selectiongeometry", (event) => {
        if (event.final && event.geometry.type === "rect") this.page.select(event.geometry.x0, event.geometry.x1);
      });
      figure.on_event("reset", () => view.set({ steps: null }));
      figure.on_event("tap", (event) => { const at = this.cell(event); if (at) view.set({ rank: at.rank, step: at.step }); });
      figure.on_event("mousemove", (event) => this.hover(this.cell(event)));
      await torchlens.show(figure, this.place);
      this.quantity = quantity;
      this.mark();
    }

    label({ row, group }) {
      const rank = `rank ${this.page.steps.places[row].rank}`;
      return this.page.view.now.group === "none" ? rank : `${torchlens.short(group, 18)} ${rank}`;
    }

    cell({ x, y }) {
      const { steps } = this.page, at = this.order.length - 1 - Math.floor(y);
      if (!(x >= steps.first[0] && x < steps.end) || at < 0 || at >= this.order.length) return null;
      const { row } = this.order[at];
      return { row, column: steps.column(Math.floor(x)), rank: steps.places[row].rank, step: Math.floor(x) };
    }

    hover(at) {
      if (!at) { this.tip.hide(); return; }
      const { steps } = this.page, place = steps.places[at.row], index = at.row * steps.columns + at.column;
      const flags = steps.flags[at.column];
      this.tip.show([
        `rank ${place.rank} on ${torchlens.short(place.host)}, ${this.stepsOf(at.column)}`,
        ...[...new Set([this.quantity, "step", "work"])].map(
          (each) => `${each}: ${torchlens.amount(each, steps.values(each)[index])}`),
        ...(flags.length ? [`in it: ${flags.join(", ")}`] : []),
      ]);
    }

    stepsOf(column) {
      const { steps } = this.page, first = steps.first[column];
      return steps.width === 1 ? `step ${first}` : `steps ${first} to ${first + steps.width - 1}`;
    }

    // Shows what is selected, without drawing anew.
    mark() {
      if (!this.marked) return;
      const { steps, view } = this.page, { rank, step } = view.now;
      const at = this.order.findIndex(({ row }) => steps.places[row].rank === rank);
      const { cell, steps: selected } = this.marked;
      if (step !== null) {
        const first = steps.first[steps.column(step)];
        Object.assign(cell, { left: first, right: first + steps.width });
        Object.assign(cell, at >= 0 ? { bottom: this.order.length - at - 1, top: this.order.length - at } : { bottom: 0, top: this.order.length });
      }
      cell.visible = step !== null;
      if (view.now.steps) Object.assign(selected, { left: view.now.steps[0], right: view.now.steps[1] });
      selected.visible = view.now.steps !== null;
    }
  }

  // -- how long steps took

  class StepTimes {
    constructor(page, place) {
      this.page = page;
      this.place = place;
      this.tip = new Tip(place);
    }

    async draw() {
      const { steps, view } = this.page, colors = torchlens.colors();
      const middle = steps.first.map((first) => first + steps.width / 2), bands = steps.bands;
      const top = Math.max(0, ...bands.p95_s.filter((value) => value !== null)) * 1.25 || 1;
      const figure = torchlens.figure(this.place, {
        width: this.page.width(this.place), height: 260, x_range: (this.range = this.page.range()), x_axis_label: "step", y_axis_label: "s",
        y_range: new Bokeh.Range1d({ start: 0, end: top }),
        tools: [new Bokeh.BoxSelectTool({ dimensions: "width", persistent: true }), new Bokeh.BoxZoomTool(),
          new Bokeh.PanTool(), new Bokeh.WheelZoomTool({ dimensions: "width" }), new Bokeh.ResetTool(), new Bokeh.SaveTool()],
      });
      const numbers = (values) => values.map((value) => value ?? NaN);
      const source = new Bokeh.ColumnDataSource({ data: {
        x: middle, low: numbers(bands.p5_s), high: numbers(bands.p95_s), middle: numbers(bands.p50_s), longest: numbers(bands.max_s),
      } });
      figure.varea({ x: { field: "x" }, y1: { field: "low" }, y2: { field: "high" }, source, fill_color: colors.band, fill_alpha: 0.35 });
      figure.line({ x: { field: "x" }, y: { field: "middle" }, source, line_color: colors.line, line_width: 1.5 });
      figure.scatter({ x: { field: "x" }, y: { field: "longest" }, source, size: 3, fill_color: colors.mark, line_color: null });
      for (const slow of steps.slow) {
        figure.add_layout(new Bokeh.BoxAnnotation({
          left: slow.since_step, right: slow.until_step ?? steps.end, fill_color: colors.slow, fill_alpha: 0.08, line_color: colors.slow,
        }));
      }
      const marks = steps.flags.map((flags, column) => [column, [...new Set(flags.map((flag) => FLAG_MARKS[flag]))].join("")])
        .filter(([, text]) => text);
      if (marks.length) {
        const at = new Bokeh.ColumnDataSource({ data: {
          x: marks.map(([column]) => middle[column]), y: marks.map(() => top * 0.94), text: marks.map(([, text]) => text),
        } });
        figure.text({ x: { field: "x" }, y: { field: "y" }, text: { field: "text" }, source: at, text_color: colors.mark, text_font_size: "11px", text_align: "center" });
      }
      this.marked = new Bokeh.Span({ location: 0, dimension: "height", line_color: colors.ink, line_dash: "dashed", visible: false });
      figure.add_layout(this.marked);
      figure.on_event("selectiongeometry", (event) => {
        if (event.final && event.geometry.type === "rect") this.page.select(event.geometry.x0, event.geometry.x1);
      });
      figure.on_event("reset", () => view.set({ steps: null }));
      figure.on_event("tap", ({ x }) => { if (x >= steps.first[0] && x < steps.end) view.set({ step: Math.floor(x) }); });
      figure.on_event("mousemove", ({ x }) => this.hover(x));
      await torchlens.show(figure, this.place);
      this.mark();
    }

    hover(x) {
      const { steps } = this.page;
      if (!(x >= steps.first[0] && x < steps.end)) { this.tip.hide(); return; }
      const column = steps.column(Math.floor(x)), bands = steps.bands, first = steps.first[column];
      this.tip.show([
        steps.width === 1 ? `step ${first}` : `steps ${first} to ${first + steps.width - 1}`,
        `median ${torchlens.duration(bands.p50_s[column])}, 95 % up to ${torchlens.duration(bands.p95_s[column])}, longest ${torchlens.duration(bands.max_s[column])}`,
        ...steps.slow.filter((slow) => slow.since_step <= x && x < (slow.until_step ?? steps.end)).map((slow) => `rank ${slow.rank} is slow in ${slow.phase}`),
        ...(steps.flags[column].length ? [`in it: ${steps.flags[column].join(", ")}`] : []),
      ]);
    }

    mark() {
      if (!this.marked) return;
      const { step } = this.page.view.now;
      if (step !== null) this.marked.location = step + 0.5;
      this.marked.visible = step !== null;
    }
  }

  // -- what steps are made of, by rank, in the selected steps

  class Phases {
    constructor(page, place) {
      this.page = page;
      this.place = place;
    }

    // The ranks with most work above the others first.
    chosen() {
      const { steps, view } = this.page, range = steps.range(view.now.steps), values = steps.values("excess");
      const rows = [...steps.places.keys()].map((row) => [row, steps.mean(values, row, range)]);
      rows.sort((one, other) => (Number.isNaN(other[1]) ? -1 : other[1]) - (Number.isNaN(one[1]) ? -1 : one[1]) || one[0] - other[0]);
      return rows.slice(0, MAX_BARS).map(([row]) => row);
    }

    async draw() {
      const { steps, view } = this.page, range = steps.range(view.now.steps), colors = torchlens.colors();
      const parts = steps.device_parts.size ? steps.device_parts : steps.parts, rows = this.chosen();
      const labels = rows.map((row) => `rank ${steps.places[row].rank}`).reverse();
      const figure = torchlens.figure(this.place, {
        width: this.page.width(this.place), height: 110 + 20 * rows.length, x_axis_label: "ms a step, mean",
        y_range: new Bokeh.FactorRange({ factors: labels }), tools: [new Bokeh.SaveTool()],
      });
      const left = new Map(labels.map((label) => [label, 0]));
      const items = [];
      for (const [part, values] of parts) {
        const data = { y: [], left: [], right: [] };
        for (const row of rows) {
          const label = `rank ${steps.places[row].rank}`, mean = steps.mean(values, row, range);
          if (!(mean > 0)) continue;
          data.y.push(label);
          data.left.push(left.get(label));
          left.set(label, left.get(label) + mean * 1e3);
          data.right.push(left.get(label));
        }
        const source = new Bokeh.ColumnDataSource({ data });
        const bars = figure.hbar({ y: { field: "y" }, left: { field: "left" }, right: { field: "right" }, source, height: 0.8, fill_color: torchlens.partColor(part), line_color: null });
        items.push(new Bokeh.LegendItem({ label: { value: part }, renderers: [bars] }));
      }
      figure.add_layout(new Bokeh.Legend({
        items, orientation: "horizontal", background_fill_color: colors.paper, border_line_color: null,
        label_text_color: colors.ink, ncols: matchMedia("(max-width: 600px)").matches ? 2 : 8,
      }), "above");
      await torchlens.show(figure, this.place);
      this.table(rows, parts, range);
    }

    // The same as a table, of the selected steps.
    table(rows, parts, range) {
      const { steps, view } = this.page;
      const head = ["rank", "more work", "step", "work", ...parts.keys()];
      const made = document.createElement("table");
      const caption = made.createCaption();
      const span = view.now.steps ? `steps ${view.now.steps[0]} to ${view.now.steps[1] - 1}` : "all steps";
      caption.textContent = `Means a step, ${span}${rows.length < steps.ranks ? `: the ${rows.length} ranks with most work of ${steps.ranks}` : ""}`;
      const titles = made.createTHead().insertRow();
      for (const text of head) {
        const cell = document.createElement("th");
        cell.scope = "col";
        cell.textContent = text;
        titles.append(cell);
      }
      const body = made.createTBody();
      for (const row of rows) {
        const line = body.insertRow();
        const name = document.createElement("th");
        name.scope = "row";
        name.textContent = String(steps.places[row].rank);
        line.append(name);
        const mean = (values) => steps.mean(values, row, range);
        line.insertCell().textContent = torchlens.percent(mean(steps.values("excess")));
        for (const values of [steps.step, steps.work, ...parts.values()]) line.insertCell().textContent = torchlens.duration(mean(values));
      }
      const around = document.createElement("div");
      around.className = "scrolls selected-ranks";
      around.tabIndex = 0;
      around.setAttribute("role", "region");
      around.setAttribute("aria-label", "ranks in the selected steps");
      around.append(made);
      const figure = this.place.closest("figure");
      figure.parentElement.querySelector(".selected-ranks")?.remove();
      figure.after(around);
      torchlens.sortable(made);
    }

    mark() {}
  }

  Object.assign(torchlens, { Heat, StepTimes, Phases });
}
