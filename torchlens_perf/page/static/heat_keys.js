// The keyboard in the heat map: walks from cell to cell, selects steps, zooms.
{
  const WORDS =
    "Ranks by step. Left and right arrows choose a step, up and down a rank, with Shift a range of steps; " +
    "Enter opens the step; plus and minus zoom, 0 shows all; Escape clears the selection.";
  const ARROWS = new Map([
    ["ArrowLeft", [-1, 0]],
    ["ArrowRight", [1, 0]],
    ["ArrowUp", [0, -1]],
    ["ArrowDown", [0, 1]],
    ["Home", [-Infinity, 0]],
    ["End", [Infinity, 0]],
  ]);
  const clamp = (value, most) => Math.max(0, Math.min(most, value));

  torchlens.heatKeys = (page, heat) => {
    let anchor = null; // the step from which on Shift selects
    const attributes = { tabindex: "0", role: "application", "aria-roledescription": "heat map", "aria-label": WORDS };
    for (const [key, value] of Object.entries(attributes)) heat.place.setAttribute(key, value);

    function walk([across, down], isSelecting) {
      const { steps } = page;
      const view = page.view.now;
      const at = heat.placeOf.get(steps.rowOf.get(view.rank));
      const row = heat.order[clamp(at === undefined ? 0 : at + down, heat.order.length - 1)];
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
    }

    heat.place.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey || !heat.order) return;
      const { key } = event;
      if (ARROWS.has(key)) walk(ARROWS.get(key), event.shiftKey);
      else if (key === "Enter" && page.view.now.step !== null) page.openStep();
      else if (key === "Escape") page.clear();
      else if (key === "+" || key === "=") page.zoomBy(0.5);
      else if (key === "-") page.zoomBy(2);
      else if (key === "0") page.showAll();
      else return;
      event.preventDefault();
    });
  };
}
