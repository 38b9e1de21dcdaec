// What all charts are made of: colours from the page's style, BokehJS figures in its looks, a tip, and their life.
// https://docs.bokeh.org/en/latest/docs/user_guide/advanced/bokehjs.html
{
  const COLOURS = [
    "ground",
    "raised",
    "text",
    "dim",
    "rule",
    "link",
    "bad",
    "median",
    "band",
    "thin",
    "slow",
    "slow-line",
    "in-span",
    "mark",
    "data",
    "forward",
    "recompute",
    "backward",
    "optimizer",
    "communication",
    "host",
    "tool",
    "module",
    "module-backward",
    "section",
    "collective",
    "more",
    "less",
    "unknown",
  ];
  const NARROW = 560;
  const NEAR = "600px"; // of what is seen: charts there are drawn

  torchlens.colours = () => {
    const style = getComputedStyle(document.documentElement);
    return Object.fromEntries(
      COLOURS.map((name) => [name.replace("-", "_"), style.getPropertyValue(`--${name}`).trim()]),
    );
  };

  // Ticks as text. Texts of Bokeh's own interface may be TeX, for which it asks a server: these are plain.
  torchlens.plainTicks = (text) => {
    const formatter = new Bokeh.BasicTickFormatter();
    formatter.doFormat = (ticks) => Array.from(ticks, (tick) => (Math.abs(tick) < 1e-15 ? text(0) : text(tick)));
    return formatter;
  };

  torchlens.source = (data) => new Bokeh.ColumnDataSource({ data });
  torchlens.fields = (...names) => Object.fromEntries(names.map((name) => [name, { field: name }]));

  const fontOf = () => getComputedStyle(document.body).fontFamily;

  // Whether white is to be read better on it than black; "#rrggbb".
  torchlens.isDark = (colour) => {
    const found = /^#([0-9a-f]{2})([0-9a-f]{2})([0-9a-f]{2})/i.exec(colour);
    if (!found) return false;
    const [red, green, blue] = found.slice(1).map((part) => (parseInt(part, 16) / 255) ** 2.2);
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue < 0.19;
  };

  // Lines of text at the pointer.
  class Tip {
    constructor(place) {
      this.element = torchlens.element("div", { className: "tip", "aria-hidden": "true" });
      this.element.hidden = true;
      place.after(this.element);
      place.addEventListener(
        "pointermove",
        (event) => {
          this.at = [event.clientX, event.clientY];
        },
        true,
      );
      place.addEventListener(
        "pointerdown",
        (event) => {
          this.at = [event.clientX, event.clientY];
        },
        true,
      );
      place.addEventListener("pointerleave", () => this.hide());
      addEventListener("scroll", () => this.hide(), { passive: true });
    }

    show(lines) {
      this.element.replaceChildren(...lines.map((text) => torchlens.element("div", { text })));
      this.element.hidden = false;
      const [x, y] = this.at ?? [0, 0];
      const { offsetWidth: width, offsetHeight: height } = this.element;
      const { clientWidth, clientHeight } = document.documentElement;
      this.element.style.left = `${Math.max(8, x + 14 + width > clientWidth - 8 ? x - width - 14 : x + 14)}px`;
      this.element.style.top = `${Math.max(8, y + 14 + height > clientHeight - 8 ? y - height - 14 : y + 14)}px`;
    }

    hide() {
      this.element.hidden = true;
    }
  }

  // Bokeh's own elements inside of shadow roots, by class.
  function within(root, name) {
    for (const element of root.querySelectorAll("*")) {
      if (element.classList.contains(name)) return element;
      const found = element.shadowRoot && within(element.shadowRoot, name);
      if (found) return found;
    }
    return null;
  }

  // One chart in the place of a picture. A subclass has build(), which returns a Bokeh figure, or null where there is
  // nothing to show; fill(changed), which puts data and selection into it, upon changes of the view's keys in FOLLOWS;
  // and shape(), a text: where that has changed, it is built anew.
  class Chart {
    static FOLLOWS = [];

    constructor(page, figure) {
      this.page = page;
      this.figure = figure;
      this.place = torchlens.element("div", { className: "chart" });
      const picture = figure.querySelector(":scope > .picture, :scope > svg");
      if (picture) picture.before(this.place);
      else figure.prepend(this.place);
      this.tip = new Tip(this.place);
      this.asked = new Set(["theme"]); // what has changed since it was drawn
      this.isNear = false;
      this.observer = new IntersectionObserver(
        ([entry]) => {
          this.isNear = entry.isIntersecting;
          if (this.isNear) this.page.draw();
        },
        { rootMargin: NEAR },
      );
      this.observer.observe(figure);
    }

    get view() {
      return this.page.view.now;
    }
    get steps() {
      return this.page.steps;
    }
    get width() {
      return Math.max(240, Math.floor(this.place.clientWidth));
    }
    get isNarrow() {
      return this.width < NARROW;
    }
    get left() {
      return this.isNarrow ? 62 : 108;
    }

    get isDue() {
      return this.isNear && this.asked.size > 0;
    }
    ask(changed) {
      for (const key of changed) this.asked.add(key);
    }

    async draw() {
      const changed = this.asked;
      const shape = String(this.shape());
      this.asked = new Set();
      if (!this.plot || changed.has("theme") || shape !== this.built) {
        this.built = shape;
        await this.rebuild();
      } else if (changed.has("contents") || this.constructor.FOLLOWS.some((key) => changed.has(key))) {
        this.fill(changed);
      }
    }

    shape() {
      return "";
    }

    // The new one is there before the old one goes, so that nothing jumps.
    async rebuild() {
      this.colours = torchlens.colours();
      const plot = this.build();
      const old = this.plot;
      const last = this.drawn;
      if (!plot) {
        this.clear();
        return;
      }
      this.drawn = torchlens.element("div", { className: "drawing" });
      this.place.append(this.drawn);
      this.plot = plot;
      this.fill(new Set(torchlens.VIEW_KEYS));
      await Bokeh.Plotting.show(plot, this.drawn);
      const events = within(this.drawn, "bk-events");
      if (events) {
        events.tabIndex = -1; // what can be reached by keys is the chart's place
        events.style.touchAction = "pan-y pinch-zoom"; // a finger scrolls the page over it
      }
      this.drawn.style.position = "static";
      last?.remove();
      if (old) forget(old);
      this.figure.classList.add("drawn");
      this.figure.removeAttribute("tabindex"); // a picture scrolls in its figure, a chart does not
    }

    // Its picture is there again.
    clear() {
      if (this.plot) forget(this.plot);
      this.drawn?.remove();
      this.plot = this.drawn = undefined;
      this.figure.classList.remove("drawn");
      if (this.figure.matches("figure")) this.figure.tabIndex = 0;
    }

    remove() {
      this.observer.disconnect();
      this.clear();
    }

    // A figure in the page's looks. y: how ticks are written; options: Bokeh's.
    plotOf({
      height,
      xText,
      yText,
      xLabel = "",
      left = this.left,
      right = 14,
      tools = [],
      yTicker,
      xTicker,
      ...options
    }) {
      const { colours } = this;
      const font = fontOf();
      const plot = Bokeh.Plotting.figure({
        width: this.width,
        height,
        min_border_left: left,
        min_border_right: right,
        min_border_top: 8,
        min_border_bottom: 44,
        toolbar_location: null,
        tools,
        background_fill_color: null,
        border_fill_color: null,
        outline_line_color: null,
        ...options,
      });
      const look = {
        axis_line_color: colours.dim,
        major_tick_line_color: colours.dim,
        minor_tick_line_color: null,
        major_tick_in: 0,
        major_tick_out: 4,
        major_label_text_color: colours.text,
        major_label_text_font: font,
        major_label_text_font_size: "12px",
        axis_label_text_color: colours.dim,
        axis_label_text_font: font,
        axis_label_text_font_size: "12px",
        axis_label_text_font_style: "normal",
        axis_label_standoff: 3,
      };
      const [x] = plot.xaxes;
      const [y] = plot.yaxes;
      x.setv({
        ...look,
        formatter: torchlens.plainTicks(xText),
        axis_label: xLabel,
        ...(xTicker ? { ticker: xTicker } : {}),
      });
      y.setv({
        ...look,
        formatter: torchlens.plainTicks(yText),
        axis_line_color: null,
        major_tick_line_color: null,
        ...(yTicker ? { ticker: yTicker } : {}),
      });
      plot.xgrid.grid_line_color = null;
      plot.ygrid.grid_line_color = colours.rule;
      if (yTicker) plot.ygrid.ticker = yTicker;
      return plot;
    }

    textLook(size = "12px", colour = this.colours.text) {
      return { text_font: fontOf(), text_font_size: size, text_color: colour };
    }

    // Steps are on the axis of several charts, which are zoomed together.
    stepRange() {
      const { begin, end } = this.steps;
      const [start, stop] = this.page.window;
      const range = new Bokeh.Range1d({ start, end: stop, bounds: [begin, end], reset_start: begin, reset_end: end });
      const changed = () => this.page.zoom(range.start, range.end);
      range.properties.start.change.connect(changed);
      range.properties.end.change.connect(changed);
      this.range = range;
      return range;
    }

    stepTicks() {
      return new Bokeh.BasicTicker({ min_interval: 1, num_minor_ticks: 0, desired_num_ticks: this.isNarrow ? 4 : 8 });
    }

    // Draws above the data: the selected steps.
    stepBox(plot) {
      const box = new Bokeh.BoxAnnotation({
        fill_color: this.colours.link,
        fill_alpha: 0.1,
        line_color: this.colours.text,
        visible: false,
      });
      plot.add_layout(box);
      return box;
    }

    showSteps(box, left, right) {
      box.visible = left !== null;
      if (left !== null) box.setv({ left, right });
    }

    // Dragging over a chart of steps selects some; a click is for the chart. The tools are one at a time: see mode().
    brush(plot) {
      plot.on_event("selectiongeometry", ({ final, geometry }) => {
        if (final && geometry.type === "rect") this.page.select(geometry.x0, geometry.x1);
      });
      plot.on_event("doubletap", () => this.page.showAll());
    }

    brushTools() {
      const select = new Bokeh.BoxSelectTool({ dimensions: "width" });
      select.overlay.setv({
        fill_color: this.colours.link,
        fill_alpha: 0.15,
        line_color: this.colours.link,
        line_dash: [],
      });
      return [select, new Bokeh.WheelZoomTool({ dimensions: "width", modifiers: { ctrl: true } })];
    }

    // Turns tools on, which Bokeh leaves to its toolbar.
    activate(plot) {
      const { tools } = plot.toolbar;
      const first = (type) => tools.find((tool) => tool instanceof type) ?? null;
      plot.toolbar.setv({
        active_drag: first(Bokeh.BoxSelectTool) ?? first(Bokeh.BoxZoomTool) ?? null,
        active_scroll: first(Bokeh.WheelZoomTool),
        active_tap: null,
        active_inspect: null,
      });
    }

    fill() {}

    // The page's own parts around it have been renewed.
    renewed() {}
  }

  function forget(plot) {
    const { document: of } = plot;
    of.clear();
    const at = Bokeh.documents.indexOf(of);
    if (at >= 0) Bokeh.documents.splice(at, 1);
  }

  // Letters for what steps did besides training; where they are too dense, every so many.
  const FLAG_LETTERS = { checkpoint: "S", evaluation: "E", compile: "C", capture: "P" };
  const FLAG_WORDS = {
    checkpoint: "S saved a checkpoint",
    evaluation: "E ran without gradients or evaluated",
    compile: "C compiled",
    capture: "P was captured",
  };
  // Of the letters that there are.
  torchlens.flagLegend = ({ flags }) => {
    const found = new Set(flags.flat());
    return Object.keys(FLAG_WORDS)
      .filter((flag) => found.has(flag))
      .map((flag) => FLAG_WORDS[flag])
      .join(", ");
  };

  torchlens.flagMarks = (steps, [from, until], pixels) => {
    const found = { x: [], text: [] };
    const scale = pixels / Math.max(1, until - from);
    let last = -Infinity;
    for (let column = steps.column(from); column < steps.columns && steps.first[column] < until; column++) {
      const text = steps.flags[column].map((flag) => FLAG_LETTERS[flag] ?? "").join("");
      const x = steps.first[column] + steps.width / 2;
      if (!text || (x - last) * scale < 9 * text.length) continue;
      found.x.push(x);
      found.text.push(text);
      last = x;
    }
    return found;
  };

  Object.assign(torchlens, { Tip, Chart });
}
