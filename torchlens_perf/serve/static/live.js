// Follows a run: asks the server once a second for a newer page, fetches it, and renews the parts that differ.
// Requests captures and shows their results.
{
  const LEAST_GAP_MS = 1000, POLL_MS = 1000;
  const { element } = torchlens;
  const root = document.documentElement, status = document.getElementById("live-status");
  let shown = root.dataset.version, news = null, isFetching = false, isHeld = false, problem = "";

  // -- status text

  const hold = torchlens.button("Pause", () => {
    isHeld = !isHeld;
    say();
    update();
  });
  status.after(hold);

  function say() {
    const isOld = news !== null && news.version !== shown, isLive = root.dataset.live === "running";
    const written = new Date(window.torchlensPage?.contents.written ?? "");
    const updated = Number.isNaN(written.valueOf()) ? "" : `, updated ${written.toLocaleTimeString("en-GB")}`;
    let words = isLive ? `Live${updated}` : "Ended";
    if (isHeld) words = isOld ? "Paused, newer steps are available" : "Paused";
    hold.textContent = isHeld ? "Resume" : "Pause";
    const trouble = problem || news?.problem || "";
    status.textContent = trouble ? `${words}: ${trouble}` : words;
    status.className = trouble ? "stale" : isLive && !isHeld ? "fresh" : "";
    hold.hidden = !isLive && !isHeld;
  }

  // -- the page

  // The page is not renewed while the user drags over a chart or has selected text.
  let isPressed = false;
  addEventListener("pointerdown", () => { isPressed = true; }, true);
  for (const kind of ["pointerup", "pointercancel"]) addEventListener(kind, () => { isPressed = false; setTimeout(update, 0); }, true);
  const isBusy = () => isPressed || !getSelection().isCollapsed;
  document.addEventListener("selectionchange", () => { if (getSelection().isCollapsed) update(); });

  async function update() {
    if (isFetching || isHeld || document.hidden || isBusy() || !news?.version || news.version === shown) return;
    isFetching = true;
    const began = performance.now();
    try {
      const answer = await torchlensAsk(location.pathname);
      if (!answer.ok) throw new Error(await answer.text());
      await renew(await answer.text());
      problem = "";
    } catch (error) {
      problem = `newer steps cannot be shown: ${error.message}`;
      await new Promise((done) => setTimeout(done, 5 * LEAST_GAP_MS));
    }
    say();
    // A slow browser rests for as long as the renewal took.
    await new Promise((done) => setTimeout(done, Math.max(LEAST_GAP_MS, performance.now() - began)));
    isFetching = false;
    update();
  }

  async function renew(text) {
    const next = new DOMParser().parseFromString(text, "text/html");
    if (!next.getElementById("contents")) throw new Error("reload this page");
    if (!window.torchlensPage) await new Promise((done) => addEventListener("torchlensready", done, { once: true }));
    await torchlensPage.update(text);
    const captured = next.getElementById("captured"), own = document.getElementById("captured");
    if (captured && own) own.replaceWith(document.adoptNode(captured));
    const summaries = [document, next].map((each) => each.querySelector("#captures > summary"));
    if (summaries.every(Boolean)) summaries[0].textContent = summaries[1].textContent;
    document.title = next.title;
    root.dataset.live = next.documentElement.dataset.live;
    shown = root.dataset.version = next.documentElement.dataset.version;
    document.getElementById("capture")?.toggleAttribute("hidden", root.dataset.live !== "running");
  }

  // -- news

  async function follow() {
    for (;; await new Promise((done) => setTimeout(done, POLL_MS))) {
      if (document.hidden) continue;
      try {
        const answer = await torchlensAsk("api/news");
        if (answer.status === 403) {
          problem = "the server does not accept this address. If it was restarted, open its new address";
          say();
          return;
        }
        news = await answer.json();
        problem = "";
      } catch { // The server or the connection to it has ended.
        problem = "the server does not answer";
      }
      say();
      update();
    }
  }

  follow();
  say();

  // -- captures

  const form = document.getElementById("capture"), said = document.getElementById("capture-status");

  async function json(address, options) {
    const answer = await torchlensAsk(address, options), value = await answer.json().catch(() => ({}));
    if (!answer.ok) throw new Error(value.problem ?? `the server answers ${answer.status}`);
    return value;
  }

  form?.addEventListener("submit", async (event) => {
    event.preventDefault();
    const button = form.querySelector("button");
    button.disabled = true;
    try {
      said.replaceChildren("Requesting \u2026");
      const asked = await json(`api/captures?${new URLSearchParams(new FormData(form))}`, { method: "POST" });
      const which = `rank${asked.ranks.length > 1 ? "s" : ""} ${asked.ranks.join(", ")}`;
      await followCapture(asked, `Requested: ${which}, ${asked.steps} step${asked.steps > 1 ? "s" : ""} from step ${asked.from_step} on.`);
    } catch (error) {
      said.replaceChildren(element("p", { className: "problem", text: error.message }));
    } finally {
      button.disabled = false;
    }
  });

  async function followCapture({ id }, words) {
    for (;;) {
      const { outcomes, waiting, is_over: isOver } = await json(`api/captures/${encodeURIComponent(id)}`);
      const left = !waiting.length ? "Done." : isOver ? `No answer from rank ${waiting.join(", ")}. The sidecar of the run may have ended.`
        : `Waiting for rank ${waiting.join(", ")}.`;
      said.replaceChildren(element("p", { text: `${words} ${left}` }), element("ul", {}, ...outcomes.map(outcomeLine)));
      if (isOver) return;
      await new Promise((done) => setTimeout(done, POLL_MS));
    }
  }

  function outcomeLine({ rank, words, files }) {
    const links = files.flatMap(({ name, bytes, address }) => [" ", element("a", { href: address, text: `${name} (${bytes} bytes)` })]);
    return element("li", {}, `rank ${rank}: ${words}.`, ...links);
  }
}
