// Renews the list of runs, or a page with a message, while it is open. Searches as the user types, and keeps pinned runs.
{
  const READING_MS = 1000, USUAL_MS = 5000, TYPING_MS = 300, PINS = "torchlens_perf pins";
  const form = document.querySelector("form[role=search]"), compare = document.querySelector("#compare button");
  // The values of at most two ticked runs, in the order of ticking.
  const ticked = new Set();
  let typing = 0;

  const pins = () => JSON.parse(localStorage.getItem(PINS) ?? "[]");

  function pin(name) {
    const others = pins().filter((each) => each !== name);
    localStorage.setItem(PINS, JSON.stringify(others.length < pins().length ? others : [...others, name]));
    tryToRenew();
  }

  // A renewal replaces the list's elements, so ticks, pins and local times are set again.
  function dress() {
    for (const box of document.querySelectorAll("main input[name=run]")) {
      const isPinned = pins().includes(box.value), name = box.ariaLabel.replace("Compare", "Pin");
      const button = Object.assign(document.createElement("button"), { className: "pin", ariaLabel: name, title: name });
      button.textContent = isPinned ? "\u2605" : "\u2606";
      button.ariaPressed = isPinned;
      button.addEventListener("click", () => pin(box.value));
      box.parentElement.append(button);
    }
    // Swedish writes dates as in ISO 8601.
    for (const time of document.querySelectorAll("main time")) {
      time.textContent = new Date(time.dateTime).toLocaleString("sv-SE").slice(0, 16);
    }
    showTicks();
  }

  function showTicks() {
    for (const box of document.querySelectorAll("main input[name=run]")) box.checked = ticked.has(box.value);
    if (compare) compare.disabled = ticked.size !== 2;
  }

  document.addEventListener("change", ({ target }) => {
    if (!target.matches("main input[name=run]")) return;
    if (target.checked) ticked.add(target.value);
    else ticked.delete(target.value);
    if (ticked.size > 2) ticked.delete([...ticked][0]);
    showTicks();
  });

  async function renew() {
    const query = new URLSearchParams(location.search);
    for (const each of pins()) if (form) query.append("pin", each);
    const answer = await torchlensAsk(`${location.pathname}?${query}`, { headers: { accept: "text/html" } });
    const next = new DOMParser().parseFromString(await answer.text(), "text/html");
    if (next.title !== document.title) return location.reload();
    const focused = document.activeElement, key = focused.hasAttribute("href") ? "href" : "value";
    document.querySelector("main").replaceWith(document.adoptNode(next.querySelector("main")));
    dress();
    if (!focused.isConnected) document.querySelector(`main [${key}="${CSS.escape(focused.getAttribute(key) ?? "")}"]`)?.focus({ preventScroll: true });
  }

  async function tryToRenew() {
    try {
      await renew();
    } catch (error) { // The server has ended.
      document.querySelector("main .problem")?.remove();
      const words = Object.assign(document.createElement("p"), { className: "problem", role: "status", textContent: `This list is old: ${error.message}` });
      document.querySelector("main").prepend(words);
    }
  }

  function search() {
    clearTimeout(typing);
    history.replaceState(history.state, "", `?${new URLSearchParams(new FormData(form))}`);
    tryToRenew();
  }

  form?.addEventListener("submit", (event) => { event.preventDefault(); search(); });
  form?.addEventListener("input", () => { clearTimeout(typing); typing = setTimeout(search, TYPING_MS); });

  async function follow() {
    for (;;) {
      const reading = document.querySelector("main").dataset.reading !== undefined;
      await new Promise((done) => setTimeout(done, reading ? READING_MS : USUAL_MS));
      // A renewal would clear a text selection.
      if (!document.hidden && getSelection().isCollapsed) await tryToRenew();
    }
  }

  dress();
  if (form && pins().length) tryToRenew();
  follow();
}
