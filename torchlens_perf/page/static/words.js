"use strict";
// The directive applies to all of the page's scripts, which document/scripts.py concatenates.

// Helpers of the page's scripts, and quantities as text in the format of analysis/statistics/quantities.py.
const torchlens = {};

{
  // Rounds ties to even, as the report's Python does; toFixed() rounds ties away from zero.
  torchlens.fixed = (value, digits) => {
    const scaled = value * 10 ** digits;
    const isTie = Number.isInteger(value * 2 ** (digits + 1)) && Math.abs(scaled % 1) === 0.5;
    return (isTie ? (2 * Math.round(scaled / 2)) / 10 ** digits : value).toFixed(digits);
  };

  torchlens.duration = (seconds) => {
    if (seconds === null || seconds === undefined || Number.isNaN(seconds)) return "not measured";
    for (const [unit, scale] of Object.entries({ s: 1, ms: 1e-3, us: 1e-6 })) {
      if (Math.abs(seconds) >= scale) {
        const value = seconds / scale;
        const size = Math.abs(value);
        return `${torchlens.fixed(value, size >= 100 ? 0 : size >= 10 ? 1 : 2)} ${unit}`;
      }
    }
    return `${torchlens.fixed(seconds * 1e9, 0)} ns`;
  };

  // Returns a function for axis labels, without trailing zeros.
  torchlens.tick = (text) => (value) =>
    value === 0
      ? "0"
      : text(value)
          .replace(/(\.\d*?)0+(?= )/, "$1")
          .replace(/\.(?= )/, "");

  torchlens.percent = (share) => {
    if (share === null || share === undefined || Number.isNaN(share)) return "not measured";
    return `${torchlens.fixed(share * 100, Math.abs(share) >= 0.1 ? 0 : 1)}%`;
  };

  // Returns a signed percentage, compared with other ranks.
  torchlens.signed = (share) => {
    if (Number.isNaN(share)) return "not compared";
    if (Math.abs(share) < 0.0005) return "0.0%";
    return share >= 0 ? `+${torchlens.percent(share)}` : `\u2212${torchlens.percent(-share)}`;
  };

  torchlens.amount = (count, unit) => {
    if (count === null || count === undefined || Number.isNaN(count)) return "not measured";
    for (const prefix of ["", "K", "M", "G", "T"]) {
      if (count < 1000 || prefix === "T") {
        return `${torchlens.fixed(count, !prefix || count >= 100 ? 0 : 1)} ${prefix}${unit}`;
      }
      count /= 1000;
    }
  };

  // Returns a telemetry value with its UCUM unit.
  torchlens.measured = (value, unit) => {
    if (value === null || value === undefined || Number.isNaN(value)) return "not measured";
    if (unit === "By") return torchlens.amount(value, "B");
    if (unit === "By/s") return torchlens.amount(value, "B/s");
    if (unit === "Hz") return `${(value / 1e6).toFixed(0)} MHz`;
    if (unit === "Cel") return `${value.toFixed(0)} \u00b0C`;
    const figures = Number(value.toPrecision(3));
    return unit === "1" ? String(figures) : `${figures} ${unit}`;
  };

  // Returns a user-chosen name as one line of bounded length, without characters that reverse the text direction. A
  // long name loses its middle. The result is used as text of an element or canvas, never as markup.
  torchlens.short = (text, longest = 60) => {
    const plain = String(text).replace(/[\p{Cc}\p{Cf}\p{Cs}\p{Co}\p{Zl}\p{Zp}]/gu, "?");
    if (plain.length <= longest) return plain;
    const half = Math.max(1, Math.floor((longest - 1) / 2));
    return `${plain.slice(0, half)}\u2026${plain.slice(-half)}`;
  };

  // Returns "step 7" or "steps 8 to 15" for the range [since, until).
  torchlens.steps = (since, until) => (until - since > 1 ? `steps ${since} to ${until - 1}` : `step ${since}`);

  // Returns a range scaled around `at`, which keeps its relative position.
  torchlens.zoomed = ([start, end], factor, at) => [at - (at - start) * factor, at + (end - at) * factor];

  // Returns a range moved and resized to lie inside another one.
  torchlens.inside = ([start, end], [first, last], least) => {
    const size = Math.min(last - first, Math.max(least, end - start));
    const from = Math.max(first, Math.min(last - size, start));
    return [from, from + size];
  };

  torchlens.partWord = (part) => TORCHLENS_THEME.parts[part] ?? part;

  const collator = new Intl.Collator("en", { numeric: true });
  torchlens.compare = (one, other) => collator.compare(String(one), String(other));

  // Creates an element with text, attributes and children.
  torchlens.element = (name, { className, text, ...attributes } = {}, ...children) => {
    const made = document.createElement(name);
    if (className) made.className = className;
    if (text !== undefined) made.textContent = text;
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.append(...children);
    return made;
  };

  torchlens.button = (text, pressed, attributes = {}) => {
    const made = torchlens.element("button", { type: "button", text, ...attributes });
    made.addEventListener("click", pressed);
    return made;
  };

  // Creates a select element with its label. show() receives options [value, text] and the chosen value.
  torchlens.choice = (label, name, chosen) => {
    const { element, short } = torchlens;
    const select = element("select", { name });
    select.addEventListener("change", () => chosen(select.value));
    const show = (options, value) => {
      select.replaceChildren(...options.map(([key, text]) => element("option", { value: key, text: short(text, 80) })));
      select.value = value;
      if (select.selectedIndex < 0) select.selectedIndex = 0;
    };
    return { label: element("label", {}, `${label} `, select), select, show };
  };
}
