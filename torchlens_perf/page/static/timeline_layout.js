// Where everything in the time line of a step lies. Draws nothing.
{
  const ROW = 15; // pixels
  const GAP = 6;
  const DEEPEST = 12; // spans inside of so many others are left out
  const ON_DEVICE = "collectives on the device";

  // What a span is called in CollectiveJoined: "allreduce group=dp-0 dtype=float32" and its number.
  function keyOf(name, number) {
    const found = /^(\S+) group=(.*?)(?: dtype=\S+)?(?: (?:root|peer)=\d+)?$/.exec(name);
    return found ? `${found[1]} ${found[2]} ${number}` : "";
  }
  const joinedKey = ({ name, group_name, number }) => `${name.split(" ")[0]} ${group_name} ${number}`;

  // x in ms since the first rank began, y in pixels from the top.
  // spans: columns, one place for each span; about: what each of them is; ranks: one below the other; labels: by y;
  // byKey: the places of each collective's spans.
  class Layout {
    spans = { left: [], right: [], top: [], bottom: [], kind: [] };
    about = [];
    ranks = [];
    labels = new Map();
    byKey = new Map();
    height = 2;

    constructor(trace, names, isNarrow) {
      for (const rank of trace.ranks) this.add(rank, names, isNarrow);
      this.begin = Math.min(0, ...this.ranks.map(({ begin }) => begin));
      this.end = Math.max(1e-3, ...this.ranks.map(({ end }) => end));
      this.joined = new Map(trace.collectives.map((each) => [joinedKey(each), each]));
      this.findWaits();
    }

    add({ rank, offset_us, duration_us, rows }, names, isNarrow) {
      const offset_ms = (offset_us ?? 0) / 1e3;
      const top = this.height;
      let hostBottom = top + ROW;
      for (const row of rows) {
        if (row === rows[0]) {
          const words = isNarrow ? String(rank) : `rank ${rank}`;
          this.labels.set(this.height + ROW / 2, offset_us === null ? `${words} *` : words);
        } else if (!isNarrow) {
          this.labels.set(this.height + ROW / 2, row.lane === ON_DEVICE ? "coll. on device" : row.lane);
        }
        this.addLane(rank, row, names, offset_ms);
        this.height += ROW * (1 + Math.min(DEEPEST, Math.max(0, ...row.depth)));
        if (row.lane === "host") hostBottom = this.height;
      }
      const end = offset_ms + duration_us / 1e3;
      this.ranks.push({ rank, begin: offset_ms, end, top, hostBottom, bottom: this.height });
      this.height += GAP;
    }

    addLane(rank, { lane, kind, name, start_us, duration_us, depth, number }, names, offset_ms) {
      const { spans, about, byKey, height } = this;
      kind.forEach((of, at) => {
        if (depth[at] > DEEPEST) return;
        const text = names[name[at]] ?? "";
        const key = number && of === "collective" ? keyOf(text, number[at]) : "";
        if (key) byKey.set(key, [...(byKey.get(key) ?? []), about.length]);
        const left = offset_ms + start_us[at] / 1e3;
        spans.left.push(left);
        spans.right.push(left + duration_us[at] / 1e3);
        spans.top.push(height + depth[at] * ROW + 0.5);
        spans.bottom.push(height + (depth[at] + 1) * ROW - 0.5);
        spans.kind.push(of);
        about.push({ rank, lane, kind: of, name: text, key, start_us: start_us[at], duration_us: duration_us[at] });
      });
    }

    // The spans by which a collective was joined: its kernels' where those were timed, else the calls.
    joinedSpans(key) {
      const places = this.byKey.get(key) ?? [];
      const timed = new Set(places.filter((at) => this.about[at].lane === ON_DEVICE).map((at) => this.about[at].rank));
      return places.filter((at) => !timed.has(this.about[at].rank) || this.about[at].lane === ON_DEVICE);
    }

    // Of joined collectives: the time that each rank waited in it, and who came last.
    findWaits() {
      const { spans, about } = this;
      this.waits = { left: [], right: [], top: [], bottom: [] };
      this.lasts = { x: [], y: [] };
      this.isWaiting = new Set();
      for (const [key, { wait_us, last_rank, asynchronous }] of this.joined) {
        for (const at of this.joinedSpans(key)) {
          const { rank, duration_us } = about[at];
          if (last_rank === rank) {
            this.lasts.x.push(spans.left[at]);
            this.lasts.y.push(spans.top[at]);
          } else if (wait_us[rank] > 0 && !asynchronous) {
            this.isWaiting.add(at);
            this.waits.left.push(spans.left[at]);
            this.waits.right.push(spans.left[at] + Math.min(wait_us[rank], duration_us) / 1e3);
            this.waits.top.push(spans.top[at]);
            this.waits.bottom.push(spans.bottom[at]);
          }
        }
      }
    }
  }

  torchlens.laidOut = (trace, names, isNarrow) => new Layout(trace, names, isNarrow);
}
