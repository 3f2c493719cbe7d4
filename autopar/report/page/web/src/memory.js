// The bytes that a device holds over a step, stacked by kind, with the peak marked.
import * as Plot from "@observablehq/plot";
import { figure, h } from "./dom.js";
import * as format from "./format.js";
import { MEMORY } from "./kinds.js";
import { clock, partOf } from "./layers.js";

// A limit is drawn if the peak is above this share of it.
const LEAST_OF_LIMIT = 0.25;
const total = (sizes) => sizes.reduce((sum, size) => sum + size, 0);

/**
 * [{ time, sizes, text }] of a device: the phases of its stages (autopar/report/page/memory.py) laid over its actions.
 * A point is what the stages hold between actions, and what the action takes above that. Phases of a device with one
 * stage and whole backwards have the other microbatches in flight already.
 */
export function memoryCourse(live, timeline, device) {
  const points = [], stages = live.devices[device].stages.map((k) => new Stage(live, k)), [only] = stages;
  const isPlain = stages.length === 1 && !only.splits;
  const add = (time, sizes, text) => points.push({ time, sizes, text });
  const once = (name, start, end) => {
    const phases = stages.map((stage) => stage.of(name)[0]), [[, moments]] = phases;
    if (stages.length === 1) for (const [, sizes, text] of moments) add(start, sizes, live.texts[text]);
    else if (moments.length) add(start, plus(...phases.map(([, points, left]) => top(points) ?? left)), live.texts[moments[0][2]]);
    add(end, plus(...phases.map(([, , left]) => left)), "");
  };
  once("before", 0, 0);
  let last = 0;
  const own = timeline.events.filter(([k, lane]) => k === device && lane === 0).map(([, , action, start, end]) => [timeline.actions[action], start, end]);
  for (const [action, start, end] of own.sort((a, b) => a[1] - b[1])) {
    const part = partOf(action);
    if (!part) continue;
    const [k, letter, microbatch] = part, stage = stages.find(({ number }) => number === Number(k));
    const others = isPlain ? null : plus(...stages.map((s) => s.held()));
    const [, moments, left, before] = stage.begin(letter, Number(microbatch), isPlain);
    const time = clock(timeline, part, start, end), above = (sizes) => (isPlain ? plus(sizes, before) : plus(others, minus(sizes, before)));
    for (const [share, sizes, text] of moments) add(time(share), above(sizes), live.texts[text]);
    add(end, above(left), "");
    stage.end(letter);
    last = end;
  }
  const update = own.find(([action]) => action === "optimizer")?.[1] ?? timeline.step_time_s;
  once("after", last, update);
  once("optimizer", update, timeline.step_time_s);
  return points.map((point) => ({ ...point, size: total(point.sizes) }));
}

const plus = (...rows) => rows[0].map((_, k) => rows.reduce((sum, row) => sum + row[k], 0));
const minus = (a, b) => a.map((size, k) => size - b[k]);
const times = (n, sizes) => sizes.map((size) => n * size);
const top = (moments) => moments.map(([, sizes]) => sizes).reduce((a, b) => (a && total(a) >= total(b) ? a : b), null);
const NAMES = { F: "forward", B: "backward", I: "backward", W: "weights" };

/** A stage in a step: how many of its microbatches are in flight, wait for the gradients of weights, are done. */
class Stage {
  constructor(live, number) {
    Object.assign(this, live.stages[number], { number, nInFlight: 0, nWaiting: 0, nDone: 0 });
    this.splits = this.of("weights").length > 0;
    this.alone = (kind, size) => live.kinds.map((name) => (name === kind ? size : 0));
    const [before, forward, backward, weights] = this.phases.map(([, , left]) => left);
    this.before = before;
    this.after = this.splits ? weights : backward;
    this.keeps = minus(forward, before);
    this.waits = minus(backward, before);
  }

  of(name) { return this.phases.filter((phase) => phase[0] === name); }

  /** What it holds between actions. */
  held() {
    const always = this.nDone ? plus(this.after, this.alone("buffers", this.message)) : this.before;
    return plus(always, times(this.nInFlight, this.keeps), times(this.nWaiting, this.waits));
  }

  /** The phase of an action, and the bytes that its points have too few, or too many if others are laid below them. */
  begin(letter, microbatch, isPlain) {
    const profiles = this.of(NAMES[letter]), isLater = isPlain ? this.nDone > 0 : microbatch > 0;
    const phase = profiles[isLater ? profiles.length - 1 : 0];
    if (letter === "F") this.nInFlight += 1;
    const more = (this.nInFlight - 1) * this.kept - phase[3];
    return [...phase.slice(0, 3), isPlain ? this.alone("activations", more) : this.phases[this.phases.indexOf(phase) - 1][2]];
  }

  end(letter) {
    if (letter === "B" || letter === "I") this.nInFlight -= 1;
    this.nWaiting += { I: 1, W: -1 }[letter] ?? 0;
    this.nDone += { B: 1, W: 1 }[letter] ?? 0;
  }
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
  const { held, peak: [size, text] } = live.devices[device];
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
