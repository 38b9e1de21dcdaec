// The page's contents: decoding, and what is computed from them. Reads page/contents.py's JSON; draws nothing.
"use strict";

const torchlens = {};

{
  const NOT_MEASURED = 0, ZERO = 1, FIRST = 2;
  const FEW_RANKS = 16; // as analysis/stragglers/excess.py: of more, the median of all is that of the others

  async function inflated(text) {
    const packed = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
    return new Response(stream).arrayBuffer();
  }

  // Durations in seconds, row by row; NaN is what was not measured.
  async function decoded(matrix) {
    const bytes = new DataView(await inflated(matrix.codes));
    const values = new Float32Array(bytes.byteLength / 2);
    for (let at = 0; at < values.length; at++) {
      const code = bytes.getUint16(2 * at, true);
      values[at] = code === NOT_MEASURED ? NaN
        : code === ZERO ? 0 : matrix.smallest_s * Math.exp((code - FIRST) * matrix.log_step);
    }
    return values;
  }

  function median(ascending) {
    const middle = ascending.length >> 1;
    return ascending.length % 2 ? ascending[middle] : (ascending[middle - 1] + ascending[middle]) / 2;
  }

  // The median of the others, for the value at this place among ascending ones.
  function medianOfOthers(ascending, place) {
    if (ascending.length > FEW_RANKS) return median(ascending);
    const at = (index) => ascending[index < place ? index : index + 1];
    const others = ascending.length - 1;
    return (at((others - 1) >> 1) + at(others >> 1)) / 2;
  }

  // How much more work each rank has than the median of the others of its population, as a share of that median.
  function excess(work, places, columns) {
    const shares = new Float32Array(work.length).fill(NaN);
    const populations = new Map();
    places.forEach((place, row) => {
      if (!populations.has(place.population)) populations.set(place.population, []);
      populations.get(place.population).push(row);
    });
    for (const rows of populations.values()) {
      for (let column = 0; column < columns; column++) {
        const present = rows.filter((row) => !Number.isNaN(work[row * columns + column]));
        if (present.length < 2) continue;
        present.sort((one, other) => work[one * columns + column] - work[other * columns + column]);
        const ascending = present.map((row) => work[row * columns + column]);
        present.forEach((row, place) => {
          const others = medianOfOthers(ascending, place);
          if (others > 0) shares[row * columns + column] = work[row * columns + column] / others - 1;
        });
      }
    }
    return shares;
  }

  class Steps {
    constructor(contents, matrices) {
      const steps = contents.steps;
      this.places = steps.places;
      this.ranks = steps.places.length;
      this.first = steps.columns.first_steps;
      this.columns = this.first.length;
      this.width = steps.columns.width;
      this.flags = steps.columns.flags;
      this.started_s = steps.columns.started_s;
      this.bands = steps.bands;
      this.slow = steps.slow;
      this.memory_bytes = steps.memory_bytes;
      Object.assign(this, matrices); // step, work, parts, device_parts
      this.quantities = new Map([["excess", null], ["step", this.step], ["work", this.work]]);
      for (const [part, values] of this.parts) this.quantities.set(part, values);
      for (const [part, values] of this.device_parts) this.quantities.set(`device ${part}`, values);
    }

    get end() { return this.columns ? this.first[this.columns - 1] + this.width : 0; }

    values(quantity) {
      if (quantity === "excess" && this.quantities.get("excess") === null) {
        this.quantities.set("excess", excess(this.work, this.places, this.columns));
      }
      return this.quantities.get(quantity) ?? this.step;
    }

    column(step) {
      const at = this.first.findIndex((first) => step < first + this.width);
      return at < 0 ? this.columns - 1 : at;
    }

    // Columns [from, until) of the steps [since, end); all without a selection.
    range(selection) {
      if (!selection) return [0, this.columns];
      const from = this.column(selection[0]);
      return [from, Math.max(from + 1, this.column(Math.max(selection[0], selection[1] - 1)) + 1)];
    }

    // The mean of a row over columns; NaN where nothing was measured.
    mean(values, row, [from, until]) {
      let sum = 0, count = 0;
      for (let column = from; column < until; column++) {
        const value = values[row * this.columns + column];
        if (!Number.isNaN(value)) { sum += value; count++; }
      }
      return count ? sum / count : NaN;
    }
  }

  torchlens.read = async (contents) => {
    if (!contents.steps) return null;
    const many = async (matrices) => new Map(await Promise.all(
      Object.entries(matrices).map(async ([name, matrix]) => [name, await decoded(matrix)])));
    const [step, work, parts, device_parts] = await Promise.all([
      decoded(contents.steps.step), decoded(contents.steps.work),
      many(contents.steps.parts), many(contents.steps.device_parts),
    ]);
    return new Steps(contents, { step, work, parts, device_parts });
  };

  // -- values as text, as the report writes them

  torchlens.duration = (seconds) => {
    if (seconds === null || seconds === undefined || Number.isNaN(seconds)) return "not measured";
    const size = Math.abs(seconds);
    if (size >= 100) return `${seconds.toFixed(0)} s`;
    if (size >= 1) return `${seconds.toFixed(2)} s`;
    if (size >= 1e-3) return `${(seconds * 1e3).toPrecision(3)} ms`;
    return size ? `${(seconds * 1e6).toPrecision(3)} us` : "0 s";
  };
  torchlens.percent = (share) => (Number.isNaN(share) ? "not measured" : `${(share * 100).toFixed(1)} %`);
  torchlens.amount = (quantity, value) =>
    quantity === "excess" ? torchlens.percent(value) : torchlens.duration(value);
  // What a user can have named: never markup, never longer than a line.
  torchlens.short = (text, length = 60) => {
    const plain = String(text).replace(/[\p{Cc}\p{Cf}\p{Zl}\p{Zp}]/gu, "\ufffd");
    return plain.length > length ? `${plain.slice(0, length - 1)}\u2026` : plain;
  };
}
