// Decodes the page's contents (contents.py) and computes values from them. Draws nothing.
{
  const { duration, signed } = torchlens;

  // Decodes a matrix to seconds. NaN means not measured.
  async function decoded({ codes, smallest_s, log_step }) {
    const packed = atob(codes);
    const bytes = new Uint8Array(packed.length);
    for (let at = 0; at < packed.length; at++) bytes[at] = packed.charCodeAt(at);
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    const view = new DataView(await new Response(stream).arrayBuffer());
    const seconds = new Float32Array(view.byteLength / 2);
    for (let at = 0; at < seconds.length; at++) {
      const code = view.getUint16(2 * at, true);
      seconds[at] = code > 1 ? smallest_s * Math.exp((code - 2) * log_step) : code === 1 ? 0 : NaN;
    }
    return seconds;
  }

  // Returns the index of the last of the ascending values that does not exceed `value`; 0 if all exceed it.
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

  // Step data of shape [ranks, columns].
  class Steps {
    constructor(steps, matrices) {
      // The fields are step, work, others, parts and device_parts.
      Object.assign(this, matrices);
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

    has(step) {
      return step !== null && step >= this.begin && step < this.end;
    }

    // Returns "step 7", or the range of steps if the column is wider.
    words(column) {
      return torchlens.steps(this.first[column], this.first[column] + this.width);
    }

    // Returns a rank's values, with null where they were not measured.
    row(values, row) {
      const found = values.subarray(row * this.columns, (row + 1) * this.columns);
      return Array.from(found, (value) => (value === value ? value : null));
    }

    // Returns the column that contains a step, or the nearest column.
    column(step) {
      return torchlens.indexOf(this.first, step);
    }

    // Returns the columns [from, until) of the selected steps [since, end); all columns without a selection.
    range(selection) {
      if (!selection) return [0, this.columns];
      const from = this.column(selection[0]);
      return [from, Math.max(from, this.column(selection[1] - 1)) + 1];
    }

    // Returns the mean of a row over columns; NaN if nothing was measured.
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

    // Returns the mean of each row.
    means(values, range) {
      return this.places.map((_, row) => this.mean(values, row, range));
    }

    // Returns a comparison function for sorting rows: rows in `slow` first, then by decreasing mean.
    bySlowness(slow, means) {
      const down = (value) => (value === value ? value : -Infinity);
      return (one, other) =>
        slow.has(other) - slow.has(one) || down(means[other]) - down(means[one]) || one - other;
    }

    // Returns count, quantiles and the longest (with rank and step) of all ranks' steps in these columns.
    spread([from, until]) {
      const found = [];
      let longest = -1;
      for (let row = 0; row < this.ranks; row++) {
        for (let at = row * this.columns + from; at < row * this.columns + until; at++) {
          const value = this.step[at];
          if (value !== value) continue;
          found.push(value);
          if (longest < 0 || value > this.step[longest]) longest = at;
        }
      }
      if (!found.length) return null;
      const sorted = Float32Array.from(found).sort();
      const quantile = (share) => sorted[Math.max(1, Math.ceil(share * sorted.length)) - 1];
      return {
        count: sorted.length,
        p50_s: quantile(0.5),
        p95_s: quantile(0.95),
        max_s: this.step[longest],
        rank: this.places[Math.floor(longest / this.columns)].rank,
        column: longest % this.columns,
      };
    }
  }

  torchlens.read = async ({ steps }) => {
    if (!steps) return null;
    const named = async (matrices) =>
      new Map(await Promise.all(Object.entries(matrices).map(async ([name, matrix]) => [name, await decoded(matrix)])));
    return new Steps(steps, {
      step: await decoded(steps.step),
      work: await decoded(steps.work),
      others: await decoded(steps.others),
      parts: await named(steps.parts),
      device_parts: await named(steps.device_parts),
    });
  };

  // Names of the quantities that the heat map can show.
  const WORDS = new Map([["excess", "excess over the other ranks"], ["step", "step time"], ["work", "compute"]]);
  torchlens.quantityWords = (key) => {
    if (WORDS.has(key)) return WORDS.get(key);
    if (key.startsWith("device ")) return `${torchlens.partWord(key.slice(7))}, on the device`;
    return torchlens.partWord(key);
  };
  torchlens.quantityText = (key, value) => (key === "excess" ? signed(value) : duration(value));
}
