// Describes the selection for screen readers and clears it; also buttons for copying and for the theme.
{
  const { short, element } = torchlens;
  class SelectionBar {
    constructor(page) {
      this.page = page;
      this.chips = element("span", { className: "chips" });
      this.status = element("span", { role: "status", className: "selected-words" });
      const attributes = { className: "selection", "aria-label": "Selection", role: "group" };
      this.element = element("div", attributes, this.status, this.chips);
      document.querySelector("main")?.after(this.element);
    }

    show() {
      const { page, chips } = this;
      const { steps } = page;
      const view = page.view.now;
      const said = [];
      const buttons = [];
      const add = (words, name, key) => {
        said.push(words);
        const drop = () => page.view.set({ [key]: null });
        buttons.push(torchlens.button(`${name} \u2715`, drop, { "aria-label": `do not select ${name}` }));
      };
      if (view.steps && steps) {
        const [since, until] = page.whole(view.steps);
        add(`${torchlens.steps(since, until)} (${until - since})`.replace(/^s/, "S"), "steps", "steps");
        buttons.push(torchlens.button("Zoom to them", () => page.zoom(since, until)));
      }
      if (view.rank !== null) add(this.rankWords(view), `rank ${view.rank}`, "rank");
      if (view.step !== null) add(this.stepWords(view), `step ${view.step}`, "step");
      if (view.zoom && steps) buttons.push(torchlens.button("Show all steps", () => page.showAll()));
      this.element.classList.toggle("empty", !buttons.length);
      const text = said.length ? `Selected: ${said.join("; ")}.` : "";
      if (this.status.textContent !== text) this.status.textContent = text;
      const focused = [...chips.children].indexOf(document.activeElement);
      chips.replaceChildren(...buttons);
      if (focused >= 0) {
        const heat = document.querySelector("figure[data-chart=heat] .chart");
        (buttons[Math.min(focused, buttons.length - 1)] ?? heat)?.focus();
      }
      document.documentElement.style.setProperty("--selection-height", `${this.element.offsetHeight}px`);
    }

    rankWords({ rank }) {
      const place = this.page.steps?.places[this.page.steps.rowOf.get(rank)];
      return place ? `rank ${rank} on ${short(place.host, 32)}` : `rank ${rank}, without steps on this page`;
    }

    stepWords({ rank, step, quantity }) {
      const { steps } = this.page;
      if (!steps?.has(step)) return `step ${step}, not on this page`;
      const row = steps.rowOf.get(rank);
      if (row === undefined) return `step ${step}`;
      const shown = steps.quantities.has(quantity) ? quantity : "excess";
      return `step ${step}: ${this.page.figures(row, steps.column(step), shown).join(", ")}`;
    }
  }

  torchlens.applyTheme = (theme) => {
    if (theme === "system") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
  };

  // Copies a text. Old browsers have no clipboard API on pages from files, so a selected text field is copied there.
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

  torchlens.copyButton = (label, text) => {
    const pressed = async () => {
      await copy(text());
      button.textContent = "Copied";
      setTimeout(() => (button.textContent = label), 1500);
    };
    const button = torchlens.button(label, pressed, { className: "copies" });
    return button;
  };

  // Returns the buttons for the list of keys, for a link to the current view and for the theme.
  torchlens.share = (view) => {
    const options = Object.entries({ system: "System theme", light: "Light theme", dark: "Dark theme" });
    const { select, show } = torchlens.choice("", "theme", (theme) => view.set({ theme }));
    select.setAttribute("aria-label", "Theme");
    show(options, view.now.theme);
    torchlens.applyTheme(view.now.theme);
    view.watch(({ theme }) => {
      select.value = theme;
      torchlens.applyTheme(theme);
    });
    const link = torchlens.copyButton("Copy link to this view", () => view.address());
    const keys = document.getElementById("keys");
    keys.addEventListener("click", ({ target }) => target.matches("button") && keys.close());
    const isAsked = ({ key, target }) => key === "?" && !keys.open && !target.matches("input, select");
    document.addEventListener("keydown", (event) => isAsked(event) && keys.showModal());
    const opens = torchlens.button("Keys", () => keys.showModal());
    return element("div", { className: "share" }, opens, link, select);
  };

  torchlens.SelectionBar = SelectionBar;
}
