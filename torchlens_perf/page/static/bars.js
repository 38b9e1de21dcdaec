// Adds export buttons to the bars that Python draws (page/sections/bars.py), and selects a rank at a click on its bar.
{
  // Draws the bars as they look on the screen to a canvas.
  function picture(figure) {
    const ratio = torchlens.exportRatio();
    const colours = torchlens.colours();
    const box = figure.querySelector(".bars").getBoundingClientRect();
    const made = torchlens.element("canvas", { width: Math.ceil(box.width * ratio), height: Math.ceil(box.height * ratio) });
    const ctx = made.getContext("2d");
    ctx.scale(ratio, ratio);
    ctx.translate(-box.x, -box.y);
    for (const rect of figure.querySelectorAll(".bars rect")) {
      const { x, y, width, height } = rect.getBoundingClientRect();
      ctx.fillStyle = getComputedStyle(rect).fill;
      ctx.fillRect(x, y, width, height);
    }
    ctx.fillStyle = colours.text;
    ctx.font = `12px ${getComputedStyle(document.body).fontFamily}`;
    ctx.textBaseline = "middle";
    for (const text of figure.querySelectorAll(".bars > div > span")) {
      const { x, y, height } = text.getBoundingClientRect();
      ctx.fillText(text.textContent, x, y + height / 2);
    }
    const items = [...figure.querySelectorAll("ul.legend li")];
    const legend = items.map((item) => [getComputedStyle(item.querySelector("rect")).fill, item.textContent]);
    return torchlens.framed(figure.querySelector("h3").textContent, legend, made, ratio);
  }

  torchlens.bars = (page, figure) => {
    if (figure.querySelector(".exports")) return;
    const rows = [...figure.querySelectorAll(".bars > div")];
    const parts = [...new Set([...figure.querySelectorAll("rect[data-part]")].map(({ dataset }) => dataset.part))];
    const valueOf = (row, part) => row.querySelector(`rect[data-part="${CSS.escape(part)}"]`)?.dataset.value;
    const table = () => [
      ["label", ...parts.map((part) => `${part}_s`)],
      ...rows.map((row) => [row.dataset.label, ...parts.map((part) => valueOf(row, part))]),
    ];
    torchlens.exports(figure, table, () => picture(figure));
    figure.addEventListener("click", ({ target }) => {
      const rank = target.closest?.("[data-rank]")?.dataset.rank;
      if (rank !== undefined) page.view.set({ rank: Number(rank) });
    });
  };

  torchlens.chooseBar = (rank) => {
    for (const row of document.querySelectorAll(".bars [data-rank]")) {
      row.classList.toggle("chosen", Number(row.dataset.rank) === rank);
    }
  };
}
