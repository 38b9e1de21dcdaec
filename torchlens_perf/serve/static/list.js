// Renews the list of runs while it is open, and filters it as the user types.
{
  const READING_MS = 1000, USUAL_MS = 5000, TYPING_MS = 300;
  const form = document.querySelector("form[role=search]");
  let typing = 0;

  async function renew() {
    const answer = await torchlensAsk(location.pathname + location.search);
    if (!answer.ok) throw new Error(await answer.text());
    const next = new DOMParser().parseFromString(await answer.text(), "text/html").querySelector("main");
    const focused = document.activeElement?.getAttribute("href");
    document.querySelector("main").replaceWith(document.adoptNode(next));
    if (focused) document.querySelector(`main a[href="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true });
  }

  async function tryToRenew() {
    try {
      await renew();
    } catch (error) { // the server has ended, or it has another token
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
      if (!document.hidden && getSelection().isCollapsed) await tryToRenew(); // not while text is marked
    }
  }

  follow();
}
