// Opens the page at this address. The server gives it out for the token alone, which the address that it prints has in its
// fragment: browsers send that to no server. The token is kept for this tab in sessionStorage, which belongs to the origin,
// host and port. Tabs of the same origin that are open give it to new ones.
{
  const HEADER = "torchlens-perf-token", IN_FRAGMENT = /^#token=([\w-]+)/, OTHER_TABS_MS = 500, AGAIN_MS = 2000;
  const root = new URL("..", document.currentScript.src).pathname, key = `torchlens_perf:${root}`;
  const tabs = new BroadcastChannel(key);
  let token = sessionStorage.getItem(key) ?? "";

  function keep(found) {
    token = found;
    sessionStorage.setItem(key, token);
  }

  function takeFromAddress() {
    const found = location.hash.match(IN_FRAGMENT);
    if (!found) return false;
    keep(found[1]);
    history.replaceState(history.state, "", location.pathname + location.search);
    return true;
  }

  // Of this server's addresses only: the page's policy allows no others.
  function ask(address, options = {}) {
    return fetch(address, { ...options, headers: { ...options.headers, [HEADER]: token }, redirect: "error" });
  }

  tabs.addEventListener("message", ({ data }) => {
    if (data.wanted && token && data.not !== token) tabs.postMessage({ token });
  });

  // A token of another tab; "" where none has one, or only this one that the server has refused.
  function fromOtherTabs(refused) {
    return new Promise((done) => {
      const waiting = setTimeout(() => done(""), OTHER_TABS_MS);
      tabs.addEventListener("message", function heard({ data }) {
        if (!data.token || data.token === refused) return;
        tabs.removeEventListener("message", heard);
        clearTimeout(waiting);
        done(data.token);
      });
      tabs.postMessage({ wanted: true, not: refused });
    });
  }

  async function answerHere() {
    const here = location.pathname + location.search, page = { headers: { accept: "text/html" } };
    let answer = token ? await ask(here, page) : null;
    if (answer === null || answer.status === 403) {
      const other = await fromOtherTabs(token);
      if (other) {
        keep(other);
        answer = await ask(here, page);
      }
    }
    return answer;
  }

  async function save(answer, name) {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(await answer.blob());
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
  }

  const fileName = (address) => decodeURIComponent(new URL(address, location.href).pathname.split("/").pop());
  const isFile = (answer) => answer.headers.get("content-disposition")?.startsWith("attachment");

  // A link to a file would be followed without the token.
  async function onClick(event) {
    const link = event.target.closest?.('a[href^="captures/"]');
    if (!link || event.button || event.ctrlKey || event.metaKey || event.shiftKey || event.altKey) return;
    event.preventDefault();
    const answer = await ask(link.href);
    if (answer.ok && isFile(answer)) return save(answer, fileName(link.href));
    link.after(` (${(await answer.text()).trim()})`);
  }

  function say(words) {
    const place = document.querySelector("main") ?? document.body, line = document.createElement("p");
    line.textContent = words;
    place.replaceChildren(line);
  }

  async function open() {
    const answer = await answerHere();
    if (answer === null || answer.status === 403) return; // what the page says already
    if (isFile(answer)) {
      say("The file is being saved.");
      return save(answer, fileName(location.href));
    }
    const text = await answer.text();
    if (!answer.headers.get("content-type")?.startsWith("text/html")) {
      say(text);
      if (answer.status === 503) setTimeout(start, AGAIN_MS); // a disk that is slow, or a busy machine
      return;
    }
    document.open(); // takes away all listeners of this document and its window
    document.addEventListener("click", onClick);
    addEventListener("hashchange", () => { if (takeFromAddress()) location.reload(); });
    document.write(text);
    document.close();
  }

  function start() {
    open().catch((error) => say(`The server does not answer: ${error.message}`));
  }

  window.torchlensAsk = ask;
  takeFromAddress();
  addEventListener("hashchange", () => { if (takeFromAddress()) location.reload(); });
  start();
}
