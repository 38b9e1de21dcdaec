// One step: all ranks beside each other, what each did when, on the host and on the device, and who waited for whom.
"use strict";

{
  const KIND_COLORS = {
    data: "#b07aa1", forward: "#4e79a7", recompute: "#76b7b2", backward: "#59a14f", optimizer: "#edc948", wait: "#e15759",
    module: "#86bcb6", module_backward: "#8cd17d", section: "#ff9da7", collective: "#f28e2b", device: "#79706e",
  };
  const LANE_GAP = 0.35, MAX_DEPTH = 6;

  class Timeline {
    constructor(page, place) {
      this.page = page;
      this.place = place;
      this.tip = new torchlens.Tip(place);
      this.fetched = new Map(); // on the live page: steps that the file does not hold
    }

    steps() { return [...this.page.contents.traces.steps, ...this.fetched.values()]; }

    // The recorded step that is nearest to the chosen one; the first in the page where none is chosen.
    trace() {
      const wanted = this.page.view.now.step, all = this.steps();
      if (!all.length) return null;
      if (wanted === null) return all[0];
      return all.reduce((best, each) => (Math.abs(each.step - wanted) < Math.abs(best.step - wanted) ? each : best));
    }

    // On the live page any step can be asked for; a file has what it has.
    async fetch(step) {
      if (!this.page.isLive || this.steps().some((each) => each.step === step)) return;
      try {
        const answer = await fetch(`api/step/${step}`);
        if (!answer.ok) return;
        const { names, steps: [trace] } = await answer.json();
        if (!trace) return;
        const offset = this.page.contents.traces.names.length;
        this.page.contents.traces.names.push(...names);
        for (const rank of trace.ranks) for (const row of rank.rows) row.name = row.name.map((name) => name + offset);
        this.fetched.set(step, trace);
      } catch { /* the server is gone: the nearest step that is here is shown, which the caption says */ }
    }

    async draw() {
      const wanted = this.page.view.now.step;
      if (wanted !== null) await this.fetch(wanted);
      const trace = this.trace();
      this.picker();
      if (!trace) return;
      const colors = torchlens.colors(), names = this.page.contents.traces.names;
      const culprit = this.culprit(trace);
      const columns = { left: [], right: [], bottom: [], top: [], color: [], edge: [], at: [] };
      this.spans = [];
      const ticks = [];
      let y = 0;
      for (const rank of trace.ranks) {
        const offset_ms = (rank.offset_us ?? 0) / 1e3;
        for (const row of rank.rows) {
          const depths = row.depth.map((depth) => Math.min(depth, MAX_DEPTH)), lowest = Math.min(...depths, MAX_DEPTH);
          const levels = Math.max(1, Math.max(...depths, 0) - lowest + 1);
          ticks.push([-(y + levels / 2), `rank ${rank.rank}${rank.rank === culprit ? " \u25c0 waited for" : ""}${row.lane === "host" ? "" : ` ${torchlens.short(row.lane, 12)}`}`]);
          row.start_us.forEach((start_us, at) => {
            const top = y + depths[at] - lowest, begin = offset_ms + start_us / 1e3;
            columns.left.push(begin);
            columns.right.push(begin + row.duration_us[at] / 1e3);
            columns.top.push(-top - 0.04);
            columns.bottom.push(-top - 0.96);
            columns.color.push(KIND_COLORS[row.kind[at]] ?? "#bab0ac");
            columns.edge.push(row.kind[at] === "wait" ? colors.slow : colors.grid);
            columns.at.push(this.spans.length);
            this.spans.push({ rank: rank.rank, lane: row.lane, kind: row.kind[at], name: names[row.name[at]] ?? "", start_us, duration_us: row.duration_us[at] });
          });
          y += levels + LANE_GAP;
        }
        y += LANE_GAP;
      }
      const end = Math.max(1e-3, ...trace.ranks.map((rank) => ((rank.offset_us ?? 0) + rank.duration_us) / 1e3), ...columns.right);
      const figure = torchlens.figure(this.place, {
        width: this.page.width(this.place), height: Math.max(180, Math.min(900, 90 + 15 * y)), x_axis_label: "ms since the first rank began the step",
        x_range: new Bokeh.Range1d({ start: Math.min(0, ...columns.left), end, bounds: [Math.min(0, ...columns.left), end] }),
        y_range: new Bokeh.Range1d({ start: -y, end: 0 }),
        tools: [new Bokeh.PanTool({ dimensions: "width" }), new Bokeh.BoxZoomTool({ dimensions: "width" }),
          new Bokeh.WheelZoomTool({ dimensions: "width" }), new Bokeh.ResetTool(), new Bokeh.SaveTool()],
      });
      const source = new Bokeh.ColumnDataSource({ data: columns });
      figure.quad({
        left: { field: "left" }, right: { field: "right" }, bottom: { field: "bottom" }, top: { field: "top" },
        fill_color: { field: "color" }, line_color: { field: "edge" }, line_width: 0.5, source,
      });
      const axis = [figure.yaxis].flat()[0];
      axis.ticker = new Bokeh.FixedTicker({ ticks: ticks.map(([at]) => at), minor_ticks: [] });
      axis.major_label_overrides = new Map(ticks);
      this.columns = columns;
      figure.on_event("mousemove", ({ x, y: height }) => this.hover(x, height));
      await torchlens.show(figure, this.place);
      this.caption(trace);
      this.waits(trace);
    }

    // The rank that the others have waited for longest in this step: last at collectives, by their waits.
    culprit(trace) {
      const waits = new Map();
      for (const each of trace.collectives) {
        if (each.last_rank === null) continue;
        const all = Object.values(each.wait_us).filter((value) => value !== null);
        waits.set(each.last_rank, (waits.get(each.last_rank) ?? 0) + Math.max(0, ...all));
      }
      return [...waits].sort(([, one], [, other]) => other - one)[0]?.[0] ?? null;
    }

    hover(x, y) {
      const { left, right, bottom, top } = this.columns;
      let found = -1; // the shortest that is here
      for (let at = 0; at < left.length; at++) {
        if (left[at] <= x && x <= right[at] && bottom[at] <= y && y <= top[at]
          && (found < 0 || right[at] - left[at] < right[found] - left[found])) found = at;
      }
      if (found < 0) { this.tip.hide(); return; }
      const span = this.spans[found];
      this.tip.show([
        `rank ${span.rank}, ${span.kind} ${torchlens.short(span.name)}`,
        `${torchlens.duration(span.duration_us / 1e6)}, from ${torchlens.duration(span.start_us / 1e6)} on (${torchlens.short(span.lane, 12)})`,
      ]);
    }

    // Which recorded steps there are, and why each is here.
    picker() {
      const figure = this.place.closest("figure");
      let select = figure.querySelector("select.step-picker");
      if (!select) {
        const label = document.createElement("label");
        label.textContent = "Step ";
        select = document.createElement("select");
        select.className = "step-picker";
        select.addEventListener("change", () => this.page.view.set({ step: Number(select.value) }));
        label.append(select);
        figure.prepend(label);
        this.said = document.createElement("p");
        this.said.className = "said";
        this.said.setAttribute("role", "status");
        label.after(this.said);
      }
      const shown = this.trace()?.step;
      select.replaceChildren(...this.steps().sort((one, other) => one.step - other.step).map((each) => {
        const option = document.createElement("option");
        option.value = String(each.step);
        option.textContent = torchlens.short(`${each.step}: ${each.why}`, 80);
        option.selected = each.step === shown;
        return option;
      }));
    }

    caption(trace) {
      const wanted = this.page.view.now.step, said = [];
      if (wanted !== null && wanted !== trace.step) said.push(`Step ${wanted} is not in this page span by span; the nearest that is, is step ${trace.step}.`);
      if (trace.ranks_left_out) said.push(`${trace.ranks_left_out} ranks are left out.`);
      if (trace.clock) said.push(trace.clock);
      this.said.textContent = said.join(" ");
    }

    // Who arrived last at each collective, and how long the others waited.
    waits(trace) {
      const figure = this.place.closest("figure");
      figure.parentElement.querySelector(".collective-waits")?.remove();
      if (!trace.collectives.length) return;
      const made = document.createElement("table");
      made.createCaption().textContent = `Step ${trace.step}: collectives, and who waited`;
      const titles = made.createTHead().insertRow();
      for (const text of ["collective", "group", "number", "last rank", "longest wait", "waits of ranks, sum"]) {
        const cell = document.createElement("th");
        cell.scope = "col";
        cell.textContent = text;
        titles.append(cell);
      }
      const body = made.createTBody();
      const waits = (each) => Object.values(each.wait_us).filter((value) => value !== null);
      const by = [...trace.collectives].sort((one, other) => Math.max(0, ...waits(other)) - Math.max(0, ...waits(one)));
      for (const each of by.slice(0, 40)) {
        const line = body.insertRow(), all = waits(each);
        const known = (value) => (all.length ? torchlens.duration(value / 1e6) : "not known");
        for (const text of [torchlens.short(each.name), torchlens.short(each.group, 24), each.number,
          each.last_rank ?? "not known", known(Math.max(0, ...all)), known(all.reduce((sum, value) => sum + value, 0))]) {
          line.insertCell().textContent = String(text);
        }
      }
      const around = document.createElement("div");
      around.className = "scrolls collective-waits";
      around.tabIndex = 0;
      around.setAttribute("role", "region");
      around.setAttribute("aria-label", "collectives of the step");
      around.append(made);
      figure.after(around);
      torchlens.sortable(made);
    }

    mark() {}
  }

  torchlens.Timeline = Timeline;
}
