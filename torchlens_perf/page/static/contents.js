// The page's contents (contents.py): decoding, and what is computed from them. Draws nothing.
{
  const { duration, signed } = torchlens;
  const NOT_MEASURED = 0;
  const ZERO = 1;
  const FIRST = 2;
  const CODES = 1 << 16;

  async function inflated(text) {
    const packed = atob(text);
    const bytes = new Uint8Array(packed.length);
    for (let at = 0; at < packed.length; at++) bytes[at] = packed.charCodeAt(at);
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    return new Response(stream).arrayBuffer();
  }

  // Seconds by code. NaN is what was not measured.
  function table({ smallest_s, log_step }) {
    const seconds = new Float32Array(CODES);
    for (let code = FIRST; code < CODES; code++) seconds[code] = smallest_s * Math.exp((code - FIRST) * log_step);
    seconds[NOT_MEASURED] = NaN;
    seconds[ZERO] = 0;
    return seconds;
  }

  const isLittleEndian = new Uint8Array(new Uint16Array([1]).buffer)[0] === 1;

  async function codesOf(matrix) {
    const buffer = await inflated(matrix.codes);
    const codes = new Uint16Array(buffer);
    if (!isLittleEndian) for (let at = 0; at < codes.length; at++) codes[at] = (codes[at] >> 8) | (codes[at] << 8);
    return codes;
  }

  function decoded(codes, seconds) {
    const values = new Float32Array(codes.length);
    for (let at = 0; at < codes.length; at++) values[at] = seconds[codes[at]];
    return values;
  }

  // The index of the last of the ascending values that is not above this one; 0 where all are.
  torchlens.indexOf = (ascending, value) => {
    let low = 0;
    let high = ascending.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (ascending[middle] <= value) low = middle;
      else high = middle - 1;
    }
    return low;
  };

  // [ranks, columns] of all that is known of steps.
  class Steps {
    constructor(steps, matrices) {
      Object.assign(this, matrices); // step, work, others, parts, device_parts; codes and seconds of step
      this.places = steps.places;
      this.ranks = steps.places.length;
      this.rowOf = new Map(steps.places.map((place, row) => [place.rank, row]));
      this.first = steps.columns.first_steps;
      this.columns = this.first.length;
      this.width = steps.columns.width;
      this.flags = steps.columns.flags;
      this.started_s = steps.columns.started_s;
      this.bands = steps.bands;
      this.slow = steps.slow;
      this.memory_bytes = steps.memory_bytes;
      this.begin = this.first[0] ?? 0;
      this.end = this.columns ? this.first[this.columns - 1] + this.width : this.begin + 1;
      this.quantities = new Map([
        ["excess", this.work.map((work, at) => work / this.others[at] - 1)],
        ["step", this.step],
        ["work", this.work],
      ]);
      for (const [part, values] of this.parts) this.quantities.set(part, values);
      for (const [part, values] of this.device_parts) this.quantities.set(`device ${part}`, values);
    }

    values(quantity) {
      return this.quantities.get(quantity);
    }

    // A rank's values, with null for what was not measured.
    row(values, row) {
      const found = values.subarray(row * this.columns, (row + 1) * this.columns);
      return Array.from(found, (value) => (value === value ? value : null));
    }

    // The column that a step is in; the nearest one where it is in none.
    column(step) {
      return torchlens.indexOf(this.first, step);
    }

    // Columns [from, until) of the steps [since, end); all without a selection.
    range(selection) {
      if (!selection) return [0, this.columns];
      const from = this.column(selection[0]);
      return [from, Math.max(from, this.column(selection[1] - 1)) + 1];
    }

    // The mean of a row over columns; NaN where nothing was measured.
    mean(values, row, [from, until]) {
      let sum = 0;
      let count = 0;
      for (let at = row * this.columns + from; at < row * this.columns + until; at++) {
        const value = values[at];
        if (value === value) {
          sum += value;
          count++;
        }
      }
      return count ? sum / count : NaN;
    }

    // Of all ranks' steps in these columns: how many there are, quantiles, and the longest with its place.
    spread([from, until]) {
      const counts = new Uint32Array(CODES);
      let count = 0;
      let longest = 0;
      let at = -1;
      for (let row = 0; row < this.ranks; row++) {
        for (let index = row * this.columns + from; index < row * this.columns + until; index++) {
          const code = this.codes[index];
          if (code === NOT_MEASURED) continue;
          counts[code]++;
          count++;
          if (code > longest) {
            longest = code;
            at = index;
          }
        }
      }
      const quantile = (share) => {
        let left = Math.max(1, Math.ceil(share * count));
        let code = 0;
        while (left > 0 && ++code < CODES) left -= counts[code];
        return this.seconds[code];
      };
      if (!count) return null;
      const row = Math.floor(at / this.columns);
      return {
        count,
        p50_s: quantile(0.5),
        p95_s: quantile(0.95),
        max_s: this.seconds[longest],
        rank: this.places[row].rank,
        column: at - row * this.columns,
      };
    }
  }

  torchlens.read = async ({ steps }) => {
    if (!steps) return null;
    const tables = new Map(); // all matrices of a page are usually coded alike
    const tableOf = (matrix) => {
      const key = `${matrix.smallest_s} ${matrix.log_step}`;
      if (!tables.has(key)) tables.set(key, table(matrix));
      return tables.get(key);
    };
    const values = async (matrix) => decoded(await codesOf(matrix), tableOf(matrix));
    const named = async (matrices) =>
      new Map(await Promise.all(Object.entries(matrices).map(async ([name, matrix]) => [name, await values(matrix)])));
    const [codes, work, others, parts, device_parts] = await Promise.all([
      codesOf(steps.step),
      values(steps.work),
      values(steps.others),
      named(steps.parts),
      named(steps.device_parts),
    ]);
    const seconds = tableOf(steps.step);
    return new Steps(steps, { codes, seconds, step: decoded(codes, seconds), work, others, parts, device_parts });
  };

  // What the heat map can show: [key, words, whether it is a share].
  torchlens.quantityWords = (key) => {
    if (key === "excess") return "excess over the other ranks";
    if (key === "step") return "step time";
    if (key === "work") return "compute";
    if (key.startsWith("device ")) return `${torchlens.partWord(key.slice(7))}, on the device`;
    return torchlens.partWord(key);
  };
  torchlens.quantityText = (key, value) => (key === "excess" ? signed(value) : duration(value));
}
