// The page of a run that goes on: what is not a chart is taken from a newer page.
{
  // Which figure of its section this is.
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
    const left = new Map(
      [...newer.querySelectorAll("main > section")].map((section) => [section.id, document.adoptNode(section)]),
    );
    const inside = (root, figure) =>
      [...(root?.querySelectorAll("figure[data-chart]") ?? [])].find(
        (each) => torchlens.figureName(each) === torchlens.figureName(figure),
      );
    page.charts = page.charts.filter((chart) => {
      const { figure } = chart;
      const next = inside(left.get(figure.closest("section").id), figure);
      if (!next || !(chart instanceof page.kindOf(next))) {
        chart.remove();
        return false;
      }
      const caption = next.querySelector("figcaption");
      if (caption) figure.querySelector("figcaption")?.replaceWith(caption);
      next.replaceWith(figure);
      return true;
    });
    for (const old of main.querySelectorAll(":scope > section")) old.remove();
    main.append(...left.values());
    for (const summary of main.querySelectorAll("details > summary")) {
      if (open.has(summary.textContent)) summary.parentElement.open = true;
    }
    for (const chart of page.charts) chart.renewed();
    page.rankTable = null;
    focused?.();
  };
}
