// Keeps the list of runs as it is, while somebody looks at it.
{
  const SOON_MS = 1000, LATER_MS = 5000; // while runs are being read, and else

  async function renew() {
    if (document.hidden) return;
    const answer = await torchlensAsk(location.pathname + location.search);
    if (!answer.ok) throw new Error(await answer.text());
    const next = new DOMParser().parseFromString(await answer.text(), "text/html").querySelector("main");
    const focused = document.activeElement?.getAttribute("href");
    document.querySelector("main").replaceWith(document.adoptNode(next));
    if (focused) document.querySelector(`main a[href="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true });
  }

  async function follow() {
    for (;;) {
      const reading = document.querySelector("main").dataset.reading !== undefined;
      await new Promise((done) => setTimeout(done, reading ? SOON_MS : LATER_MS));
      if (!getSelection().isCollapsed) continue; // somebody copies from it
      try {
        await renew();
      } catch (error) { // the server has ended, or the token is another one's
        document.querySelector("main .problem")?.remove();
        const words = document.createElement("p");
        words.className = "problem";
        words.setAttribute("role", "status");
        words.textContent = `This list is old: ${error.message}`;
        document.querySelector("main").prepend(words);
      }
    }
  }

  follow();
}
