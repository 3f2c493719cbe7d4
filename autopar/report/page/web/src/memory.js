// The bytes that a device holds over a step, stacked by kind, with the peak marked.
import * as Plot from "@observablehq/plot";
import { figure, h } from "./dom.js";
import * as format from "./format.js";
import { MEMORY } from "./kinds.js";
import { clock, partOf } from "./layers.js";

// A limit is drawn if the peak is above this share of it.
const LEAST_OF_LIMIT = 0.25;
const total = (sizes) => sizes.reduce((sum, size) => sum + size, 0);

/** [{ time, sizes, text }] of a device: its phases (autopar/report/page/memory.py) laid over its actions. */
export function memoryCourse(live, timeline, device) {
  const { phases, kept } = live.stages[device], at = live.kinds.indexOf("activations"), points = [];
  const of = (name) => phases.filter((phase) => phase[0] === name);
  const [before] = of("before"), [after] = of("after"), [optimizer] = of("optimizer");
  const forwards = of("forward"), backwards = of("backward");
  const add = (time, sizes, text, more = 0) => points.push({ time, sizes: more ? sizes.map((size, k) => (k === at ? size + more : size)) : sizes, text });
  const lay = ([, moments, left, others], start, end, time, isOf, nOthers) => {
    const more = isOf ? nOthers * kept - others : 0;
    for (const [share, sizes, text] of moments) add(time(share), sizes, live.texts[text], more);
    add(end, left, "", more);
  };
  lay(before, 0, 0, () => 0, false);
  const inFlight = new Set();
  let nDone = 0, last = 0;
  const own = timeline.events.filter(([k, lane]) => k === device && lane === 0).map(([, , action, start, end]) => [timeline.actions[action], start, end]);
  for (const [action, start, end] of own.sort((a, b) => a[1] - b[1])) {
    const part = partOf(action);
    if (!part) continue;
    const isForward = part[1] === "F", profiles = isForward ? forwards : backwards;
    inFlight.add(part[2]);
    lay(profiles[nDone ? profiles.length - 1 : 0], start, end, clock(timeline, part, start, end), true, inFlight.size - 1);
    if (!isForward) { inFlight.delete(part[2]); nDone += 1; }
    last = end;
  }
  const update = own.find(([action]) => action === "optimizer")?.[1] ?? timeline.step_time_s;
  lay(after, last, update, () => last, false);
  lay(optimizer, update, timeline.step_time_s, () => update, false);
  return points.map((point) => ({ ...point, size: total(point.sizes) }));
}

export const highest = (points) => points.reduce((a, b) => (b.size > a.size ? b : a));

/** What is seen from `from` to `to`: of the points of a pixel the first, the highest and the lowest. */
function seen(points, from, to, pixel) {
  const first = Math.max(points.findLastIndex((p) => p.time <= from), 0), after = points.findIndex((p) => p.time > to);
  const shown = points.slice(first, after < 0 ? points.length : after + 1), found = [];
  for (let k = 0; k < shown.length;) {
    let end = k + 1;
    while (end < shown.length && shown[end].time < shown[k].time + pixel) end += 1;
    const of = shown.slice(k, end);
    found.push(...new Set([of[0], highest(of), of.reduce((a, b) => (b.size < a.size ? b : a)), of.at(-1)]));
    k = end;
  }
  return found;
}

export function memoryPlot(live, points, limit, { from, to, pixel, ...frame }) {
  const peak = highest(points), isNear = peak.size > LEAST_OF_LIMIT * limit, top = (isNear ? Math.max(limit, peak.size) : peak.size) * 1.12, shown = seen(points, from, to, pixel);
  const layers = live.kinds.map((kind, k) => Plot.areaY(shown, {
    x: "time", y1: (p) => total(p.sizes.slice(0, k)), y2: (p) => total(p.sizes.slice(0, k + 1)), curve: "step-after", fill: MEMORY[kind], clip: true,
  }));
  const isShown = peak.time >= from && peak.time <= to, isRight = peak.time > (from + to) / 2;
  const mark = { x: "time", y: "size", text: (p) => `peak ${format.bytes(p.size)}`, dy: -8, dx: isRight ? -6 : 6, textAnchor: isRight ? "end" : "start", fontWeight: "bold", stroke: "var(--paper)", fill: "var(--ink)" };
  return Plot.plot({
    ...frame, height: 200, marginTop: 14, marginBottom: 26,
    y: { domain: [0, top], label: null, tickFormat: (b) => format.bytes(b), ticks: binaryTicks(top), grid: true },
    marks: [...layers, Plot.lineY(shown, { x: "time", y: "size", curve: "step-after", stroke: "currentColor", strokeWidth: 0.8, clip: true }),
      ...(isNear ? [Plot.ruleY([limit], { stroke: "currentColor", strokeDasharray: "4 3" })] : []),
      Plot.text([limit], { y: () => (isNear ? limit : top), frameAnchor: "left", dx: 4, dy: isNear ? -6 : 6, textAnchor: "start", text: () => `limit ${format.bytes(limit)}${isNear ? "" : ", off this scale"}` }),
      ...(isShown ? [Plot.dot([peak], { x: "time", y: "size", r: 4, fill: "var(--ink)", stroke: "var(--paper)" }), Plot.text([peak], mark)] : [])],
  });
}

/** `at 12.3 ms, backward of lm_head linear: 38.6 GiB: activations 30.1 GiB, ...`. */
export function said(live, points, time) {
  const point = points.findLast((p) => p.time <= time) ?? points[0];
  const parts = live.kinds.map((kind, k) => [kind, point.sizes[k]]).filter(([, size]) => size).sort((a, b) => b[1] - a[1]);
  return `${format.seconds(time)}${point.text ? `, ${point.text}` : ""}: ${format.bytes(point.size)}: ${parts.map(([kind, size]) => `${kind} ${format.bytes(size)}`).join(", ")}`;
}

/** What is held at the peak of a device, by operator and kind. */
export function heldAtPeak(live, device) {
  const { held, peak: [size, text] } = live.stages[device];
  return h("details", { class: "held" }, h("summary", {}, `what is held at the peak, ${format.bytes(size)}${text ? `, at ${text}` : ""}`),
    h("div", { class: "scroll" }, h("table", { id: "held-rows" }, h("tbody", {}, held.map(([kind, what, n, bytes]) => h("tr", {},
      h("td", {}, h("span", { class: "swatch", style: `background-color: ${MEMORY[kind]}` }), kind), h("td", {}, h("code", {}, what), n > 1 ? ` ×${n}` : ""),
      h("td", { class: "n" }, figure(bytes, format.bytes)), h("td", { class: "n" }, format.percent(bytes / size))))))));
}

/** A few round numbers of KiB, MiB, GiB, ... up to `top`. */
function binaryTicks(top) {
  const unit = 1024 ** Math.floor(Math.log(top) / Math.log(1024));
  const step = [1, 2, 5, 10, 20, 50, 100, 200, 500].find((n) => top / (n * unit) <= 5) ?? 1000;
  return Array.from({ length: Math.floor(top / (step * unit)) + 1 }, (_, k) => k * step * unit);
}
