// The page of a run that goes on: what is not a chart is taken from a newer page.
{
  // Which figure of the page this is.
  torchlens.figureName = ({ dataset }) => dataset.title ?? dataset.chart;

  // Puts the focus back to where it is now, in whatever has come there by then.
  function placeOf(element) {
    const section = element?.closest?.("main section");
    if (!section) return null;
    const like = (root) => [...root.querySelectorAll(element.tagName)];
    const at = like(section).indexOf(element);
    return () => {
      const next = section.id && document.getElementById(section.id);
      if (next && document.activeElement !== element) {
        (element.isConnected ? element : like(next)[at])?.focus({ preventScroll: true });
      }
    };
  }

  // Takes all words, tables and bars from the newer page; charts stay where they are, and so does the focus.
  torchlens.renew = (page, newer) => {
    const main = document.querySelector("main");
    const focused = placeOf(document.activeElement);
    const open = new Set([...main.querySelectorAll("details[open] > summary")].map((summary) => summary.textContent));
    for (const selector of ["header h1", "header .facts", "nav ul", "footer"]) {
      const [old, next] = [document, newer].map((from) => from.querySelector(selector));
      if (old && next) old.replaceWith(document.adoptNode(next));
    }
    const figures = [...newer.querySelectorAll("figure[data-chart]")];
    const nextOf = new Map(figures.map((figure) => [torchlens.figureName(figure), figure]));
    const sections = [...newer.querySelectorAll("main > section")].map((section) => document.adoptNode(section));
    page.charts = page.charts.filter((chart) => {
      const { figure } = chart;
      const next = nextOf.get(torchlens.figureName(figure));
      if (!next) {
        chart.remove();
        return false;
      }
      const caption = next.querySelector("figcaption");
      if (caption) figure.querySelector("figcaption")?.replaceWith(caption);
      next.replaceWith(figure);
      return true;
    });
    for (const old of main.querySelectorAll(":scope > section")) old.remove();
    main.append(...sections);
    for (const summary of main.querySelectorAll("details > summary")) {
      if (open.has(summary.textContent)) summary.parentElement.open = true;
    }
    for (const chart of page.charts) chart.renewed();
    page.rankTable = null;
    focused?.();
  };
}
