// Tables with the markup of view/html.py, sorting and CSV export; and the table of ranks' means over selected steps.
{
  const { duration, percent, signed, short, element } = torchlens;
  const FIRST_RANKS = 8;
  let made = 0;

  // columns: [title, function from row to text, class]; isSlow: true if a verdict is about a row; first: rows shown at
  // first.
  torchlens.table = (title, rows, columns, { isSlow = () => false, first = rows.length } = {}) => {
    const heads = columns.map(([text, , className]) => element("th", { className, text, scope: "col" }));
    const body = rows.map((row) => {
      const [name, ...texts] = columns.map(([, text, className]) => ({ className, text: text(row) }));
      const cells = texts.map((each) => element("td", each));
      return element("tr", { className: isSlow(row) && "slow" }, element("th", { ...name, scope: "row" }), ...cells);
    });
    const table = element(
      "table",
      {},
      element("caption", { text: title }),
      element("thead", {}, element("tr", {}, ...heads)),
      element("tbody", {}, ...body),
    );
    const scrolls = element("div", { className: "scrolls", tabindex: "0", role: "region", "aria-label": title }, table);
    const tools = element("p", { className: "tools" });
    const whole = element("div", { className: "table", "data-first": first }, scrolls, tools);
    if (first < rows.length) {
      const id = `made-${++made}`;
      const more = element("span", { className: "more", text: `Show all ${rows.length}` });
      const less = element("span", { className: "less", text: `Show ${first}` });
      tools.append(element("label", { for: id, className: "button" }, more, less));
      whole.prepend(element("input", { type: "checkbox", id, className: "all" }));
    }
    shorten(table);
    torchlens.sortable(table);
    return whole;
  };

  // Hides the rows after the first ones behind "Show all".
  function shorten(table) {
    const first = Number(table.closest("[data-first]")?.dataset.first ?? Infinity);
    for (const [at, row] of [...table.tBodies[0].rows].entries()) row.classList.toggle("rest", at >= first);
  }

  // -- order: numbers by their units; cells without a value come last in both directions

  const SCALES = { n: 1e-9, u: 1e-6, m: 1e-3, K: 1e3, M: 1e6, G: 1e9, T: 1e12 };

  function number(text) {
    const found = /^([+\u2212-]?)[<>~= ]*([\d.,]+(?:e[+-]\d+)?)(?: of ([\d.,]+))?(?:\s*([numKMGT])(?:s|B|Hz))?/.exec(text);
    if (!found) return null;
    const [value, total] = [found[2], found[3] ?? "1"].map((each) => Number(each.replaceAll(",", "")));
    return ((/[\u2212-]/.test(found[1]) ? -1 : 1) * value * (SCALES[found[4]] ?? 1)) / total;
  }

  function sort(table, column, isDown) {
    const isText = table.tHead.rows[0].cells[column].classList.contains("text");
    const key = ({ textContent: text }) => (isText ? (text === "-" ? null : text) : number(text.trim()));
    const compare = isText ? torchlens.compare : (one, other) => one - other;
    const rows = [...table.tBodies[0].rows].map((row) => [row, key(row.cells[column])]);
    rows.sort(([, one], [, other]) =>
      one === null || other === null ? (one === null) - (other === null) : (isDown ? -1 : 1) * compare(one, other),
    );
    table.tBodies[0].append(...rows.map(([row]) => row));
    shorten(table);
  }

  torchlens.sortable = (table) => {
    const heads = [...(table.tHead?.rows[0]?.cells ?? [])];
    const tools = table.closest(".table")?.querySelector(".tools");
    if (!tools || tools.querySelector(".csv")) return;
    const title = table.caption.textContent;
    // A shortened name has its full text in the tooltip.
    const written = (cell) => cell.querySelector("span[title]")?.title ?? cell.textContent;
    const save = () => torchlens.saveTable(title, [...table.rows].map((row) => [...row.cells].map(written)));
    tools.append(torchlens.button("CSV", save, { className: "csv", "aria-label": `Save "${short(title)}" as CSV` }));
    if (table.tBodies[0].rows.length < 2) return;
    for (const [column, head] of heads.entries()) {
      const button = element("button", { type: "button", className: "sorts" }, ...head.childNodes);
      head.append(button);
      button.addEventListener("click", () => {
        const isDown = head.getAttribute("aria-sort") !== "descending";
        for (const other of heads) other.removeAttribute("aria-sort");
        head.setAttribute("aria-sort", isDown ? "descending" : "ascending");
        sort(table, column, isDown);
      });
    }
  };

  // The table of ranks. A selection replaces the page's table with means over the selected steps.
  torchlens.RankTable = class {
    constructor(page, section) {
      this.page = page;
      this.section = section;
      this.whole = [...section.querySelectorAll(".table")];
      this.links(section);
    }

    // A click on a rank's number selects the rank.
    links(root) {
      for (const row of root.querySelectorAll("tbody tr")) {
        const head = row.cells[0];
        const rank = Number(head.textContent);
        if (!Number.isInteger(rank)) continue;
        const pick = () => this.page.view.set({ rank: this.page.view.now.rank === rank ? null : rank });
        const attributes = { className: "picks", "data-rank": rank, "aria-label": `rank ${rank}` };
        head.replaceChildren(torchlens.button(head.textContent, pick, attributes));
      }
    }

    follow(changed) {
      const { view, steps } = this.page;
      const isSelected = view.now.steps !== null && steps !== null;
      if (changed.has("steps") || changed.has("contents")) {
        for (const each of this.whole) each.hidden = isSelected;
        this.selected?.remove();
        if (isSelected) this.section.append((this.selected = this.ofSelection()));
      }
      for (const button of this.section.querySelectorAll("button.picks")) {
        const isChosen = Number(button.dataset.rank) === view.now.rank;
        button.setAttribute("aria-pressed", String(isChosen));
        button.closest("tr").classList.toggle("chosen", isChosen);
      }
    }

    ofSelection() {
      const { steps, contents, view } = this.page;
      const range = steps.range(view.now.steps);
      const wait = steps.parts.get("communication");
      const mean = (values, row) => (values ? steps.mean(values, row, range) : NaN);
      const means = steps.means(steps.values("excess"), range);
      const slow = new Set(contents.named_ranks.map((rank) => steps.rowOf.get(rank)));
      const rows = [...steps.places.keys()].sort(steps.bySlowness(slow, means));
      const [since, until] = this.page.whole(view.now.steps);
      const whole = torchlens.table(
        `Mean of ${torchlens.steps(since, until)} by the host's clock, slowest ranks first`,
        rows,
        [
          ["rank", (row) => steps.places[row].rank],
          ["host", (row) => short(steps.places[row].host, 32), "text"],
          ["step", (row) => duration(mean(steps.step, row))],
          ["compute", (row) => duration(mean(steps.work, row))],
          ["compared with other ranks", (row) => signed(means[row])],
          ["comm wait", (row) => duration(mean(wait, row))],
          ["share waited", (row) => percent(mean(wait, row) / mean(steps.step, row))],
        ],
        { isSlow: (row) => slow.has(row), first: FIRST_RANKS },
      );
      this.links(whole);
      const text = "Compute is of steps that are compared: without warm-up, evaluation, checkpoints and sampled steps.";
      whole.append(element("p", { className: "note", text }));
      return whole;
    }
  };
}
