// Follows a run: hears from the server that there is something newer, fetches the page when it can, and renews what differs.
// Asks for captures, and shows what comes of them.
{
  const LEAST_GAP_MS = 1000, POLL_MS = 1000, RETRY_MS = 3000;
  const root = document.documentElement, status = document.getElementById("live-status");
  let shown = root.dataset.version, news = null, isFetching = false, isHeld = false, source = null, problem = "";

  function element(name, properties = {}, ...children) {
    const made = Object.assign(document.createElement(name), properties);
    made.append(...children);
    return made;
  }

  // -- what is said

  const hold = element("button", { type: "button", textContent: "hold still" });
  hold.setAttribute("aria-pressed", "false");
  hold.addEventListener("click", () => {
    isHeld = !isHeld;
    hold.setAttribute("aria-pressed", String(isHeld));
    say();
    update();
  });
  status.after(hold);

  function say() {
    const isOld = news !== null && news.version !== shown, isLive = root.dataset.live === "running";
    const written = new Date(window.torchlensPage?.contents.written ?? "");
    const asOf = Number.isNaN(written.valueOf()) ? "" : `, as of ${written.toLocaleTimeString("en-GB")}`;
    let words = isLive ? `follows the run${asOf}` : "the run has ended";
    if (isHeld) words = isOld ? "held still: there is something newer" : "held still";
    const trouble = problem || news?.problem || "";
    status.textContent = trouble ? `${words}, but ${trouble}` : words;
    status.className = trouble ? "stale" : isLive && !isHeld ? "fresh" : "";
    hold.hidden = !isLive && !isHeld;
  }

  // -- the page

  // Somebody drags over a chart, or has marked a text to copy it: the page waits.
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
      problem = `there is something newer that cannot be shown: ${error.message}`;
      await new Promise((done) => setTimeout(done, 5 * LEAST_GAP_MS));
    }
    say();
    // A slow browser is given as much rest as its work takes.
    await new Promise((done) => setTimeout(done, Math.max(LEAST_GAP_MS, performance.now() - began)));
    isFetching = false;
    update();
  }

  async function renew(text) {
    const next = new DOMParser().parseFromString(text, "text/html");
    if (!next.getElementById("contents")) throw new Error("load this page anew");
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

  // -- what the server sends

  // Not while the page is hidden: a browser has six connections to a server, for all of its tabs.
  function listen() {
    if (document.hidden === (source === null)) return;
    if (document.hidden) {
      source.abort();
      source = null;
      return;
    }
    source = new AbortController();
    follow(source.signal);
  }

  // Server-sent events. EventSource sends no header, so it cannot send the token.
  async function follow(signal) {
    while (!signal.aborted) {
      problem = "the server does not answer; waiting for it";
      try {
        const answer = await torchlensAsk("api/changes", { signal });
        if (answer.status === 403) {
          problem = "the server refuses: was it started anew? Open its new address";
          say();
          return;
        }
        if (answer.ok) await receive(answer.body.pipeThrough(new TextDecoderStream()).getReader());
      } catch { // the connection has ended
      }
      if (signal.aborted) return;
      say();
      await new Promise((done) => setTimeout(done, RETRY_MS));
    }
  }

  async function receive(reader) {
    for (let text = "", next = await reader.read(); !next.done; next = await reader.read()) {
      const events = (text + next.value).split("\n\n");
      text = events.pop();
      for (const event of events) {
        const data = event.split("\n").find((line) => line.startsWith("data: "));
        if (!data) continue;
        news = JSON.parse(data.slice("data: ".length));
        problem = "";
        say();
        update();
      }
    }
    problem = "the server does not answer; waiting for it";
  }

  document.addEventListener("visibilitychange", listen);
  listen();
  say();

  // -- captures

  const form = document.getElementById("capture"), said = document.getElementById("capture-status");

  async function json(address, options) {
    const answer = await torchlensAsk(address, options), value = await answer.json().catch(() => ({}));
    if (!answer.ok) throw new Error(value.problem ?? `the server says ${answer.status}`);
    return value;
  }

  form?.addEventListener("submit", async (event) => {
    event.preventDefault();
    const button = form.querySelector("button");
    button.disabled = true;
    try {
      said.replaceChildren("asking \u2026");
      const asked = await json("api/captures", { method: "POST", body: new URLSearchParams(new FormData(form)) });
      const which = `rank${asked.ranks.length > 1 ? "s" : ""} ${asked.ranks.join(", ")}`;
      await followCapture(asked, `Asked: ${which}, ${asked.steps} step${asked.steps > 1 ? "s" : ""} from step ${asked.from_step} on.`);
    } catch (error) {
      said.replaceChildren(element("p", { className: "problem", textContent: error.message }));
    } finally {
      button.disabled = false;
    }
  });

  async function followCapture({ id }, words) {
    for (;;) {
      const { outcomes, waiting, is_over: isOver } = await json(`api/captures/${encodeURIComponent(id)}`);
      const left = !waiting.length ? "All have answered." : isOver ? `No answer from ${waiting.join(", ")}: the run's sidecar may have ended.`
        : `Waiting for ${waiting.join(", ")}.`;
      said.replaceChildren(element("p", { textContent: `${words} ${left}` }), element("ul", {}, ...outcomes.map(outcomeLine)));
      if (isOver) return;
      await new Promise((done) => setTimeout(done, POLL_MS));
    }
  }

  function outcomeLine({ rank, words, files }) {
    const links = files.flatMap(({ name, bytes, address }) => [" ", element("a", { href: address, textContent: `${name} (${bytes} bytes)` })]);
    return element("li", {}, `rank ${rank}: ${words}.`, ...links);
  }
}
