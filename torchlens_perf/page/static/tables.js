// Tables: made from text, sorted by their figures, and the ranks' figures for selected steps.
{
  const { duration, percent, signed, short, element } = torchlens;
  const MOST_ROWS = 64; // as page/sections/ranks.py

  // headers: of columns; texts: which are no numbers; marked: rows that stand out. As in page/sections/section.py.
  torchlens.table = (caption, headers, rows, { texts = [0], marked = [] } = {}) => {
    const cell = (name, text, at, attributes) =>
      element(name, { ...attributes, ...(texts.includes(at) ? { className: "text" } : {}) }, text);
    const head = element("tr", {}, ...headers.map((text, at) => cell("th", text, at, { scope: "col" })));
    const body = rows.map((row, index) =>
      element(
        "tr",
        marked.includes(index) ? { className: "marked" } : {},
        ...row.map((text, at) => (at === 0 ? cell("th", text, at, { scope: "row" }) : cell("td", text, at, {}))),
      ),
    );
    const made = element(
      "table",
      {},
      element("caption", { text: caption }),
      element("thead", {}, head),
      element("tbody", {}, ...body),
    );
    torchlens.sortable(made);
    return element("div", { className: "scrolls", tabindex: "0", role: "region", "aria-label": caption }, made);
  };

  // -- by numbers with their units; what was not measured comes last, whichever way

  const UNITS = new Map(
    Object.entries({
      ns: 1e-9,
      us: 1e-6,
      ms: 1e-3,
      s: 1,
      B: 1,
      KB: 1e3,
      MB: 1e6,
      GB: 1e9,
      TB: 1e12,
      "B/s": 1,
      "KB/s": 1e3,
      "MB/s": 1e6,
      "GB/s": 1e9,
      "TB/s": 1e12,
      MHz: 1,
      W: 1,
      "\u00b0C": 1,
      "%": 0.01,
    }),
  );
  const UNKNOWN = new Set(["", "-", "not known", "not measured", "not compared", "none"]);

  function keyOf(cell) {
    const text = (cell?.textContent ?? "").trim();
    if (UNKNOWN.has(text)) return text === "none" ? 0 : null;
    const share = /^([\d.]+) of ([\d.]+)/.exec(text);
    if (share) return Number(share[2]) ? Number(share[1]) / Number(share[2]) : 0;
    const found = /^([+\u2212~-]?)(\d[\d.]*)\s*([^\s(,]*)/.exec(text);
    if (!found || !(found[3] === "" || UNITS.has(found[3]))) return text;
    return (/[\u2212-]/.test(found[1]) ? -1 : 1) * Number(found[2]) * (UNITS.get(found[3]) ?? 1);
  }

  function order(one, other) {
    if (typeof one === "number" && typeof other === "number") return one - other;
    if (typeof one !== typeof other) return typeof one === "number" ? -1 : 1;
    return torchlens.compare(one, other);
  }

  torchlens.sortable = (table) => {
    const heads = [...(table.tHead?.rows[0]?.cells ?? [])];
    if ((table.tBodies[0]?.rows.length ?? 0) < 2) return;
    for (const [column, head] of heads.entries()) {
      if (head.querySelector("button") || !head.textContent.trim()) continue;
      const button = element("button", { type: "button", className: "sorts" });
      const arrow = element("span", { "aria-hidden": "true", className: "arrow" });
      button.append(...head.childNodes);
      head.append(button, arrow);
      button.addEventListener("click", () => {
        const isDown = head.getAttribute("aria-sort") !== "descending";
        for (const other of heads) {
          other.removeAttribute("aria-sort");
          other.querySelector(".arrow")?.replaceChildren();
        }
        head.setAttribute("aria-sort", isDown ? "descending" : "ascending");
        arrow.textContent = isDown ? " \u2193" : " \u2191";
        const rows = [...table.tBodies[0].rows].map((row) => [row, keyOf(row.cells[column])]);
        rows.sort(([, one], [, other]) =>
          one === null || other === null
            ? (one === null) - (other === null)
            : isDown
              ? order(other, one)
              : order(one, other),
        );
        table.tBodies[0].append(...rows.map(([row]) => row));
      });
    }
  };

  // The table of ranks. Without a selection it is the page's own; with one it gives way to means over those steps.
  class RankTable {
    constructor(page, section) {
      this.page = page;
      this.section = section;
      this.own = [...section.children].filter((child) => child.matches("p, .scrolls"));
      this.isWhole = false; // whether all ranks are listed
      this.links(section);
    }

    // A rank's number chooses it.
    links(root) {
      for (const row of root.querySelectorAll("tbody tr")) {
        const head = row.cells[0];
        const rank = Number(head.textContent);
        if (!Number.isInteger(rank) || head.querySelector("button")) continue;
        const button = torchlens.button(head.textContent, () =>
          this.page.view.set({ rank: this.page.view.now.rank === rank ? null : rank }),
        );
        button.className = "picks";
        button.dataset.rank = rank;
        button.setAttribute("aria-label", `rank ${rank}`);
        head.replaceChildren(button);
      }
    }

    follow(changed) {
      const {
        view: { now: view },
        steps,
      } = this.page;
      const isSelected = view.steps !== null && steps !== null;
      if (["steps", "contents"].some((key) => changed.has(key))) {
        for (const each of this.own) each.hidden = isSelected;
        this.made?.remove();
        this.made = undefined;
        if (isSelected) this.section.append((this.made = this.ofSelection()));
      }
      for (const button of this.section.querySelectorAll("button.picks")) {
        const isChosen = Number(button.dataset.rank) === view.rank;
        button.setAttribute("aria-pressed", String(isChosen));
        button.closest("tr").classList.toggle("chosen", isChosen);
      }
    }

    ofSelection() {
      const {
        steps,
        contents,
        view: {
          now: { steps: selected },
        },
      } = this.page;
      const range = steps.range(selected);
      const named = torchlens.namedRanks(contents.report);
      const excess = steps.values("excess");
      const wait = steps.parts.get("communication");
      const mean = (values, row) => (values ? steps.mean(values, row, range) : NaN);
      const rows = steps.places.map(({ rank, host }, row) => ({
        rank,
        host,
        step: mean(steps.step, row),
        work: mean(steps.work, row),
        more: mean(excess, row),
        wait: mean(wait, row),
        memory: this.memory(row, range),
      }));
      const down = (value) => (value === value ? value : -Infinity);
      rows.sort(
        (one, other) =>
          named.has(other.rank) - named.has(one.rank) || down(other.more) - down(one.more) || one.rank - other.rank,
      );
      const shown = this.isWhole ? rows : rows.slice(0, MOST_ROWS);
      const [since, until] = this.page.whole(selected);
      const caption =
        `Means over ${torchlens.steps(since, until)} by the hosts' clocks, ${shown.length} of ${rows.length} ranks; ` +
        "ranks that verdicts name come first, then those with most more work";
      const headers = [
        "rank",
        "host",
        "step",
        "work",
        "more than the others",
        "wait",
        "share waited",
        ...(steps.memory_bytes ? ["memory, at most"] : []),
      ];
      const body = shown.map((each) => [
        String(each.rank),
        short(each.host, 32),
        duration(each.step),
        duration(each.work),
        signed(each.more),
        duration(each.wait),
        percent(each.wait / each.step),
        ...(steps.memory_bytes ? [torchlens.amount(each.memory, "B")] : []),
      ]);
      const made = element(
        "div",
        {},
        torchlens.table(caption, headers, body, {
          texts: [0, 1],
          marked: shown.map(({ rank }, at) => (named.has(rank) ? at : -1)).filter((at) => at >= 0),
        }),
      );
      this.links(made);
      if (shown.length < rows.length) {
        made.append(
          torchlens.button(`Show all ${rows.length} ranks`, () => {
            this.isWhole = true;
            this.follow(new Set(["steps"]));
          }),
        );
      }
      made.append(
        element("p", {
          className: "note",
          text:
            "Work is of the steps that are compared: without the warm-up, evaluation, checkpoints and sampled steps. " +
            "Without a selection, this table has typical steps of the whole run.",
        }),
      );
      return made;
    }

    // The most in the groups of columns that the selection touches.
    memory(row, [from, until]) {
      const { memory_bytes, columns } = this.page.steps;
      if (!memory_bytes) return NaN;
      const together = Math.ceil(columns / memory_bytes[row].length);
      const known = memory_bytes[row]
        .slice(Math.floor(from / together), Math.ceil(until / together))
        .filter((value) => value !== null);
      return known.length ? Math.max(...known) : NaN;
    }
  }

  Object.assign(torchlens, { RankTable });
}
