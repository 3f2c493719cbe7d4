// Two stacked bars: what the step is made of, and what memory is made of at its peak.
import { h, figure } from "./dom.js";
import * as format from "./format.js";
import { MEMORY, MEMORY_WORDS, TIME } from "./kinds.js";

/** The step of one plan; `most` is the length of a full bar, for bars on one scale. */
export function timeBar(time, most = time.step_time_s) {
  const parts = time.parts.map((p) => ({ ...p, size: p.time_s, colour: TIME[p.kind] }));
  const hidden = time.hidden.map((p) => ({ ...p, size: p.time_s, colour: TIME[p.kind] }));
  const rows = parts.map((p) => row(p, time.step_time_s, format.seconds));
  const beside = hidden.map((p) => row({ ...p, name: `hidden: ${p.name}`, isHidden: true }, time.step_time_s, format.seconds));
  return h("div", { class: "bar-of", "data-bar": "time" },
    stacked(parts, most, format.seconds),
    hidden.length ? stacked(hidden, most, format.seconds, "hidden beside compute") : null,
    legend(rows, "step", time.step_time_s, format.seconds, beside));
}

export function memoryBar(memory, most = Math.max(memory.limit_bytes, memory.peak_bytes)) {
  const parts = memory.parts.map((p) => ({ ...p, size: p.size_bytes, colour: MEMORY[p.name] }));
  const bar = stacked(parts, most, format.bytes);
  const limit = h("div", {
    class: "limit", style: `left: ${(100 * memory.limit_bytes) / most}%`,
    title: `limit ${format.bytes(memory.limit_bytes)}`,
  });
  bar.append(limit);
  const rows = parts.map((p) => row(p, memory.peak_bytes, format.bytes, MEMORY_WORDS[p.name]));
  return h("div", { class: "bar-of", "data-bar": "memory" }, bar,
    legend(rows, "peak", memory.peak_bytes, format.bytes),
    h("p", { class: "small" }, "of ", figure(memory.limit_bytes, format.bytes, { "data-what": "limit" }),
      memory.at ? `; reached at ${memory.at}` : ""));
}

function stacked(parts, most, text, said = "") {
  return h("div", { class: said ? "bar hidden-part" : "bar", role: "img",
    "aria-label": [said, ...parts.map((p) => `${p.name} ${text(p.size)}`)].filter(Boolean).join(", ") },
    parts.map((p) => h("span", {
      class: "piece", style: `width: ${(100 * p.size) / most}%; background-color: ${p.colour}`,
      title: `${p.name}: ${text(p.size)}`,
    }, h("span", { class: "in-piece" }, p.size / most > 0.09 ? p.name : ""))));
}

function row(part, whole, text, said = "") {
  return h("tr", {},
    h("td", {}, h("span", { class: part.isHidden ? "swatch hatched" : "swatch", style: `background-color: ${part.colour}` }), part.name, said ? h("div", { class: "small said" }, said) : null),
    h("td", { class: "n" }, figure(part.size, text, { "data-part": part.name })),
    h("td", { class: "n" }, format.percent(part.size / whole)));
}

function legend(rows, name, whole, text, below = []) {
  return h("table", { class: "legend" }, h("tbody", {}, rows,
    h("tr", { class: "total" }, h("td", {}, name),
      h("td", { class: "n" }, figure(whole, text, { "data-what": name })), h("td", { class: "n" }, "100%")), below));
}
