// Heat map of ranks by steps: quantities as coloured cells, with grouping, ordering, selection, zoom and keyboard use.
{
  const { signed, short, element } = torchlens;
  const ROW = 16;
  const MOST_HEIGHT = 560;
  const LABEL_ROOM = 14;
  // If there are more ranks, only the most important ones are shown at first.
  const [FEWEST_ROWS, MOST_ROWS] = [8, 16];
  const { min_excess: MIN_EXCESS, full_excess: FULL_SCALE } = TORCHLENS_THEME;
  const LEVELS = 8;
  // Multiplied by the median deviation, this gives four standard deviations of a healthy rank's single steps.
  const NOISE = 4 * 1.4826;
  const SAMPLED = 1 << 16;

  // -- from a value to its colour

  function pixel(colour, opacity) {
    return new Uint32Array(new Uint8Array([...torchlens.channels(colour), Math.round(255 * opacity)]).buffer)[0];
  }

  const cssColour = (value) => {
    const [red, green, blue, opacity] = new Uint8Array(new Uint32Array([value]).buffer);
    return `rgba(${red}, ${green}, ${blue}, ${(opacity / 255).toFixed(3)})`;
  };

  function sampled(values) {
    const every = Math.max(1, Math.floor(values.length / SAMPLED));
    const known = [];
    for (let at = 0; at < values.length; at += every) if (values[at] === values[at]) known.push(values[at]);
    return Float32Array.from(known).sort();
  }

  function middle(values) {
    const sorted = sampled(values);
    return sorted[sorted.length >> 1];
  }

  // Returns the excess at which colour begins: the smallest one that a verdict would report, but above step noise.
  function smallestExcess(report, steps) {
    const detectable = report.verdicts.find(({ kind }) => kind === "none")?.evidence?.detectable_s;
    const least = detectable ? detectable / middle(steps.work) : MIN_EXCESS;
    const noise = NOISE * middle(steps.values("excess").map(Math.abs));
    return Math.min(FULL_SCALE / 2, Math.max(least || MIN_EXCESS, noise || 0));
  }

  // Returns at(), which converts a value to a pixel, and legend entries [colour, text]. Excess is orange for slower and
  // blue for faster, beginning at the smallest excess. Other quantities are darker for larger values. Cells that were
  // not measured are chequered grey.
  function scaleOf(quantity, values, colours, smallest) {
    const { percent } = torchlens;
    const ramp = (colour, levels, least, most) =>
      Array.from({ length: levels }, (_, at) => pixel(colour, least + ((most - least) * (at + 1)) / levels));
    const pick = (pixels, share) => pixels[Math.max(0, Math.min(pixels.length - 1, Math.floor(share * pixels.length)))];
    const unknown = [0.08, 0.2].map((opacity) => pixel(colours.dim, opacity));
    const made = (known, words, legend) => ({
      at: (value, isOdd) => (value === value ? known(value) : unknown[isOdd]),
      legend: [
        ...legend.map(([value, text]) => [cssColour(known(value)), text]),
        [cssColour(unknown[1]), words],
      ],
    });
    if (quantity !== "excess") {
      const [low, high] = usual(values);
      const shades = ramp(colours.text, 256, 0.04, 0.9);
      const marks = [0, 0.25, 0.5, 0.75, 1].map((share) => low + share * (high - low));
      return made(
        (value) => pick(shades, (value - low) / (high - low)),
        "not measured",
        marks.map((value) => [value, torchlens.quantityText(quantity, value)]),
      );
    }
    const [slower, faster] = [colours.slower, colours.faster].map((colour) => ramp(colour, LEVELS, 0.12, 1));
    const share = (value) => (Math.abs(value) - smallest) / (FULL_SCALE - smallest);
    const marks = [smallest, ...[0.1, FULL_SCALE].filter((mark) => mark > smallest)];
    const text = (mark, word) => `${percent(mark)}${mark === FULL_SCALE ? " or more" : ""} ${word}`;
    return made(
      (value) => (share(value) < 0 ? 0 : pick(value > 0 ? slower : faster, share(value))),
      "not compared",
      [
        ...marks.map((mark) => [-mark, text(mark, "faster")]).reverse(),
        [0, `within ${percent(smallest)}`],
        ...marks.map((mark) => [mark, text(mark, "slower")]),
      ],
    );
  }

  // Returns the 2nd and the 98th percentile, which rare steps do not affect. The range begins at 0 unless values differ
  // little.
  function usual(values) {
    const sorted = sampled(values);
    if (!sorted.length) return [0, 1];
    const low = sorted[Math.floor(0.02 * (sorted.length - 1))];
    const high = sorted[Math.ceil(0.98 * (sorted.length - 1))];
    if (!(high > 0)) return [0, 1e-9];
    return [low < 0.3 * high ? 0 : low, high > low ? high : low * 1.001];
  }

  // Returns the pixels of the rows in `order` and the columns [from, until), at most `most`. If several cells share a
  // pixel, it shows the largest value. rows and columns: the cell of each pixel's value.
  torchlens.heatPixels = (values, columns, order, [from, until], most, scale) => {
    const down = Math.max(1, Math.ceil(order.length / most.rows));
    const across = Math.max(1, Math.ceil((until - from) / most.columns));
    const height = Math.ceil(order.length / down);
    const width = Math.ceil((until - from) / across);
    const pixels = new Uint32Array(height * width);
    const rows = new Int32Array(height * width);
    const found = new Int32Array(height * width);
    for (let y = 0; y < height; y++) {
      const lastRow = Math.min(order.length, (y + 1) * down);
      for (let x = 0; x < width; x++) {
        let largest = NaN;
        let row = order[y * down];
        let column = from + x * across;
        const lastColumn = Math.min(until, from + (x + 1) * across);
        for (let at = y * down; at < lastRow; at++) {
          const start = order[at] * columns;
          for (let each = from + x * across; each < lastColumn; each++) {
            const value = values[start + each];
            if (value === value && !(value <= largest)) {
              largest = value;
              row = order[at];
              column = each;
            }
          }
        }
        const index = y * width + x;
        pixels[index] = scale.at(largest, (x + y) & 1);
        rows[index] = row;
        found[index] = column;
      }
    }
    return { pixels, rows, columns: found, height, width, down, across };
  };

  // -- the chart

  class Heat extends torchlens.Chart {
    isOverSteps = true;

    constructor(page, figure) {
      super(page, figure);
      const labels = { quantity: "Show", group: "Group by", order: "Order by" };
      this.choices = Object.entries(labels).map(([key, label]) => [
        key,
        torchlens.choice(label, key, (value) => page.view.set({ [key]: value })),
      ]);
      const controls = element(
        "div",
        { className: "controls" },
        ...this.choices.map(([, { label }]) => label),
        ...this.zoomButtons("All steps"),
      );
      this.place.before(controls);
      this.keys();
    }

    // Returns the alternatives of each menu: [key, words].
    alternatives() {
      const { steps } = this;
      const dimensions = [...new Set(steps.places.flatMap(({ mesh }) => Object.keys(mesh)))];
      return {
        quantity: [...steps.quantities.keys()].map((key) => [key, torchlens.quantityWords(key)]),
        group: [
          ...Object.entries({ none: "nothing", node: "node" }),
          ...dimensions.map((each) => [`mesh ${each}`, `mesh: ${short(each, 24)}`]),
        ],
        order: ["slowness", "rank"].map((key) => [key, key]),
      };
    }

    shape() {
      const { view } = this;
      const bySelection = view.order === "slowness" ? view.steps : "";
      const isHidden = this.isCut && !this.placeOf.has(this.steps.rowOf.get(view.rank)) && view.rank;
      return [view.quantity, view.group, view.order, view.rows, bySelection, isHidden].join(" ");
    }

    get quantity() {
      return this.steps.quantities.has(this.view.quantity) ? this.view.quantity : "excess";
    }

    // Returns the group of a row: its node, or its coordinate in a mesh dimension.
    groupOf(row) {
      const { group } = this.view;
      const place = this.steps.places[row];
      if (group === "node") return place.host;
      const dimension = group.startsWith("mesh ") ? group.slice(5) : null;
      if (dimension === null) return null;
      return Object.hasOwn(place.mesh, dimension) ? `${dimension} ${place.mesh[dimension]}` : `no ${dimension}`;
    }

    // Returns the rows from the top, within their groups: slow ranks first, then by mean excess; or all by rank.
    sorted() {
      const { steps, view } = this;
      const rows = Array.from(steps.places.keys());
      const groups = rows.map((row) => this.groupOf(row));
      const means = steps.means(steps.values("excess"), steps.range(view.steps));
      const [since, until] = view.steps ?? [steps.begin, steps.end];
      const isNow = ({ since_step, until_step }) => since_step < until && (until_step ?? Infinity) > since;
      const slow = new Set(steps.slow.filter(isNow).map(({ rank }) => steps.rowOf.get(rank)));
      const bySlowness = steps.bySlowness(slow, means);
      this.isCut = steps.ranks > MOST_ROWS && view.rows === "few" && view.group === "none";
      let shown = rows;
      if (this.isCut) {
        const outside = rows.filter((row) => slow.has(row) || Math.abs(means[row]) >= this.smallest).length;
        shown = [...rows].sort(bySlowness).slice(0, Math.max(FEWEST_ROWS, Math.min(MOST_ROWS, outside)));
        const chosen = steps.rowOf.get(view.rank);
        if (chosen !== undefined && !shown.includes(chosen)) shown[shown.length - 1] = chosen;
      }
      return [...shown].sort(
        (one, other) =>
          (groups[one] === groups[other] ? 0 : torchlens.compare(groups[one], groups[other])) ||
          (view.order === "slowness" ? bySlowness(one, other) : one - other),
      );
    }

    options() {
      const { steps, colours } = this;
      const alternatives = this.alternatives();
      for (const [key, choice] of this.choices) choice.show(alternatives[key], this.view[key]);
      this.smallest = smallestExcess(this.page.contents.report, steps);
      this.order = this.sorted();
      this.placeOf = new Map(this.order.map((row, at) => [row, at]));
      this.scaling = scaleOf(this.quantity, steps.values(this.quantity), colours, this.smallest);
      const count = this.order.length;
      const height = Math.min(MOST_HEIGHT, Math.max(48, ROW * count));
      const every = Math.max(1, Math.ceil((LABEL_ROOM * count) / height));
      const places = Array.from({ length: Math.ceil(count / every) }, (_, at) => at * every + 0.5);
      const labels = new Map(places.map((at) => [at, this.label(at)]));
      const words = torchlens.quantityWords(this.quantity).replace(/^./, (letter) => letter.toUpperCase());
      this.heading.textContent =
        this.quantity === "excess" ? "Compute time compared with the other ranks" : `${words} by rank and step`;
      const outline = steps.slow.length ? [[colours.slower, "frame: slow rank"]] : [];
      this.explain([...this.scaling.legend, ...outline, ...this.flagLegend()]);
      this.more?.remove();
      if (steps.ranks > MOST_ROWS && this.view.group === "none") {
        const text = this.isCut ? `Show all ${steps.ranks}` : "Show the ranks that matter";
        this.more = torchlens.button(text, () => this.page.view.set({ rows: this.isCut ? "all" : "few" }));
        this.legend.before(this.more);
      }
      return this.ofRows(steps.begin, steps.end, this.stepAxis(), count, labels, height + 16);
    }

    // Paints the visible cells, frames around slow times, lines between groups, and the selection.
    paint(ctx, { x, y, width, height }) {
      const { steps, order, colours } = this;
      const [start, end] = this.page.window;
      const from = steps.column(Math.max(steps.begin, Math.floor(start)));
      const until = steps.column(Math.min(steps.end - 1, Math.ceil(end) - 1)) + 1;
      const most = { rows: Math.round(height), columns: Math.max(60, Math.round(width)) };
      const values = steps.values(this.quantity);
      const shown = torchlens.heatPixels(values, steps.columns, order, [from, until], most, this.scaling);
      this.shown = { from, ...shown };
      const image = new ImageData(new Uint8ClampedArray(shown.pixels.buffer), shown.width, shown.height);
      this.cells ??= document.createElement("canvas");
      [this.cells.width, this.cells.height] = [shown.width, shown.height];
      this.cells.getContext("2d").putImageData(image, 0, 0);
      const left = x(steps.first[from]);
      const right = x(steps.first[from] + shown.width * shown.across * steps.width);
      ctx.imageSmoothingEnabled = false;
      ctx.drawImage(this.cells, left, 0, right - left, y(shown.height * shown.down));
      ctx.fillStyle = colours.rule;
      for (let at = 1; at < order.length; at++) {
        if (this.groupOf(order[at]) !== this.groupOf(order[at - 1])) ctx.fillRect(0, y(at) - 0.5, width, 1);
      }
      ctx.strokeStyle = colours.slower;
      for (const { rank, since_step, until_step } of steps.slow) {
        const at = this.placeOf.get(steps.rowOf.get(rank));
        if (at === undefined) continue;
        const begin = x(Math.max(since_step, steps.begin));
        ctx.strokeRect(begin, y(at), x(until_step ?? steps.end) - begin, y(at + 1) - y(at));
      }
      this.paintFlags(ctx, { x, height });
      this.paintSelection(ctx, { x, height });
      const at = this.placeOf.get(steps.rowOf.get(this.view.rank));
      if (at === undefined) return;
      ctx.strokeStyle = colours.text;
      ctx.lineWidth = 2;
      const hasStep = steps.has(this.view.step);
      const first = hasStep ? steps.first[steps.column(this.view.step)] : steps.begin;
      const last = hasStep ? first + steps.width : steps.end;
      ctx.strokeRect(x(first) - 1, y(at), x(last) - x(first) + 2, y(at + 1) - y(at));
    }

    label(y) {
      const row = this.order[Math.floor(y)];
      const { rank } = this.steps.places[row];
      const group = this.groupOf(row);
      if (this.isNarrow) return String(rank);
      return group === null ? `rank ${rank}` : `${short(group, 15)} \u00b7 ${rank}`;
    }

    // Returns the cell whose value is visible at this position.
    at(x, y) {
      const { steps, shown } = this;
      if (!shown || !(steps.has(x) && y >= 0 && y < this.order.length)) return null;
      const down = Math.floor(y / shown.down);
      const across = Math.floor((steps.column(x) - shown.from) / shown.across);
      if (across < 0 || across >= shown.width) return null;
      const index = down * shown.width + across;
      const [row, column] = [shown.rows[index], shown.columns[index]];
      const step = column === steps.column(x) ? Math.floor(x) : steps.first[column];
      return { row, column, rank: steps.places[row].rank, step };
    }

    click(x, y) {
      const at = this.at(x, y);
      if (at) this.page.view.set({ rank: at.rank, step: at.step });
    }

    hover(x, y) {
      const at = this.at(x, y);
      if (!at) return null;
      const { steps, shown } = this;
      const { rank, host } = steps.places[at.row];
      const flags = steps.flags[at.column];
      return [
        `rank ${rank} on ${short(host, 40)}, ${steps.words(at.column)}`,
        ...this.page.figures(at.row, at.column, this.quantity),
        ...(flags.length ? [`also: ${short(flags.join(", "), 80)}`] : []),
        ...(shown.down > 1 ? [`the largest of ${shown.down} ranks in this line`] : []),
      ];
    }

    selectedWords() {
      const { steps, view } = this;
      const where = torchlens.steps(...this.page.whole(view.steps));
      const means = steps.means(steps.values("excess"), steps.range(view.steps));
      const [row] = [...means.keys()].sort(steps.bySlowness(new Set(), means));
      if (Number.isNaN(means[row])) return `No rank was compared in ${where}.`;
      return `Selected ${where}: rank ${steps.places[row].rank} has the largest excess, ${signed(means[row])} on average.`;
    }

    rows() {
      const { steps } = this;
      const values = steps.values(this.quantity);
      const name = this.quantity === "excess" ? "excess_share" : `${this.quantity.replace(" ", "_")}_s`;
      const rowOf = (row, first, column) => [steps.places[row].rank, first, values[row * steps.columns + column]];
      const rows = this.order.flatMap((row) => steps.first.map((first, column) => rowOf(row, first, column)));
      return [["rank", "first_step", name], ...rows];
    }

    // -- the keyboard

    keys() {
      const { page } = this;
      const clamp = (value, most) => Math.max(0, Math.min(most, value));
      // The step at which a selection with Shift begins.
      let anchor = null;

      const walk = (across, down) => ({ shiftKey: isSelecting }) => {
        const { steps } = page;
        const view = page.view.now;
        const at = this.placeOf.get(steps.rowOf.get(view.rank));
        const row = this.order[clamp(at === undefined ? 0 : at + down, this.order.length - 1)];
        const column = view.step === null ? 0 : clamp(steps.column(view.step) + across, steps.columns - 1);
        const step = steps.first[column];
        const changes = { rank: steps.places[row].rank, step };
        if (!isSelecting) {
          anchor = null;
        } else if (across) {
          anchor ??= view.step ?? step;
          changes.steps = [Math.min(anchor, step), Math.max(anchor, step) + steps.width];
        }
        page.view.set(changes);
        page.bringIntoZoom(step, step + steps.width);
        page.draw().then(() => {
          const [x, y] = [step + 0.5, this.placeOf.get(row) + 0.5];
          const box = this.plot.over.getBoundingClientRect();
          torchlens.showTip(this.hover(x, y), [box.x + this.plot.valToPos(x, "x"), box.y + this.plot.valToPos(y, "y")]);
        });
      };

      this.onKeys("heat map", "Ranks by step. Press ? for the keys.", {
        ArrowLeft: walk(-1, 0),
        ArrowRight: walk(1, 0),
        ArrowUp: walk(0, -1),
        ArrowDown: walk(0, 1),
        Home: walk(-Infinity, 0),
        End: walk(Infinity, 0),
        Enter: () => page.view.now.step !== null && page.openStep(),
        Escape: () => page.view.set({ steps: null, step: null, rank: null }),
      });
    }
  }

  torchlens.Heat = Heat;
}
