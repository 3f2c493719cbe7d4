// The simulated step: what each stage does when, by layer where there is room, and its memory below.
import * as Plot from "@observablehq/plot";
import { select } from "d3-selection";
import { zoom, zoomIdentity } from "d3-zoom";
import { h } from "./dom.js";
import * as format from "./format.js";

const LEFT = 150, RIGHT = 16, ROW = 22;
const COLOURS = {
  forward: "#56b4e9", backward: "#e69f00", "once a step": "#999999", collectives: "#d55e00", messages: "#cc79a7",
};
const LANES = ["compute", "collectives", "messages"];
// An action is cut into its layers where a layer has at least so many pixels.
const LEAST_PIXELS = 3;

export class TimelineView {
  constructor(timeline, limitBytes, links) {
    this.timeline = timeline;
    this.links = links; // of layers, into the generated code
    this.limitBytes = limitBytes;
    this.domain = [0, timeline.step_time_s];
    const fullest = this.fullest();
    this.device = h("select", { id: "memory-of", "aria-label": "memory of", onchange: () => this.draw() },
      timeline.devices.map((name, k) => h("option", { value: k, selected: k === fullest }, `memory of ${name}`)));
    this.plots = h("div", { class: "plots", tabindex: 0, role: "group", "aria-label": "timeline of a step" });
    this.range = h("span", { class: "small", role: "status", id: "timeline-range" });
    const button = (id, text, act) => h("button", { type: "button", id, onclick: act }, text);
    this.element = h("div", { class: "timeline-box" }, h("div", { class: "tools" },
      button("time-in", "+", () => this.scale(2)), button("time-out", "−", () => this.scale(0.5)), button("time-fit", "whole step", () => this.reset()),
      this.device, button("perfetto", "save for Perfetto", () => this.save()), this.range),
    h("ul", { class: "keys" }, Object.entries(COLOURS).map(([name, colour]) => h("li", {}, h("span", { class: "swatch", style: `background-color: ${colour}` }), name))),
    this.plots);
    this.zoom = zoom().scaleExtent([1, 20000]).on("zoom", (event) => this.zoomed(event.transform));
    this.surface = select(this.plots);
    this.surface.call(this.zoom).on("dblclick.zoom", null);
    this.plots.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.resized()).observe(this.plots);
  }

  fullest() {
    const peaks = this.timeline.memory.map((points) => Math.max(...points.map(([, size]) => size)));
    return peaks.indexOf(Math.max(...peaks));
  }

  get width() { return Math.max(this.plots.clientWidth, 320); }
  get inner() { return this.width - LEFT - RIGHT; }

  resized() {
    const { inner } = this;
    this.zoom.extent([[LEFT, 0], [LEFT + inner, 100]]).translateExtent([[LEFT, 0], [LEFT + inner, 100]]);
    this.draw();
  }

  zoomed(transform) {
    const at = (x) => ((transform.invertX(x) - LEFT) / this.inner) * this.timeline.step_time_s;
    this.domain = [Math.max(at(LEFT), 0), Math.min(at(LEFT + this.inner), this.timeline.step_time_s)];
    if (!this.isWaiting) { this.isWaiting = true; requestAnimationFrame(() => { this.isWaiting = false; this.draw(); }); }
  }

  scale(factor) { this.surface.call(this.zoom.scaleBy, factor); }
  reset() { this.surface.call(this.zoom.transform, zoomIdentity); }

  /** Show from one time to another, in seconds. */
  show(from, to) {
    const k = this.timeline.step_time_s / (to - from);
    const x = LEFT + (from / this.timeline.step_time_s) * this.inner;
    this.surface.call(this.zoom.transform, zoomIdentity.translate(LEFT - k * x, 0).scale(k));
  }

  key(event) {
    const move = { ArrowLeft: 80, ArrowRight: -80 }[event.key];
    if (move) { this.surface.call(this.zoom.translateBy, move / (this.timeline.step_time_s / (this.domain[1] - this.domain[0])), 0); event.preventDefault(); }
    if (event.key === "+") this.scale(2);
    if (event.key === "-") this.scale(0.5);
  }

  draw() {
    if (!this.plots.clientWidth) return;
    const [from, to] = this.domain, pixel = (to - from) / this.inner;
    const boxes = [...this.boxes(from, to, pixel)].filter((b) => b.end > from && b.start < to);
    const rows = this.rows();
    const x = { domain: this.domain, label: null, tickFormat: (t) => format.seconds(t), ticks: 6 };
    const lanes = Plot.plot({
      width: this.width, height: rows.length * ROW + 40, marginLeft: LEFT, marginRight: RIGHT, marginTop: 6, marginBottom: 26, x,
      y: { domain: rows, label: null, padding: 0.12 },
      color: { domain: Object.keys(COLOURS), range: Object.values(COLOURS) },
      marks: [
        Plot.barX(boxes, { x1: (b) => Math.max(b.start, from), x2: (b) => Math.min(b.end, to), y: "row", fill: "kind", stroke: "var(--paper)", strokeWidth: 0.4, title: "title", href: "href" }),
        Plot.text(boxes.filter((b) => b.text && (b.end - b.start) / pixel > 7 * b.text.length + 6), { x: (b) => (Math.max(b.start, from) + Math.min(b.end, to)) / 2, y: "row", text: "text", fill: "#111", fontSize: 11, pointerEvents: "none" }),
      ],
    });
    const points = this.memory(Number(this.device.value));
    const top = Math.max(this.limitBytes, ...points.map((p) => p.size)) * 1.05;
    const memory = Plot.plot({
      width: this.width, height: 130, marginLeft: LEFT, marginRight: RIGHT, marginTop: 10, marginBottom: 26, x,
      y: { domain: [0, top], label: null, tickFormat: (b) => format.bytes(b), ticks: binaryTicks(top), grid: true },
      marks: [
        Plot.areaY(points, { x: "time", y1: 0, y2: "size", curve: "step-after", fill: "#009e73", fillOpacity: 0.45, clip: true }),
        Plot.lineY(points, { x: "time", y: "size", curve: "step-after", stroke: "#009e73", clip: true }),
        Plot.ruleY([this.limitBytes], { stroke: "currentColor", strokeDasharray: "4 3" }),
        Plot.text([{ y: this.limitBytes }], { y: "y", frameAnchor: "right", dy: -6, textAnchor: "end", text: () => `limit ${format.bytes(this.limitBytes)}` }),
      ],
    });
    this.plots.replaceChildren(lanes, memory);
    this.range.textContent = `${format.seconds(from)} to ${format.seconds(to)}`;
    this.element.dataset.boxes = boxes.length;
  }

  rows() {
    const { events, devices } = this.timeline;
    const used = new Set(events.map(([device, lane]) => `${device}:${lane}`));
    return devices.flatMap((name, k) => LANES.flatMap((lane, n) => (n === 0 || used.has(`${k}:${n}`) ? [`${name} ${lane}`] : [])));
  }

  /** What is drawn from `from` to `to`. */
  *boxes(from, to, pixel) {
    const { events, actions, devices } = this.timeline;
    for (const [device, lane, number, start, end] of events) {
      if (end < from || start > to) continue;
      const action = actions[number], name = devices[device];
      const part = action.match(/^(?:collectives of )?(\d+)([FB])(\d+)$/);
      const isCut = part && lane < 2 && (end - start) / pixel > LEAST_PIXELS * this.works(part).length;
      if (isCut && lane === 0) yield* this.layers(part, name, start, end);
      else if (!(isCut && lane === 1)) {
        yield { row: `${name} ${LANES[lane]}`, start, end, kind: lane === 2 ? "messages" : lane === 1 ? "collectives" : kindOf(part),
          text: lane === 0 ? action : "", title: `${action}: ${format.seconds(end - start)}, from ${format.seconds(start)}` };
      }
    }
  }

  works([, stage, letter]) {
    return this.timeline.stages[stage][letter === "F" ? "forward" : "backward"];
  }

  /** An action, layer by layer: each waits for its collectives, then computes. */
  *layers(part, name, start, end) {
    const works = this.works(part), sum = (at) => works.reduce((total, work) => total + work[at], 0);
    const slowed = this.timeline.stages[part[1]].slowdown, compute = sum(1), waited = sum(2), beside = sum(3);
    const exposed = beside - Math.min(beside, compute * (1 + slowed));
    const stretch = compute ? (end - start - waited - exposed) / compute : 0;
    let now = start, free = start;
    for (const [layer, compute_s, waited_s, beside_s] of works) {
      const href = this.links.get(this.timeline.layers[layer]);
      const title = `${part[0].replace("collectives of ", "")}, ${this.timeline.layers[layer]}`;
      if (waited_s) {
        yield { row: `${name} collectives`, start: now, end: now + waited_s, kind: "collectives", text: "", title: `${title}: ${format.seconds(waited_s)} of collectives, waited for` };
        now += waited_s;
      }
      if (compute_s) {
        const took = compute_s * stretch;
        yield { row: `${name} compute`, start: now, end: now + took, kind: kindOf(part), text: this.timeline.layers[layer], href, title: `${title}: ${format.seconds(compute_s)} of compute` };
        if (beside_s) {
          free = Math.max(free, now);
          yield { row: `${name} collectives`, start: free, end: free + beside_s, kind: "collectives", text: "", title: `${title}: ${format.seconds(beside_s)} of collectives beside compute` };
          free += beside_s;
        }
        now += took;
      }
    }
  }

  memory(device) {
    const points = this.timeline.memory[device].map(([time, size]) => ({ time, size }));
    return [...points, { time: this.timeline.step_time_s, size: points.at(-1).size }];
  }

  /** The step as a trace for Perfetto (Trace Event Format). */
  trace() {
    const { devices, events, actions, memory } = this.timeline, micro = 1e6;
    const traceEvents = devices.map((name, pid) => ({ name: "process_name", ph: "M", pid, args: { name } }));
    for (const [pid] of devices.entries()) LANES.forEach((name, tid) => traceEvents.push({ name: "thread_name", ph: "M", pid, tid, args: { name } }));
    for (const [pid, tid, action, start, end] of events) traceEvents.push({ name: actions[action], ph: "X", pid, tid, ts: start * micro, dur: (end - start) * micro });
    memory.forEach((points, pid) => points.forEach(([time, bytes]) => traceEvents.push({ name: "memory", ph: "C", pid, ts: time * micro, args: { bytes } })));
    return JSON.stringify({ traceEvents, displayTimeUnit: "ms" });
  }

  save() {
    const link = h("a", { href: URL.createObjectURL(new Blob([this.trace()], { type: "application/json" })), download: "step.trace.json" });
    link.click();
    URL.revokeObjectURL(link.href);
  }
}

function kindOf(part) {
  return part ? (part[2] === "F" ? "forward" : "backward") : "once a step";
}

/** A few round numbers of KiB, MiB, GiB, ... up to `top`. */
function binaryTicks(top) {
  const unit = 1024 ** Math.floor(Math.log(top) / Math.log(1024));
  const step = [1, 2, 5, 10, 20, 50, 100, 200, 500].find((n) => top / (n * unit) <= 5) ?? 1000;
  return Array.from({ length: Math.floor(top / (step * unit)) + 1 }, (_, k) => k * step * unit);
}
