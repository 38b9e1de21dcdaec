// Renews the list of runs while it is open, and filters it as the user types.
{
  const READING_MS = 1000, USUAL_MS = 5000, TYPING_MS = 300;
  const form = document.querySelector("form[role=search]");
  // The steps of at most two selected runs, by name, in the order of selection.
  const ticked = new Map();
  // Results of comparisons by the names of both runs.
  const compared = new Map();
  let typing = 0;

  // A renewal replaces the list's elements, so the selection is kept here.
  function showTicks() {
    for (const box of document.querySelectorAll("main input")) box.checked = ticked.has(box.value);
    const runs = [...ticked].map(([name, text]) => `${name}: ${text ? `step p50 ${text}` : "no step time"}`);
    const texts = ticked.size === 2 ? [runs.join(" \u00b7 "), compared.get([...ticked.keys()].join("/"))] : [];
    document.getElementById("compared").textContent = texts.filter(Boolean).join(". ");
  }

  // Adds the result of a comparison with its uncertainty, which takes a moment.
  async function compareTicked() {
    const names = [...ticked.keys()], key = names.join("/");
    if (names.length < 2 || compared.has(key)) return;
    const answer = await torchlensAsk(`api/compare?${new URLSearchParams({ before: names[0], after: names[1] })}`);
    const found = await answer.json().catch(() => ({}));
    compared.set(key, found.sentence ? `${found.status}: ${found.sentence}` : found.problem ?? "");
    showTicks();
  }

  document.addEventListener("change", ({ target }) => {
    if (!target.matches("main input")) return;
    const text = target.closest("tr").querySelector(".run-step").textContent;
    if (target.checked) ticked.set(target.value, text);
    else ticked.delete(target.value);
    if (ticked.size > 2) ticked.delete(ticked.keys().next().value);
    showTicks();
    compareTicked().catch(() => {});
  });

  async function renew() {
    const answer = await torchlensAsk(location.pathname + location.search);
    if (!answer.ok) throw new Error(await answer.text());
    const next = new DOMParser().parseFromString(await answer.text(), "text/html").querySelector("main");
    const focused = document.activeElement?.getAttribute("href");
    document.querySelector("main").replaceWith(document.adoptNode(next));
    showTicks();
    if (focused) document.querySelector(`main a[href="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true });
  }

  async function tryToRenew() {
    try {
      await renew();
    } catch (error) { // The server has ended, or was restarted with another token.
      document.querySelector("main .problem")?.remove();
      const words = Object.assign(document.createElement("p"), { className: "problem", textContent: `This list is old: ${error.message}` });
      words.setAttribute("role", "status");
      document.querySelector("main").prepend(words);
    }
  }

  function filter() {
    clearTimeout(typing);
    const fields = new URLSearchParams(new FormData(form));
    history.replaceState(history.state, "", `?${fields}`);
    tryToRenew();
  }

  form.addEventListener("submit", (event) => { event.preventDefault(); filter(); });
  form.addEventListener("input", () => { clearTimeout(typing); typing = setTimeout(filter, TYPING_MS); });

  async function follow() {
    for (;;) {
      const reading = document.querySelector("main").dataset.reading !== undefined;
      await new Promise((done) => setTimeout(done, reading ? READING_MS : USUAL_MS));
      // A renewal would clear a text selection.
      if (!document.hidden && getSelection().isCollapsed) await tryToRenew();
    }
  }

  follow();
}
