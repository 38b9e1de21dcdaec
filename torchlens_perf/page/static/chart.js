// Base class of all charts: a uPlot figure with title, legend, tooltip, export buttons, and gestures on its plot area.
{
  const { element, short } = torchlens;
  // Charts are drawn when they come this close to the viewport.
  const NEAR = "600px";
  const NARROW = 560;
  // Distance in pixels at which a press becomes a drag.
  const DRAG = 5;
  const INCREMENTS = Array.from({ length: 27 }, (_, power) => [1, 2, 5].map((digit) => digit * 10 ** (power - 12))).flat();

  const measure = document.createElement("canvas").getContext("2d");

  torchlens.colours = () => {
    const style = getComputedStyle(document.documentElement);
    return new Proxy({}, { get: (_, name) => style.getPropertyValue(`--${name}`).trim() });
  };

  // Returns red, green and blue of a theme colour such as "#1b7f5a".
  torchlens.channels = (colour) => [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));

  torchlens.isDark = (colour) => {
    const [red, green, blue] = torchlens.channels(colour).map((channel) => (channel / 255) ** 2.2);
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue < 0.19;
  };

  const tip = element("div", { className: "tip", "aria-hidden": "true", hidden: "" });
  document.body.append(tip);
  addEventListener("scroll", () => torchlens.showTip(null), { passive: true });

  // Shows lines of text near a point of the window. lines: null hides the tooltip.
  torchlens.showTip = (lines, [x, y] = [0, 0]) => {
    tip.hidden = !lines;
    if (!lines) return;
    tip.replaceChildren(...lines.map((text) => element("div", { text })));
    const { offsetWidth: width, offsetHeight: height } = tip;
    const { clientWidth, clientHeight } = document.documentElement;
    tip.style.left = `${Math.max(8, x + 14 + width > clientWidth - 8 ? x - width - 14 : x + 14)}px`;
    tip.style.top = `${Math.max(8, y + 14 + height > clientHeight - 8 ? y - height - 14 : y + 14)}px`;
  };

  // -- export

  torchlens.save = (name, blob) => {
    const link = element("a", { href: URL.createObjectURL(blob), download: name });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
  };

  // Spreadsheets evaluate text that begins like a formula, so such names get an apostrophe.
  torchlens.csv = (rows) => {
    const cell = (value) => {
      if (typeof value === "number") return Number.isFinite(value) ? String(value) : "";
      const text = short(value ?? "", 400).replace(/^(?=[=+@-])(?![+-]?[\d.]|-$)/, "'");
      return /[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
    };
    return rows.map((row) => `${row.map(cell).join(",")}\r\n`).join("");
  };

  torchlens.saveTable = (name, rows) => {
    torchlens.save(`${name}.csv`, new Blob([torchlens.csv(rows)], { type: "text/csv" }));
  };

  // Returns the pixels of an exported picture per CSS pixel.
  torchlens.exportRatio = () => Math.max(2, devicePixelRatio || 1);

  // Draws title and legend above a picture. legend: entries [colour, text]; picture: a canvas with this pixel ratio.
  torchlens.framed = (title, legend, picture, ratio) => {
    const colours = torchlens.colours();
    const made = element("canvas");
    const ctx = made.getContext("2d");
    const font = getComputedStyle(document.body).fontFamily;
    const places = [];
    let [x, y] = [10, 44];
    ctx.font = `12px ${font}`;
    for (const [colour, text] of legend) {
      const width = ctx.measureText(text).width + 32;
      if (x > 10 && x + width > picture.width / ratio) [x, y] = [10, y + 18];
      places.push([colour, text, x, y]);
      x += width;
    }
    const top = (legend.length ? y + 10 : 34) * ratio;
    made.width = picture.width;
    made.height = picture.height + top;
    ctx.fillStyle = colours.ground;
    ctx.fillRect(0, 0, made.width, made.height);
    ctx.drawImage(picture, 0, top);
    ctx.scale(ratio, ratio);
    ctx.fillStyle = colours.text;
    ctx.font = `600 15px ${font}`;
    ctx.fillText(title, 10, 22);
    ctx.font = `12px ${font}`;
    for (const [colour, text, left, bottom] of places) {
      ctx.fillStyle = colour ?? "transparent";
      ctx.fillRect(left, bottom - 10, 12, 12);
      ctx.fillStyle = colours.text;
      ctx.fillText(text, left + 17, bottom);
    }
    return made;
  };

  // Adds export buttons after the title of a figure. rows() returns a table, picture() a canvas or a promise of one.
  torchlens.exports = (figure, rows, picture) => {
    const heading = figure.querySelector("h3");
    const name = () => (heading.textContent.toLowerCase().match(/[a-z0-9]+/g) ?? ["chart"]).join("-").slice(0, 60);
    const png = async () => (await picture()).toBlob((blob) => torchlens.save(`${name()}.png`, blob));
    const csv = () => torchlens.saveTable(name(), rows());
    const label = `Save "${short(heading.textContent, 60)}" as`;
    const exports = element(
      "span",
      { className: "exports" },
      torchlens.button("PNG", png, { "aria-label": `${label} PNG` }),
      torchlens.button("CSV", csv, { "aria-label": `${label} CSV` }),
    );
    const head = element("div", { className: "chart-head" }, exports);
    heading.before(head);
    head.prepend(heading);
    return exports;
  };

  // -- other activity in steps than training

  const FLAGS = new Map([
    ["checkpoint", ["S", "saved a checkpoint"]],
    ["evaluation", ["E", "evaluation or no gradients"]],
    ["compile", ["C", "compiled"]],
    ["capture", ["P", "captured"]],
  ]);

  // -- charts

  // Fills a background in a translucent colour.
  torchlens.shade = (ctx, colour, opacity, left, top, width, height) => {
    ctx.globalAlpha = opacity;
    ctx.fillStyle = colour;
    ctx.fillRect(left, top, width, height);
    ctx.globalAlpha = 1;
  };

  // A chart in a figure of the page. A subclass implements options() (data, series, axes and paint functions), shape()
  // (a text; when it changes, the chart is rebuilt), selectedWords() (a caption for a selection), hover(), click() and
  // brush().
  class Chart {
    constructor(page, figure) {
      this.page = page;
      this.figure = figure;
      this.heading = figure.querySelector("h3");
      figure.querySelector(".unscripted")?.remove();
      this.place = element("div", { className: "chart" });
      this.legend = element("ul", { className: "legend", "aria-label": "Legend" });
      this.heading.after(this.place, this.legend);
      this.exports = torchlens.exports(figure, () => this.rows(), () => this.picture());
      this.exports.hidden = true;
      // View settings that have changed since the last drawing.
      this.asked = new Set(["theme"]);
      this.isNear = false;
      this.observer = new IntersectionObserver(
        ([entry]) => {
          this.isNear = entry.isIntersecting;
          if (this.isNear) this.page.draw();
        },
        { rootMargin: NEAR },
      );
      this.observer.observe(figure);
      this.renewed();
    }

    // Stores the page's caption about the whole run, which is shown unless a selection has its own caption.
    renewed() {
      this.caption = this.figure.querySelector("figcaption");
      this.found = this.caption?.textContent ?? "";
    }

    say(text) {
      if (this.caption && this.caption.textContent !== text) this.caption.textContent = text;
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
    get isDue() {
      return this.isNear && this.asked.size > 0;
    }
    ask(changed) {
      for (const key of changed) this.asked.add(key);
    }
    shape() {
      return "";
    }

    async draw() {
      const changed = this.asked;
      this.asked = new Set();
      const shape = String(this.shape());
      if (!this.plot || changed.has("theme") || changed.has("contents") || shape !== this.built) {
        this.built = shape;
        this.build();
      } else if (changed.has("zoom") && this.isOverSteps) {
        this.scale(...this.page.window);
      } else {
        this.plot.redraw(false);
      }
      if (this.selectedWords) this.say(this.view.steps ? this.selectedWords() : this.found);
    }

    build() {
      this.colours = torchlens.colours();
      this.font = getComputedStyle(document.body).fontFamily;
      this.drawn = this.options();
      const old = this.plot;
      this.plot = this.drawn ? this.made(this.drawn, this.place) : undefined;
      old?.destroy();
      this.place.hidden = this.exports.hidden = !this.plot;
      if (this.plot) this.gestures(this.plot.over);
    }

    // size: scale factor relative to the screen.
    made({ data, series, bands, x, y, height, under, over }, place, size = 1) {
      const { colours } = this;
      const font = `${12 * size}px ${this.font}`;
      const axis = ({ label, text, splits, incrs, hasGrid = true, space = 30 }) => ({
        stroke: colours.text,
        font,
        labelFont: font,
        label,
        labelSize: 18 * size,
        labelGap: 2 * size,
        gap: 4 * size,
        ticks: { stroke: colours.rule, size: 4 * size, width: size },
        grid: { show: hasGrid, stroke: colours.rule, width: size },
        values: (_, found) => {
          const texts = found.map((value) => (value === null ? "" : text(value)));
          // Rounded tick labels can repeat: show each one once.
          return texts.map((each, at) => (each === texts[at - 1] ? "" : each));
        },
        splits,
        incrs: incrs ?? INCREMENTS,
        space: space * size,
      });
      const ranged = ({ range, isDown }) => ({ time: false, range, dir: isDown ? -1 : 1 });
      measure.font = font;
      const widthOf = (text) => measure.measureText(text ?? "").width;
      const widest = (_, found) => 12 * size + Math.max(0, ...(found ?? []).map(widthOf));
      const line = ({ width = 1, dash = [], ...more }) => ({
        points: { show: false },
        width: width * size,
        dash: dash.map((each) => each * size),
        ...more,
      });
      const painted = (paint) => (paint ? [(plot) => this.clipped(plot, size, paint)] : []);
      const options = {
        width: this.width * size,
        height: (height + 42) * size,
        padding: [8 * size, 18 * size, 0, 0],
        legend: { show: false },
        cursor: { drag: { x: false, y: false }, y: false, points: { show: false } },
        scales: { x: ranged(x), y: ranged(y) },
        axes: [
          { ...axis({ hasGrid: false, space: this.isNarrow ? 60 : 80, ...x }), size: 24 * size },
          { ...axis(y), size: widest },
        ],
        series: [{}, ...series.map(line)],
        bands,
        hooks: { drawClear: painted(under), draw: painted(over) },
      };
      const plot = new uPlot(options, data, place);
      // A finger on the plot area still scrolls the page.
      plot.over.style.touchAction = "pan-y pinch-zoom";
      return plot;
    }

    // Paints inside the plot area, in CSS pixels from its corner. paint() receives ctx and the area, whose x() and y()
    // convert values to positions.
    clipped(plot, size, paint) {
      const { ctx, bbox } = plot;
      const ratio = uPlot.pxRatio * size;
      const placed = (scale) => (value) => plot.valToPos(value, scale) / size;
      ctx.save();
      ctx.beginPath();
      ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
      ctx.clip();
      ctx.translate(bbox.left, bbox.top);
      ctx.scale(ratio, ratio);
      ctx.font = `11px ${this.font}`;
      ctx.lineWidth = 1.5;
      [ctx.textAlign, ctx.textBaseline] = ["start", "alphabetic"];
      paint(ctx, { x: placed("x"), y: placed("y"), width: bbox.width / ratio, height: bbox.height / ratio });
      ctx.restore();
    }

    remove() {
      this.observer.disconnect();
      this.clear();
    }

    clear() {
      torchlens.showTip(null);
      this.plot?.destroy();
      this.plot = undefined;
      this.exports.hidden = true;
    }

    // Redraws the chart for export, with at least two pixels per CSS pixel.
    async picture() {
      const size = Math.max(1, torchlens.exportRatio() / uPlot.pxRatio);
      const plot = this.made(this.drawn, element("div"), size);
      // uPlot draws in a microtask.
      await null;
      const made = torchlens.framed(this.heading.textContent, this.entries, plot.ctx.canvas, uPlot.pxRatio * size);
      plot.destroy();
      // Painting stored positions of the export in this chart: repaint to restore those of the screen.
      this.plot.redraw(false);
      return made;
    }

    // Shows the legend. entries: [colour, text]; the colour may be null.
    explain(entries) {
      this.entries = entries;
      this.legend.replaceChildren(
        ...entries.map(([colour, text]) => {
          const swatch = element("span", { className: "swatch" });
          swatch.style.background = colour ?? "";
          return element("li", {}, ...(colour === null ? [] : [swatch]), text);
        }),
      );
    }

    // -- gestures: hover, click, drag, Ctrl and wheel, double click

    gestures(over) {
      const placeOf = ({ clientX, clientY }) => {
        const box = over.getBoundingClientRect();
        const left = clientX - box.left;
        return { left, x: this.plot.posToVal(left, "x"), y: this.plot.posToVal(clientY - box.top, "y") };
      };
      const mark = (left, width) => this.plot?.setSelect({ left, top: 0, width, height: over.clientHeight }, false);
      const point = (event, { x, y }) => torchlens.showTip(this.hover(x, y), [event.clientX, event.clientY]);
      let pressed = null;
      const released = () => {
        pressed = null;
        mark(0, 0);
      };
      const handlers = {
        pointerdown: (event) => {
          if (event.button !== 0) return;
          pressed = placeOf(event);
          over.setPointerCapture(event.pointerId);
        },
        pointermove: (event) => {
          const now = placeOf(event);
          if (pressed && Math.abs(now.left - pressed.left) > DRAG) {
            const left = Math.max(0, Math.min(now.left, pressed.left));
            mark(left, Math.min(over.clientWidth, Math.max(now.left, pressed.left)) - left);
          }
          point(event, now);
        },
        pointerup: (event) => {
          if (!pressed) return;
          const now = placeOf(event);
          const began = pressed;
          released();
          if (Math.abs(now.left - began.left) > DRAG) {
            this.brush(Math.min(began.x, now.x), Math.max(began.x, now.x), event);
          } else {
            this.click(now.x, now.y);
            point(event, now);
          }
        },
        pointercancel: released,
        pointerleave: () => {
          torchlens.showTip(null);
          this.leave();
        },
        dblclick: () => this.whole(),
        wheel: (event) => {
          // Without a modifier key, the wheel scrolls the page.
          if (!event.ctrlKey && !event.metaKey) return;
          event.preventDefault();
          this.zoomBy(event.deltaY < 0 ? 0.8 : 1.25, placeOf(event).x);
        },
      };
      for (const [name, handler] of Object.entries(handlers)) over.addEventListener(name, handler, { passive: false });
    }

    hover() {
      return null;
    }
    leave() {}
    click(x) {
      if (this.isOverSteps && this.steps.has(x)) this.page.view.set({ step: Math.floor(x) });
    }
    brush(low, high, event) {
      if (!this.isOverSteps) return;
      if (event.shiftKey) this.page.zoom(low, high);
      else this.page.select(low, high);
    }
    whole() {
      if (this.isOverSteps) this.page.showAll();
    }
    zoomBy(factor, at) {
      if (this.isOverSteps) this.page.zoomBy(factor, at);
    }
    zoomButtons(all) {
      const made = { "Zoom in": () => this.zoomBy(0.5), "Zoom out": () => this.zoomBy(2), [all]: () => this.whole() };
      return Object.entries(made).map(([text, pressed]) => torchlens.button(text, pressed));
    }
    scale(min, max) {
      this.plot.setScale("x", { min, max });
    }

    // -- the keyboard

    // Makes the chart usable by keyboard. keys: an action for each key name.
    onKeys(role, label, more) {
      Object.assign(this.place, { tabIndex: 0, role: "application", ariaRoleDescription: role, ariaLabel: label });
      const keys = { "+": () => this.zoomBy(0.5), "-": () => this.zoomBy(2), 0: () => this.whole(), ...more };
      keys["="] = keys["+"];
      this.place.addEventListener("blur", () => torchlens.showTip(null));
      this.place.addEventListener("keydown", (event) => {
        const name = event.key.length === 1 ? event.key.toLowerCase() : event.key;
        if (event.ctrlKey || event.metaKey || event.altKey || !this.plot || !Object.hasOwn(keys, name)) return;
        keys[name](event);
        event.preventDefault();
      });
    }

    // -- charts over steps: one axis, one zoom, one selection

    stepAxis() {
      return {
        label: this.steps.width > 1 ? `step (columns of ${this.steps.width} steps)` : "step",
        text: String,
        incrs: INCREMENTS.filter((each) => each >= 1),
        range: () => this.page.window,
      };
    }

    // Returns the selected range on the horizontal axis.
    selected() {
      return this.isOverSteps ? this.view.steps : null;
    }

    // Returns options of a chart that paints its own rows. labels: texts by their position from the top.
    ofRows(begin, end, x, bottom, labels, height) {
      return {
        data: [[begin, end], [0, bottom]],
        series: [{ paths: () => null }],
        x,
        y: {
          range: [0, bottom],
          isDown: true,
          text: (y) => labels.get(y) ?? "",
          splits: () => [...labels.keys()],
          hasGrid: false,
        },
        height,
        over: (ctx, area) => this.paint(ctx, area),
      };
    }

    flagLegend() {
      const found = new Set(this.steps.flags.flat());
      return [...FLAGS].filter(([flag]) => found.has(flag)).map(([, words]) => [null, words.join(": ")]);
    }

    // Paints letters for flags at the bottom of the plot. Where they are too dense, it skips some.
    paintFlags(ctx, { x: at, height }) {
      const { steps } = this;
      let last = -Infinity;
      ctx.fillStyle = this.colours.text;
      ctx.textAlign = "center";
      for (let column = 0; column < steps.columns; column++) {
        const text = steps.flags[column].map((flag) => FLAGS.get(flag)?.[0] ?? "").join("");
        if (!text) continue;
        const x = at(steps.first[column] + steps.width / 2);
        if (x - last < 9 * text.length) continue;
        ctx.fillText(text, x, height - 4);
        last = x;
      }
      ctx.textAlign = "start";
    }

    // Marks the selected steps and the chosen step.
    paintSelection(ctx, { x, height }) {
      const { steps, view, colours } = this;
      const selected = this.selected();
      if (selected) {
        const [left, right] = selected.map(x);
        torchlens.shade(ctx, colours.link, 0.12, left, 0, right - left, height);
        ctx.strokeStyle = colours.link;
        ctx.strokeRect(left, -2, right - left, height + 4);
      }
      if (this.isOverSteps && steps.has(view.step)) {
        ctx.fillStyle = colours.text;
        ctx.fillRect(x(steps.first[steps.column(view.step)] + steps.width / 2) - 0.75, 0, 1.5, height);
      }
    }
  }

  Object.assign(torchlens, { Chart });
}
