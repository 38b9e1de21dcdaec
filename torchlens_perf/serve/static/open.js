// Opens the page at this address, which the server sends only with the token. The token is in the fragment of the printed
// address, which browsers send to no server. It is kept for this tab in sessionStorage, which belongs to the origin (host
// and port). Open tabs of the same origin pass it on to new tabs.
{
  const HEADER = "torchlens-perf-token", IN_FRAGMENT = /^#token=([\w-]+)/, OTHER_TABS_MS = 500;
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

  // Requests an address of this server. The page's content security policy forbids others.
  function ask(address, options = {}) {
    return fetch(address, { ...options, headers: { ...options.headers, [HEADER]: token }, redirect: "error" });
  }

  tabs.addEventListener("message", ({ data }) => {
    if (data.wanted && token && data.not !== token) tabs.postMessage({ token });
  });

  // Returns the token of another tab; "" if no tab has one, or only the refused one.
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

  // A plain link to a file would be requested without the token, so the script fetches the file.
  async function onClick(event) {
    const link = event.target.closest?.('a[href^="captures/"]');
    if (!link || event.button || event.ctrlKey || event.metaKey || event.shiftKey || event.altKey) return;
    event.preventDefault();
    const answer = await ask(link.href);
    if (answer.ok && isFile(answer)) return save(answer, fileName(link.href));
    link.after(` (${(await answer.text()).trim()})`);
  }

  function say(words) {
    const line = Object.assign(document.createElement("p"), { textContent: words });
    (document.querySelector("main") ?? document.body).replaceChildren(line);
  }

  async function open() {
    // A large run takes seconds to read. Without a token, the page already says what to do.
    if (token) say("Loading …");
    const answer = await answerHere();
    if (!answer) return;
    if (isFile(answer)) {
      say("The file is being saved.");
      return save(answer, fileName(location.href));
    }
    const text = await answer.text();
    if (!answer.headers.get("content-type")?.startsWith("text/html")) return say(text);
    // open() removes all listeners of this document and its window.
    document.open();
    document.addEventListener("click", onClick);
    addEventListener("hashchange", () => { if (takeFromAddress()) location.reload(); });
    document.write(text);
    document.close();
  }

  window.torchlensAsk = ask;
  takeFromAddress();
  addEventListener("hashchange", () => { if (takeFromAddress()) location.reload(); });
  open().catch((error) => say(`The server does not answer: ${error.message}`));
}
