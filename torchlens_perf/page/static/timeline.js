// Timeline of one step: the spans of all ranks on host and device, and the waits between ranks.
{
  const { duration, short, element, us } = torchlens;
  const ROW = 15;
  const GAP = 6;
  // Smallest share of a step of a gap between spans that is shown.
  const LEAST_GAP = 0.05;
  // Spans with a larger depth are left out.
  const DEEPEST = 12;
  // Smallest width in pixels of a span whose name is shown in part.
  const LABEL = 44;
  const ON_DEVICE = "collectives on the device";
  const PARTS = { wait: "communication", closure: "host", module_backward: "module-backward" };

  // Returns the key that connects a span with its CollectiveJoined: "allreduce dp-0 7".
  function keyOf(name, number) {
    const found = /^(\S+) group=(.*?)(?: dtype=\S+)?(?: (?:root|peer)=\d+)?$/.exec(name);
    return found ? `${found[1]} ${found[2]} ${number}` : "";
  }
  const joinedKey = ({ name, group_name, number }) => `${name.split(" ")[0]} ${group_name} ${number}`;

  // Returns the long gaps between the host's spans: code outside of the recorded phases, such as a hang between them.
  function gaps(rank, { start_us, long_us, depth }, duration_us, offset, y) {
    const outer = [...start_us.keys()].filter((at) => depth[at] === 0).sort((one, other) => start_us[one] - start_us[other]);
    const edges = [0, ...outer.flatMap((at) => [start_us[at], start_us[at] + long_us[at]]), duration_us];
    return edges.flatMap((from, at) => {
      const until = edges[at + 1];
      if (at % 2 || until - from < LEAST_GAP * duration_us) return [];
      const [left, right] = [offset + from / 1e3, offset + until / 1e3];
      return { rank, lane: "host", kind: "closure", name: "host code", key: "", left, right, y, start_us: from };
    });
  }

  // Returns the layout: x in ms since the first rank began, y in pixels from the top.
  function laidOut(trace, names, isNarrow) {
    const found = { spans: [], ranks: [], labels: new Map(), byKey: new Map(), begin: 0, end: 1e-3 };
    let height = 2;
    for (const { rank, offset_us, duration_us, rows } of trace.ranks) {
      const offset = (offset_us ?? 0) / 1e3;
      const [top, end] = [height, offset + duration_us / 1e3];
      let hostBottom = top + ROW;
      const isOnHost = rows.every(({ lane }) => lane !== "device");
      for (const { lane, kind, name, start_us, duration_us: long_us, depth, number } of rows) {
        const words = isNarrow ? String(rank) : `rank ${rank}`;
        if (height === top) found.labels.set(height + ROW / 2, offset_us === null ? `${words} *` : words);
        else if (!isNarrow) found.labels.set(height + ROW / 2, lane === ON_DEVICE ? "coll. on device" : short(lane, 16));
        // A device's step is as long as its parts: it needs no row.
        const outer = kind.includes("step") ? 1 : 0;
        kind.forEach((of, at) => {
          if (depth[at] > DEEPEST || of === "step") return;
          const known = names[name[at]] ?? "";
          const text = Object.hasOwn(TORCHLENS_THEME.parts, of) && !known.startsWith(of) ? of : known;
          const left = offset + start_us[at] / 1e3;
          const key = number && of === "collective" ? keyOf(text, number[at]) : "";
          const y = height + (depth[at] - outer) * ROW;
          const span = { rank, lane, kind: of, name: text, key, left, right: left + long_us[at] / 1e3, y, start_us: start_us[at] };
          found.spans.push(span);
          if (key) found.byKey.set(key, [...(found.byKey.get(key) ?? []), span]);
        });
        if (isOnHost && lane === "host") found.spans.push(...gaps(rank, { start_us, long_us, depth }, duration_us, offset, top));
        height += ROW * (1 - outer + Math.min(DEEPEST, Math.max(0, ...depth)));
        if (lane === "host") hostBottom = height;
      }
      found.ranks.push({ rank, begin: offset, end, top, hostBottom, bottom: height });
      [found.begin, found.end] = [Math.min(found.begin, offset), Math.max(found.end, end)];
      height += GAP;
    }
    found.joined = new Map(trace.collectives.map((each) => [joinedKey(each), each]));
    for (const [key, { wait_us, last_rank, asynchronous }] of found.joined) {
      const spans = found.byKey.get(key) ?? [];
      const timed = new Set(spans.filter(({ lane }) => lane === ON_DEVICE).map(({ rank }) => rank));
      for (const span of spans) {
        // If the collective's kernel was timed, mark only the span on the device.
        if (timed.has(span.rank) && span.lane !== ON_DEVICE) continue;
        if (last_rank === span.rank) span.isLast = true;
        else if (wait_us[span.rank] > 0 && !asynchronous) {
          span.waitUntil = Math.min(span.right, span.left + wait_us[span.rank] / 1e3);
        }
      }
    }
    return { ...found, height };
  }

  class Timeline extends torchlens.Chart {
    constructor(page, figure) {
      super(page, figure);
      this.steppicker = new torchlens.StepPicker(page, this);
      this.steppicker.element.append(...this.zoomButtons("Whole step"));
      this.finding = element("p");
      this.notes = element("p", { className: "note" });
      this.place.before(this.steppicker.element, this.finding, this.notes);
      this.status = element("p", { className: "hidden-words", role: "status" });
      figure.append(this.status);
      const move = (share) => () => {
        const by = share * (this.window[1] - this.window[0]);
        this.show(this.window[0] + by, this.window[1] + by);
      };
      this.onKeys("timeline", "Timeline of one step. Press ? for the keys.", {
        ArrowRight: () => this.next(1),
        ArrowLeft: () => this.next(-1),
        w: () => this.zoomBy(0.5),
        s: () => this.zoomBy(2),
        a: move(-1 / 4),
        d: move(1 / 4),
        PageUp: () => this.steppicker.next(-1),
        PageDown: () => this.steppicker.next(1),
        Escape: () => this.pin(null),
      });
    }

    // The live page may fetch the step from the server. A page file shows only the steps that it contains.
    async draw() {
      this.trace = await this.steppicker.trace();
      await super.draw();
      this.steppicker.show(this.trace);
      this.tables?.remove();
      if (!this.trace) return;
      this.tables = torchlens.stepTable(this.trace);
      this.figure.after(this.tables);
      this.finding.textContent = torchlens.stepFinding(this.trace);
      this.notes.textContent = torchlens.stepNotes(this.trace, this.view);
    }

    shape() {
      return this.trace ? `${this.trace.step} ${this.trace.ranks.map(({ rank }) => rank)}` : "";
    }

    options() {
      const { trace, colours } = this;
      if (!trace) return null;
      // If the step is the same after a renewal, zoom and pinned collective are kept.
      const isSame = this.step === trace.step && this.laid;
      const before = this.window;
      this.laid = laidOut(trace, trace.names ?? this.page.contents.traces.names, this.isNarrow);
      this.step = trace.step;
      const { spans, labels, begin, end, height } = this.laid;
      this.window = isSame ? before : [begin, end];
      if (!isSame) this.pinned = this.pointed = null;
      this.slow = new Set(this.page.contents.named_ranks);
      const kinds = new Set(spans.map(({ kind }) => kind));
      const word = (kind) => torchlens.partWord(PARTS[kind] ?? kind).replace(/[_-]/, " ");
      const marks = [];
      if (spans.some(({ waitUntil }) => waitUntil)) marks.push([colours.ground, "hatched: waits for the last rank"]);
      if (spans.some(({ isLast }) => isLast)) marks.push([colours.text, "triangle: last to arrive"]);
      this.explain([...[...kinds].map((kind) => [this.colourOf(kind), word(kind)]), ...marks]);
      const text = torchlens.tick((ms) => duration(ms / 1e3));
      const x = { label: "time since the first rank began the step", text, range: () => this.window };
      return this.ofRows(begin, end, x, height, labels, height);
    }

    colourOf(kind) {
      return this.colours[`part-${PARTS[kind] ?? kind}`] || this.colours.rule;
    }

    paint(ctx, { x, width }) {
      const { colours, laid, view } = this;
      const box = (left, right, top, bottom) => [x(left), top, Math.max(0.75, x(right) - x(left)), bottom - top];
      const frame = (span) => ctx.strokeRect(...box(span.left, span.right, span.y, span.y + ROW));
      for (const { rank, begin, end, top, hostBottom, bottom } of laid.ranks) {
        ctx.fillStyle = colours.raised;
        ctx.fillRect(...box(begin, end, top, hostBottom));
        if (this.slow.has(rank)) torchlens.shade(ctx, colours.slower, 0.12, 0, top - 3, width, bottom - top + 6);
      }
      const hatch = this.hatch(ctx);
      for (const span of laid.spans) {
        const [left, right] = [x(span.left), x(span.right)];
        if (right < 0 || left > width) continue;
        const colour = this.colourOf(span.kind);
        ctx.fillStyle = colour;
        ctx.fillRect(left, span.y + 0.5, Math.max(0.75, right - left - 0.5), ROW - 1);
        if (span.waitUntil) {
          const long = Math.max(0.75, x(span.waitUntil) - left);
          for (const style of [colours.ground, hatch]) {
            ctx.fillStyle = style;
            ctx.fillRect(left, span.y + 0.5, long, ROW - 1);
          }
        }
        if (span.isLast) {
          ctx.fillStyle = colours.text;
          ctx.beginPath();
          ctx.moveTo(left - 5, span.y - 3);
          ctx.lineTo(left + 5, span.y - 3);
          ctx.lineTo(left, span.y + 6);
          ctx.fill();
        }
        const begin = Math.max(left, 0);
        ctx.fillStyle = span.waitUntil ? colours.text : torchlens.isDark(colour) ? "#ffffff" : colours["in-span"];
        ctx.fillText(this.fitting(ctx, span, Math.min(right, width) - begin - 5), begin + 3, span.y + 11);
      }
      ctx.lineWidth = 2;
      ctx.strokeStyle = colours.text;
      const pointed = laid.byKey.get(this.pointed) ?? [];
      pointed.forEach(frame);
      ctx.lineWidth = 1.5;
      ctx.setLineDash([4, 3]);
      ctx.beginPath();
      for (const { left, y } of pointed) for (const at of [y, y + ROW]) ctx.lineTo(x(left), at);
      ctx.stroke();
      ctx.setLineDash([]);
      const chosen = laid.ranks.find(({ rank }) => rank === view.rank);
      ctx.strokeStyle = colours.chosen;
      if (chosen) ctx.strokeRect(...box(chosen.begin, chosen.end, chosen.top - 1, chosen.bottom + 1));
    }

    // Returns a span's name, or its last part (of a module) or first word if only that fits, or its beginning.
    fitting(ctx, { kind, key, name }, room) {
      const text = kind === "wait" ? "wait" : key ? key.split(" ")[0] : short(name, 200);
      const fits = (each) => ctx.measureText(each).width <= room;
      const whole = [text, text.split(kind.startsWith("module") ? /.*\./ : " ").find(Boolean)].find(fits);
      if (whole !== undefined || room < LABEL) return whole ?? "";
      let most = text.length;
      while (most && !fits(`${text.slice(0, most)}\u2026`)) most--;
      return `${text.slice(0, most)}\u2026`;
    }

    hatch(ctx) {
      const made = element("canvas", { width: 6, height: 6 });
      const of = made.getContext("2d");
      of.strokeStyle = this.colours.text;
      of.globalAlpha = 0.6;
      for (const at of [-6, 0, 6]) {
        of.moveTo(at, 6);
        of.lineTo(at + 6, 0);
      }
      of.stroke();
      return ctx.createPattern(made, "repeat");
    }

    // -- pointing at spans

    // Returns the shortest span at this position, since short spans are drawn wider than they are and cover others.
    spanAt(x, y) {
      const near = (1.5 * (this.window[1] - this.window[0])) / this.width;
      return this.laid.spans
        .filter((span) => span.left - near <= x && x <= span.right + near && span.y <= y && y <= span.y + ROW)
        .reduce((one, other) => (one && one.right - one.left <= other.right - other.left ? one : other), null);
    }

    hover(x, y) {
      const span = this.spanAt(x, y);
      const joined = this.laid.joined.get(span?.key);
      this.point(joined ? span.key : this.pinned);
      if (!span) return null;
      const { rank, lane, kind, name, start_us, left, right } = span;
      const isPlain = kind === "wait" || kind === "collective" || name.startsWith(kind);
      const words = kind === "wait" ? "wait" : short(name);
      const what = isPlain ? words : `${words} (${short(kind, 24).replace("_", " ")})`;
      return [
        `rank ${rank}: ${what}`,
        `${duration((right - left) / 1e3)}, from ${us(start_us)} on${lane === "host" ? "" : `; ${short(lane, 40)}`}`,
        ...(joined ? this.whoWaited(joined, rank) : []),
      ];
    }

    whoWaited({ group, number, bytes, arrival_us, wait_us, last_rank, asynchronous }, rank) {
      const size = bytes === null ? "" : `, ${torchlens.amount(bytes, "B")}`;
      const found = [`${short(group, 30)}, number ${number}${size}`];
      const arrival = arrival_us[rank];
      const wait = wait_us[rank];
      if (last_rank === rank) found.push("last to arrive: the other ranks wait for it");
      else if (last_rank !== null) found.push(`last to arrive: rank ${last_rank}`);
      if (typeof arrival === "number") found.push(arrival ? `arrived ${us(arrival)} after the first` : "first to arrive");
      if (typeof wait === "number" && wait > 0) {
        found.push(asynchronous ? `issued ${us(wait)} before the last rank, not blocked` : `waited ${us(wait)}`);
      }
      return found;
    }

    // Frames a collective on all ranks, and draws a line through its arrivals.
    point(key) {
      if (this.pointed === key) return;
      this.pointed = key;
      this.plot.redraw(false);
    }

    pin(key) {
      this.pinned = this.pinned === key ? null : key;
      this.point(this.pinned);
    }

    leave() {
      this.point(this.pinned);
    }
    click(x, y) {
      const key = this.spanAt(x, y)?.key;
      this.pin(this.laid.joined.has(key) ? key : null);
    }
    brush(low, high) {
      this.show(low, high);
    }
    whole() {
      this.show(this.laid.begin, this.laid.end);
    }

    // -- moving and zooming

    next(by) {
      const keys = [...this.laid.joined.keys()];
      if (!keys.length) return;
      const at = keys.indexOf(this.pinned);
      this.pinned = keys[at < 0 ? (by > 0 ? 0 : keys.length - 1) : (at + by + keys.length) % keys.length];
      this.point(this.pinned);
      const { name, group, number, last_rank, wait_us } = this.laid.joined.get(this.pinned);
      const last = last_rank === null ? "last to arrive: not known" : `last to arrive: rank ${last_rank}`;
      const longest = us(torchlens.most(Object.values(wait_us)));
      this.status.textContent = `${short(name)} of ${short(group, 30)}, number ${number}: ${last}; longest wait ${longest}.`;
    }

    // at: the time that keeps its position; by default the pinned collective or the middle.
    zoomBy(factor, at) {
      const [start, end] = this.window;
      const spans = this.pinned ? (this.laid.byKey.get(this.pinned) ?? []) : [];
      const middle = at ?? (spans.length ? spans[0].left : (start + end) / 2);
      this.show(...torchlens.zoomed(this.window, factor, middle));
    }

    show(start, end) {
      this.window = torchlens.inside([start, end], [this.laid.begin, this.laid.end], 1e-4);
      this.scale(...this.window);
    }

    rows() {
      const head = ["rank", "lane", "kind", "name", "start_us", "duration_us", "wait_us", "last_to_arrive"];
      const row = ({ rank, lane, kind, name, start_us, left, right, waitUntil, isLast }) => {
        const inUs = (ms) => Math.round(ms * 1e4) / 10;
        return [rank, lane, kind, name, start_us, inUs(right - left), waitUntil ? inUs(waitUntil - left) : "", isLast ? 1 : ""];
      };
      return [head, ...this.laid.spans.map(row)];
    }
  }

  torchlens.Timeline = Timeline;
}
