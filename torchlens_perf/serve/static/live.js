// Follows a run: when the server says that there is something newer, fetches the page and takes what is new from it.
"use strict";

{
  const status = document.getElementById("live-status");
  let fetching = false, newest = 0, shown = 0;

  async function update() {
    if (fetching) return;
    fetching = true;
    try {
      while (shown < newest) {
        const wanted = newest;
        const answer = await fetch(".");
        if (!answer.ok) throw new Error(await answer.text());
        const text = await answer.text();
        if (!window.torchlensPage) await new Promise((done) => addEventListener("torchlensready", done, { once: true }));
        await window.torchlensPage.update(text);
        shown = wanted;
        status.textContent = `follows the run; read at ${new Date().toLocaleTimeString()}`;
      }
    } catch (error) {
      status.textContent = `cannot be read just now: ${error.message}`;
    } finally {
      fetching = false;
    }
  }

  if (document.documentElement.dataset.live === "running") {
    const source = new EventSource("api/changes");
    source.addEventListener("changed", (event) => { newest = Number(event.data); update(); });
    source.addEventListener("ended", () => {
      source.close();
      location.reload(); // the final report, with everything in it
    });
    source.addEventListener("problem", (event) => { status.textContent = `cannot be read just now: ${event.data}`; });
    source.onerror = () => { status.textContent = "the server does not answer; waiting for it"; };
  }

  const form = document.getElementById("capture"), said = document.getElementById("capture-status");
  form?.addEventListener("submit", async (event) => {
    event.preventDefault();
    said.textContent = "asking \u2026";
    try {
      const asked = await fetch("api/captures", { method: "POST", body: new URLSearchParams(new FormData(form)) });
      const answer = await asked.json();
      if (!asked.ok) throw new Error(answer.problem);
      await follow(answer.id, answer.ranks);
    } catch (error) {
      said.textContent = error.message;
    }
  });

  async function follow(id, ranks) {
    for (;;) {
      const answer = await (await fetch(`api/captures/${encodeURIComponent(id)}`)).json();
      said.replaceChildren(`${answer.outcomes.length} of ${ranks} ranks have answered. `);
      for (const outcome of answer.outcomes) {
        const line = document.createElement("div");
        line.append(`${outcome.line} `);
        for (const file of outcome.files) {
          const link = document.createElement("a");
          link.href = `captures/${file.path.split("/").slice(1).map(encodeURIComponent).join("/")}`;
          link.textContent = `${file.path.split("/").at(-1)} (${file.bytes} bytes)`;
          line.append(link, " ");
        }
        said.append(line);
      }
      if (answer.outcomes.length >= ranks || answer.over) return;
      await new Promise((done) => setTimeout(done, 1000));
    }
  }
}
