// The heat map's cells as pixels: of what is in sight, as fine as there is room for. Draws nothing by itself.
{
  const FULL_SCALE = 0.3;
  const LEVELS = 12;
  const NOTICED = 0.01; // as page/pictures/heat.py
  const SAMPLED = 1 << 16;

  // "#rrggbb" or "rgb(r, g, b)" as numbers.
  function channels(colour) {
    const hex = /^#([0-9a-f]{6})/i.exec(colour);
    if (hex) return [0, 2, 4].map((at) => parseInt(hex[1].slice(at, at + 2), 16));
    return (colour.match(/[\d.]+/g) ?? [128, 128, 128]).slice(0, 3).map(Number);
  }

  // As a pixel: bytes red, green, blue, opacity.
  function pixel([red, green, blue], opacity) {
    const bytes = new Uint8Array([red, green, blue, Math.round(255 * opacity)]);
    return new Uint32Array(bytes.buffer)[0];
  }

  // From a value to its colour. Not measured is a chequered grey, which no value has.
  class Scale {
    constructor(quantity, values, colours) {
      this.isShare = quantity === "excess";
      const unknown = channels(colours.unknown);
      this.unknown = [pixel(unknown, 0.16), pixel(unknown, 0.42)];
      if (this.isShare) {
        const [more, less] = [colours.more, colours.less].map(channels);
        const opacity = (level) => 0.15 + (0.85 * (level + 1)) / LEVELS;
        this.more = Array.from({ length: LEVELS }, (_, level) => pixel(more, opacity(level)));
        this.less = Array.from({ length: LEVELS }, (_, level) => pixel(less, opacity(level)));
        this.range = [-FULL_SCALE, FULL_SCALE];
      } else {
        this.palette = Bokeh.Palettes.Viridis256.map((colour) =>
          pixel([colour >>> 24, (colour >>> 16) & 255, (colour >>> 8) & 255], 1),
        );
        this.range = usual(values);
      }
    }

    at(value, isOdd) {
      if (value !== value) return this.unknown[isOdd];
      if (this.isShare) {
        if (Math.abs(value) < NOTICED) return 0;
        const level = Math.min(LEVELS, Math.ceil((Math.abs(value) / FULL_SCALE) * LEVELS)) - 1;
        return (value > 0 ? this.more : this.less)[level];
      }
      const [low, high] = this.range;
      const share = (value - low) / (high - low);
      return this.palette[Math.max(0, Math.min(255, Math.round(share * 255)))];
    }

    // Values with their colours, for the legend; null is what was not measured.
    legend() {
      if (this.isShare) return [-0.3, -0.1, 0, 0.03, 0.1, 0.2, 0.3].map((value) => [value, this.at(value, 0)]);
      const [low, high] = this.range;
      return [0, 0.25, 0.5, 0.75, 1].map((share) => [
        low + share * (high - low),
        this.at(low + share * (high - low), 0),
      ]);
    }
  }

  // From the 2nd to the 98th percentile, which rare steps do not move; from 0, where that is no large part of it.
  function usual(values) {
    const every = Math.max(1, Math.floor(values.length / SAMPLED));
    const known = [];
    for (let at = 0; at < values.length; at += every) if (values[at] === values[at]) known.push(values[at]);
    if (!known.length) return [0, 1];
    const sorted = Float32Array.from(known).sort();
    const low = sorted[Math.floor(0.02 * (sorted.length - 1))];
    const high = sorted[Math.ceil(0.98 * (sorted.length - 1))];
    if (!(high > 0)) return [0, 1e-9];
    return [low < 0.3 * high ? 0 : low, high > low ? high : low * 1.001];
  }

  // The pixels of rows [top, bottom) of `order` and columns [from, until), at most so many; where several cells are one
  // pixel, it is the largest of them. rows and columns: of each pixel, where its value is from. Pixels' rows go up.
  torchlens.heatPixels = (values, columns, order, [top, bottom], [from, until], most, scale) => {
    const down = Math.max(1, Math.ceil((bottom - top) / most.rows));
    const across = Math.max(1, Math.ceil((until - from) / most.columns));
    const height = Math.ceil((bottom - top) / down);
    const width = Math.ceil((until - from) / across);
    const pixels = new Uint32Array(height * width);
    const rows = new Int32Array(height * width);
    const found = new Int32Array(height * width);
    for (let y = 0; y < height; y++) {
      for (let x = 0; x < width; x++) {
        let largest = NaN;
        let row = order[top + y * down];
        let column = from + x * across;
        const lastColumn = Math.min(until, from + (x + 1) * across);
        const lastRow = Math.min(bottom, top + (y + 1) * down);
        for (let at = top + y * down; at < lastRow; at++) {
          const start = order[at] * columns;
          for (let each = from + x * across; each < lastColumn; each++) {
            const value = values[start + each];
            if (value === value && !(value <= largest)) {
              largest = value;
              row = order[at];
              column = each;
            }
          }
        }
        const index = (height - 1 - y) * width + x;
        pixels[index] = scale.at(largest, (x + y) & 1);
        rows[index] = row;
        found[index] = column;
      }
    }
    return { pixels, rows, columns: found, height, width, down, across };
  };

  torchlens.HeatScale = Scale;
  torchlens.cssColour = (value) => {
    const [red, green, blue, opacity] = new Uint8Array(new Uint32Array([value]).buffer);
    return `rgba(${red}, ${green}, ${blue}, ${(opacity / 255).toFixed(3)})`;
  };
}
