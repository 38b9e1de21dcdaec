// What is selected, in words that are read out, and how it is taken back; copying, and the theme.
{
  const { short, element } = torchlens;
  class SelectionBar {
    constructor(page) {
      this.page = page;
      this.chips = element("span", { className: "chips" });
      this.status = element("span", { role: "status", className: "selected-words" });
      this.element = element(
        "div",
        { className: "selection", "aria-label": "Selection", role: "group" },
        this.status,
        this.chips,
      );
      document.querySelector("main")?.after(this.element);
    }

    show() {
      const {
        view: { now: view },
        steps,
      } = this.page;
      const { chips } = this;
      const said = [];
      const buttons = [];
      const drop = (text, key) => {
        const made = torchlens.button(`${text} \u2715`, () => this.page.view.set({ [key]: null }));
        made.setAttribute("aria-label", `do not select ${text}`);
        buttons.push(made);
      };
      if (view.steps && steps) {
        const [since, until] = this.page.whole(view.steps);
        const count = until - since;
        said.push(`${torchlens.steps(since, until)} (${count})`.replace(/^s/, "S"));
        drop("steps", "steps");
        buttons.push(torchlens.button("Zoom to them", () => this.page.zoom(since, until)));
      }
      if (view.rank !== null) {
        said.push(this.rankWords());
        drop(`rank ${view.rank}`, "rank");
      }
      if (view.step !== null) {
        said.push(this.stepWords());
        drop(`step ${view.step}`, "step");
      }
      if (view.zoom && steps) buttons.push(torchlens.button("Show all steps", () => this.page.showAll()));
      this.element.classList.toggle("empty", !said.length && !buttons.length);
      const text = said.length ? `Selected: ${said.join("; ")}.` : "";
      if (this.status.textContent !== text) this.status.textContent = text;
      const focused = chips.contains(document.activeElement) ? [...chips.children].indexOf(document.activeElement) : -1;
      chips.replaceChildren(...buttons);
      if (focused >= 0) {
        (chips.children[Math.min(focused, chips.children.length - 1)] ?? this.page.heatPlace())?.focus();
      }
      document.documentElement.style.setProperty("--selection-height", `${this.element.offsetHeight}px`);
    }

    rankWords() {
      const {
        view: {
          now: { rank },
        },
        steps,
      } = this.page;
      const row = steps?.rowOf.get(rank);
      return row === undefined
        ? `rank ${rank}, without steps on this page`
        : `rank ${rank} on ${short(steps.places[row].host, 32)}`;
    }

    stepWords() {
      const {
        view: {
          now: { rank, step, quantity },
        },
        steps,
      } = this.page;
      const row = steps?.rowOf.get(rank);
      if (!steps || step < steps.begin || step >= steps.end) return `step ${step}, not on this page`;
      if (row === undefined) return `step ${step}`;
      const shown = steps.quantities.has(quantity) ? quantity : "excess";
      return `step ${step}: ${this.page.figures(row, steps.column(step), shown).join(", ")}`;
    }
  }

  torchlens.applyTheme = ({ theme }) => {
    if (theme === "system") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
  };

  // Copies a text. Pages from files in old browsers have no clipboard: there a selected text field is copied.
  async function copy(text) {
    try {
      await navigator.clipboard.writeText(text);
    } catch {
      const field = element("textarea", { readonly: "" });
      field.value = text;
      document.body.append(field);
      field.select();
      document.execCommand("copy");
      field.remove();
    }
  }

  // text: what is copied at a press, or a function that returns it.
  torchlens.copyButton = (label, text) => {
    const button = torchlens.button(label, async () => {
      await copy(typeof text === "function" ? text() : text);
      button.textContent = "Copied";
      setTimeout(() => (button.textContent = label), 1500);
    });
    button.className = "copies";
    return button;
  };

  // A link to this very view, and the theme.
  torchlens.share = (view) => {
    const options = [
      ["system", "System theme"],
      ["light", "Light theme"],
      ["dark", "Dark theme"],
    ];
    const { select, show } = torchlens.choice("", "theme", (theme) => view.set({ theme }));
    select.setAttribute("aria-label", "Theme");
    const follow = (now) => {
      show(options, now.theme);
      torchlens.applyTheme(now);
    };
    follow(view.now);
    view.watch(follow);
    const link = torchlens.copyButton("Copy link to this view", () => view.address());
    return element("div", { className: "share" }, link, select);
  };

  torchlens.SelectionBar = SelectionBar;
}
