// Modules by rank, memory and telemetry over time.
"use strict";

{
  const MAX_MODULES = 20, MAX_SERIES = 12;
  const LINES = ["#4e79a7", "#f28e2b", "#e15759", "#76b7b2", "#59a14f", "#edc948", "#b07aa1", "#ff9da7", "#9c755f", "#bab0ac", "#2f4b7c", "#a05195"];

  // Each rank's own time in a module: a dot a rank, the median a bar. A slow rank is a dot apart.
  class Modules {
    constructor(page, place) {
      this.page = page;
      this.place = place;
      this.tip = new torchlens.Tip(place);
    }

    async draw() {
      const colors = torchlens.colors();
      const modules = [...this.page.contents.report.modules]
        .sort((one, other) => other.own_s_per_step - one.own_s_per_step).slice(0, MAX_MODULES).reverse();
      if (!modules.length) return;
      const labels = modules.map((each, at) => `${torchlens.short(each.name, 32)}${"\u200b".repeat(at)}`); // factors must differ
      const dots = { x: [], y: [], rank: [], color: [] }, bars = { y: [], x: [] };
      modules.forEach((each, at) => {
        const found = Object.entries(each.by_rank).map(([rank, seconds]) => [Number(rank), seconds * 1e3]);
        const sorted = found.map(([, value]) => value).sort((one, other) => one - other);
        const middle = sorted[sorted.length >> 1] ?? 0;
        bars.y.push(labels[at]);
        bars.x.push(middle);
        for (const [rank, value] of found) {
          dots.x.push(value);
          dots.y.push(labels[at]);
          dots.rank.push(rank);
          dots.color.push(value > 1.1 * middle && found.length > 1 ? colors.slow : colors.ink);
        }
      });
      const figure = torchlens.figure(this.place, {
        width: this.page.width(this.place), height: 90 + 22 * labels.length, x_axis_label: "ms a step, own",
        y_range: new Bokeh.FactorRange({ factors: labels }), tools: [new Bokeh.SaveTool()],
      });
      figure.hbar({ y: { field: "y" }, right: { field: "x" }, left: 0, height: 0.7, fill_color: colors.band, fill_alpha: 0.4, line_color: null, source: new Bokeh.ColumnDataSource({ data: bars }) });
      figure.scatter({ x: { field: "x" }, y: { field: "y" }, size: 5, fill_color: { field: "color" }, line_color: null, source: new Bokeh.ColumnDataSource({ data: dots }) });
      figure.on_event("mousemove", ({ x, sx }) => this.hover(dots, x, (dots.x.length && Math.max(...dots.x) / 100) || 0, sx));
      await torchlens.show(figure, this.place);
    }

    hover(dots, x, near) {
      const found = dots.x.map((value, at) => at).filter((at) => Math.abs(dots.x[at] - x) <= near);
      if (!found.length) { this.tip.hide(); return; }
      this.tip.show(found.slice(0, 6).map((at) => `rank ${dots.rank[at]}, ${dots.y[at].replaceAll("\u200b", "")}: ${torchlens.duration(dots.x[at] / 1e3)} a step`));
    }

    mark() {}
  }

  function lines(page, place, series, label, height = 260) {
    const figure = torchlens.figure(place, {
      width: page.width(place), height, x_axis_label: "s since the first step", y_axis_label: label,
      tools: [new Bokeh.PanTool(), new Bokeh.BoxZoomTool(), new Bokeh.WheelZoomTool({ dimensions: "width" }), new Bokeh.ResetTool(), new Bokeh.SaveTool()],
    });
    const items = series.map(({ where, x, y }, at) => {
      const source = new Bokeh.ColumnDataSource({ data: { x, y: y.map((value) => value ?? NaN) } });
      const line = figure.line({ x: { field: "x" }, y: { field: "y" }, source, line_color: LINES[at % LINES.length], line_width: 1.5 });
      return new Bokeh.LegendItem({ label: { value: torchlens.short(where, 32) }, renderers: [line] });
    });
    figure.add_layout(new Bokeh.Legend({ items, background_fill_color: torchlens.colors().paper, border_line_color: null, label_text_color: torchlens.colors().ink, click_policy: "hide", label_text_font_size: "11px" }), "right");
    return figure;
  }

  // The ranks with most memory.
  class Memory {
    constructor(page, place) {
      this.page = page;
      this.place = place;
    }

    async draw() {
      const { steps } = this.page;
      if (!steps?.memory_bytes) return;
      const groups = steps.memory_bytes[0]?.length ?? 0;
      const at = Array.from({ length: groups }, (_, group) => steps.started_s[Math.floor(group * steps.columns / groups)] ?? NaN);
      const series = steps.memory_bytes.map((values, row) => ({ where: `rank ${steps.places[row].rank}`, x: at, y: values.map((value) => (value === null ? NaN : value / 1e9)) }));
      const largest = (values) => Math.max(-Infinity, ...values.filter((value) => !Number.isNaN(value)));
      series.sort((one, other) => largest(other.y) - largest(one.y));
      await torchlens.show(lines(this.page, this.place, series.slice(0, MAX_SERIES), "GB"), this.place);
    }

    mark() {}
  }

  // One quantity at a time.
  class Telemetry {
    constructor(page, place) {
      this.page = page;
      this.place = place;
      this.title = null;
    }

    async draw() {
      const all = this.page.contents.telemetry, titles = [...new Set(all.map((each) => each.title))];
      if (!titles.length) return;
      if (!titles.includes(this.title)) this.title = titles[0];
      const figure = this.place.closest("figure");
      let select = figure.querySelector("select");
      if (!select) {
        const label = document.createElement("label");
        label.textContent = "Quantity ";
        select = document.createElement("select");
        select.addEventListener("change", () => { this.title = select.value; this.draw(); });
        label.append(select);
        figure.prepend(label);
      }
      select.replaceChildren(...titles.map((title) => {
        const option = document.createElement("option");
        option.value = option.textContent = torchlens.short(title);
        option.value = title;
        option.selected = title === this.title;
        return option;
      }));
      const series = all.filter((each) => each.title === this.title).slice(0, MAX_SERIES);
      await torchlens.show(lines(this.page, this.place, series.map((each) => ({ where: each.where, x: each.time_s, y: each.value })), series[0].unit), this.place);
    }

    mark() {}
  }

  Object.assign(torchlens, { Modules, Memory, Telemetry });
}
