// Renews the page of a running job: replaces everything but charts with parts of a newer page.
{
  // Returns a name that identifies a figure in both pages.
  torchlens.figureName = ({ dataset }) => dataset.title ?? dataset.chart;

  // Returns a function that restores focus to the same position in the section after a renewal.
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

  // Replaces words, tables and bars by those of the newer page. Charts stay in place, and focus is kept.
  torchlens.renew = (page, newer) => {
    const main = document.querySelector("main");
    const focused = placeOf(document.activeElement);
    const open = new Set([...document.querySelectorAll("details[open] > summary")].map((summary) => summary.textContent));
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
    for (const summary of document.querySelectorAll("details > summary")) {
      if (open.has(summary.textContent)) summary.parentElement.open = true;
    }
    for (const chart of page.charts) chart.renewed();
    page.rankTable = null;
    focused?.();
  };
}
