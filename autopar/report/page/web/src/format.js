// Quantities as text, by the rules of autopar/units.py.

const SECONDS = [[1, "s"], [1e-3, "ms"], [1e-6, "µs"], [1e-9, "ns"]];
const COUNTS = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"], [1, ""]];

export const NONE = "–";

export function bytes(size) {
  if (size === null || size === undefined) return NONE;
  let value = size;
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (Math.abs(Number(value.toFixed(1))) < 1024) {
      return unit === "B" ? `${fixed(value, 0)} B` : `${fixed(value, 1)} ${unit}`;
    }
    value /= 1024;
  }
  return `${fixed(value, 1)} TiB`;
}

export function seconds(time) {
  if (time === null || time === undefined) return NONE;
  return time === 0 ? "0 s" : threeDigits(time, SECONDS);
}

export function count(value) {
  return value === null || value === undefined ? NONE : threeDigits(value, COUNTS);
}

export function flops(rate) {
  return rate === null || rate === undefined ? NONE : `${count(rate)}FLOP/s`.replace(/(\d)FLOP/, "$1 FLOP");
}

export function days(value) {
  return value === null || value === undefined ? NONE : `${Number(value.toPrecision(3)).toLocaleString("en")} days`;
}

export function percent(share, digits = 1) {
  return share === null || share === undefined ? NONE : `${fixed(100 * share, digits)}%`;
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
  const decimals = Math.max(2 - Math.floor(Math.log10(Math.abs(scaled))), 0);
  const digits = Math.abs(scaled) >= 999.5 ? fixed(scaled, 0) : String(Number(fixed(scaled, decimals)));
  return `${digits} ${unit}`.trimEnd();
}

/** Rounds halves to even, as Python does. A number is halfway only if it is odd / 2^(digits + 1). */
function fixed(value, digits) {
  const twice = value * 2 ** (digits + 1);
  if (!Number.isInteger(twice) || twice % 2 === 0) return value.toFixed(digits);
  const below = Math.floor(value * 10 ** digits);
  return ((below % 2 === 0 ? below : below + 1) / 10 ** digits).toFixed(digits);
}
