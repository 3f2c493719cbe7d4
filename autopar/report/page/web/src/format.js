// Quantities as text, by the rules of autopar/units.py.

const SECONDS = [[1, "s"], [1e-3, "ms"], [1e-6, "µs"], [1e-9, "ns"]];
const COUNTS = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"], [1, ""]];

export const NONE = "–";

export function bytes(size) {
  if (size === null || size === undefined) return NONE;
  let value = size;
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (Math.abs(Number(value.toFixed(1))) < 1024) {
      return unit === "B" ? `${value.toFixed(0)} B` : `${value.toFixed(1)} ${unit}`;
    }
    value /= 1024;
  }
  return `${value.toFixed(1)} TiB`;
}

export function seconds(time) {
  if (time === null || time === undefined) return NONE;
  return time === 0 ? "0 s" : threeDigits(time, SECONDS);
}

export function count(value) {
  return value === null || value === undefined ? NONE : threeDigits(value, COUNTS);
}

export function percent(share, digits = 1) {
  return share === null || share === undefined ? NONE : `${(100 * share).toFixed(digits)}%`;
}

/** `+12.3%`, `-4.0%`. */
export function gain(share) {
  if (share === null || share === undefined) return NONE;
  return Math.abs(share) < 0.0005 ? "nothing" : `${share > 0 ? "+" : ""}${percent(share)}`;
}

export function shape(sizes) {
  return sizes.length ? sizes.join("×") : "scalar";
}

function threeDigits(value, scales) {
  const rounded = Number(value.toPrecision(3));
  const [scale, unit] = scales.find(([least]) => Math.abs(rounded) >= least) ?? scales.at(-1);
  const scaled = value / scale;
  const digits = Math.abs(scaled) >= 999.5 ? scaled.toFixed(0) : String(Number(scaled.toPrecision(3)));
  return `${digits} ${unit}`.trimEnd();
}
