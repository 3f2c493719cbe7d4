// The simulated step: what each stage does when, by layer where there is room, and its memory below.
import * as Plot from "@observablehq/plot";
import { select } from "d3-selection";
import { zoom, zoomIdentity } from "d3-zoom";
import { h } from "./dom.js";
import * as format from "./format.js";
import { EVENTS, MEMORY, PHASES } from "./kinds.js";
import { grouped, partOf, placed, seconds, works } from "./layers.js";
import { heldAtPeak, highest, memoryCourse, memoryPlot, said } from "./memory.js";
import { keep, kept } from "./state.js";
import { HOW, isAsked } from "./zooms.js";

const RIGHT = 16, ROW = 22, NARROW = 600;
const LANES = ["compute", "collectives", "messages"];
// What the collectives of actions once a step move.
const ONCE = { "gather parameters": PHASES.param_gather, "sync gradients": PHASES.grad_sync, "tied gradients": PHASES.grad_sync };
// An action of so many pixels is cut into its layers, of which neighbours share a box of at least so many.
const LEAST_CUT = 24, LEAST_PIXELS = 4;

export class TimelineView {
  constructor(timeline, live, limitBytes, links) {
    this.timeline = timeline;
    this.live = live;
    this.links = links; // of layers, into the generated code
    this.limitBytes = limitBytes;
    this.domain = [0, timeline.step_time_s];
    this.computes = new Map(timeline.events.filter(([, lane]) => lane === 0).map(([device, , number, start, end]) => [`${device}:${timeline.actions[number]}`, end - start]));
    const peaks = live.devices.map(({ peak: [size] }) => size), fullest = peaks.indexOf(Math.max(...peaks));
    this.device = h("select", { id: "memory-of", "aria-label": "memory of", onchange: () => { this.held.replaceChildren(heldAtPeak(live, Number(this.device.value))); this.draw(); } },
      timeline.devices.map((name, k) => h("option", { value: k, selected: k === fullest }, `memory of ${name}`)));
    this.plots = h("div", { class: "plots", tabindex: 0, role: "group", "aria-label": "timeline of a step" });
    this.range = h("span", { class: "small", role: "status", id: "timeline-range" });
    this.readout = h("p", { class: "small readout", id: "memory-at", role: "status" }, "Point at the memory to see what is held.");
    this.held = h("div", {}, heldAtPeak(live, fullest));
    const button = (id, text, act) => h("button", { type: "button", id, onclick: act }, text);
    this.element = h("div", { class: "timeline-box" }, h("div", { class: "tools" },
      button("time-in", "+", () => this.scale(2)), button("time-out", "−", () => this.scale(0.5)), button("time-fit", "whole step", () => this.reset()), button("time-peak", "peak", () => this.toPeak()),
      this.device, button("perfetto", "save for Perfetto", () => this.save()), this.range, h("span", { class: "small" }, HOW)),
    keys(Object.entries(EVENTS).filter(([kind]) => kind !== "gradients of weights" || timeline.stages.some(({ W }) => W)), "above: "), keys(Object.entries(MEMORY), "memory: "), this.plots, this.readout, this.held);
    this.zoom = zoom().filter(isAsked).scaleExtent([1, 20000]).on("zoom", (event) => this.zoomed(event.transform));
    this.surface = select(this.plots);
    this.surface.call(this.zoom).on("dblclick.zoom", null);
    this.plots.addEventListener("keydown", (event) => this.key(event));
    this.plots.addEventListener("pointermove", (event) => this.read(event));
    this.range0 = kept("time")?.split("-").map((share) => share * timeline.step_time_s);
    new ResizeObserver(() => this.resized()).observe(this.plots);
  }

  get width() { return Math.max(this.plots.clientWidth, 240); }
  get left() { return this.width < NARROW ? 92 : 150; }
  get inner() { return this.width - this.left - RIGHT; }

  resized() {
    const { inner, left } = this;
    this.zoom.extent([[left, 0], [left + inner, 100]]).translateExtent([[left, 0], [left + inner, 100]]);
    if (this.range0 && this.plots.clientWidth) { const [from, to] = this.range0; this.range0 = null; this.show(from, to); }
    this.draw();
  }

  zoomed(transform) {
    const at = (x) => ((transform.invertX(x) - this.left) / this.inner) * this.timeline.step_time_s;
    this.domain = [Math.max(at(this.left), 0), Math.min(at(this.left + this.inner), this.timeline.step_time_s)];
    const shares = this.domain.map((time) => (time / this.timeline.step_time_s).toPrecision(6));
    keep("time", transform.k > 1 ? shares.join("-") : null);
    if (!this.isWaiting) { this.isWaiting = true; requestAnimationFrame(() => { this.isWaiting = false; this.draw(); }); }
  }

  scale(factor) { this.surface.call(this.zoom.scaleBy, factor); }
  reset() { this.surface.call(this.zoom.transform, zoomIdentity); }

  /** Show from one time to another, in seconds. */
  show(from, to) {
    const k = this.timeline.step_time_s / (to - from);
    const x = this.left + (from / this.timeline.step_time_s) * this.inner;
    this.surface.call(this.zoom.transform, zoomIdentity.translate(this.left - k * x, 0).scale(k));
  }

  /** The moment of the peak, a hundredth of the step wide. */
  toPeak() {
    const { step_time_s } = this.timeline, { time } = highest(this.course(Number(this.device.value)));
    const from = Math.min(Math.max(time - 0.005 * step_time_s, 0), 0.99 * step_time_s);
    this.show(from, from + 0.01 * step_time_s);
    this.readout.textContent = said(this.live, this.course(Number(this.device.value)), time);
  }

  /** What is held at the time under the pointer. */
  read(event) {
    const [from, to] = this.domain, share = (event.clientX - this.plots.getBoundingClientRect().left - this.left) / this.inner;
    if (share >= 0 && share <= 1) this.readout.textContent = said(this.live, this.seen, from + share * (to - from));
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
    const x = { domain: this.domain, label: null, tickFormat: (t) => format.seconds(t), ticks: this.width < NARROW ? 3 : 6 };
    const lanes = Plot.plot({
      width: this.width, height: rows.length * ROW + 40, marginLeft: this.left, marginRight: RIGHT, marginTop: 6, marginBottom: 26, x,
      y: { domain: rows, label: null, padding: 0.12, tickFormat: (row) => (this.width < NARROW ? row.replace(/^(stage|device) /, "").replace("collectives", "collect.") : row) },
      color: { domain: Object.keys(EVENTS), range: Object.values(EVENTS) },
      marks: [
        Plot.barX(boxes, { x1: (b) => Math.max(b.start, from), x2: (b) => Math.min(b.end, to), y: "row", fill: "kind", stroke: "var(--paper)", strokeWidth: 0.4, title: "title", href: "href" }),
        Plot.text(boxes.filter((b) => b.text && fits(b.text, (b.end - b.start) / pixel)), { x: (b) => (Math.max(b.start, from) + Math.min(b.end, to)) / 2, y: "row", text: "text", fill: "#111", fontSize: 11, pointerEvents: "none" }),
      ],
    });
    this.seen = this.course(Number(this.device.value));
    const memory = memoryPlot(this.live, this.seen, this.limitBytes, { from, to, pixel, x, width: this.width, marginLeft: this.left, marginRight: RIGHT });
    this.element.dataset.peak = highest(this.seen).size;
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
      const action = actions[number], name = devices[device], part = partOf(action);
      // The collectives of an action are cut if its compute is: they are drawn with its layers.
      const isCut = part && lane < 2 && this.computes.get(`${device}:${part.join("")}`) / pixel > LEAST_CUT;
      if (isCut && lane === 0) yield* this.layers(part, name, start, end, pixel);
      else if (!(isCut && lane === 1)) {
        yield { row: `${name} ${LANES[lane]}`, start, end, kind: lane === 2 ? "messages" : lane === 1 ? ONCE[action] ?? "collectives" : kindOf(part),
          text: lane === 0 ? action : "", title: `${action}: ${format.seconds(end - start)}, from ${format.seconds(start)}` };
      }
    }
  }

  /** An action, layer by layer, as far as there is room. */
  *layers(part, name, start, end, pixel) {
    let free = start;
    const groups = grouped(works(this.timeline, part), LEAST_PIXELS * pixel);
    for (const layer of placed(this.timeline, part, groups, start, end)) {
      const whole = layer.last === layer.name ? layer.name : `${layer.name} … ${layer.last.split(".").at(-1)}`;
      const title = `${part.join("")}, ${whole}`;
      const text = [whole, whole.split(".").slice(-2).join("."), whole.split(".").at(-1)].find((words) => fits(words, layer.took / pixel)) ?? "";
      let now = layer.start - seconds(layer.waits);
      for (const [phase, time] of layer.waits) {
        yield { row: `${name} collectives`, start: now, end: now + time, kind: PHASES[phase], text: "", title: `${title}: ${format.seconds(time)} of ${PHASES[phase]}, waited for` };
        now += time;
      }
      if (!layer.compute) continue;
      yield { row: `${name} compute`, start: now, end: now + layer.took, kind: kindOf(part), text, href: this.links.get(layer.name), title: `${title}: ${format.seconds(layer.compute)} of compute` };
      for (const [phase, time] of layer.besides) {
        free = Math.max(free, now);
        yield { row: `${name} collectives`, start: free, end: free + time, kind: PHASES[phase], text: "", title: `${title}: ${format.seconds(time)} of ${PHASES[phase]} beside compute` };
        free += time;
      }
    }
  }

  /** The memory of a device over the step, made once. */
  course(device) {
    this.courses ??= [];
    return (this.courses[device] ??= memoryCourse(this.live, this.timeline, device));
  }

  /** The step as a trace for Perfetto (Trace Event Format). */
  trace() {
    const { devices, events, actions } = this.timeline, micro = 1e6;
    const traceEvents = devices.map((name, pid) => ({ name: "process_name", ph: "M", pid, args: { name } }));
    for (const [pid] of devices.entries()) LANES.forEach((name, tid) => traceEvents.push({ name: "thread_name", ph: "M", pid, tid, args: { name } }));
    for (const [pid, tid, action, start, end] of events) traceEvents.push({ name: actions[action], ph: "X", pid, tid, ts: start * micro, dur: (end - start) * micro });
    devices.forEach((_, pid) => this.course(pid).forEach(({ time, sizes }) => traceEvents.push({
      name: "memory", ph: "C", pid, ts: time * micro, args: Object.fromEntries(this.live.kinds.map((kind, k) => [kind, sizes[k]])) })));
    return JSON.stringify({ traceEvents, displayTimeUnit: "ms" });
  }

  save() {
    const link = h("a", { href: URL.createObjectURL(new Blob([this.trace()], { type: "application/json" })), download: "step.trace.json" });
    link.click();
    URL.revokeObjectURL(link.href);
  }
}

const fits = (text, width) => width > 7 * text.length + 6;

function keys(entries, title) {
  return h("ul", { class: "keys" }, h("li", { class: "small" }, title), entries.map(([name, colour]) => h("li", {}, h("span", { class: "swatch", style: `background-color: ${colour}` }), name)));
}

function kindOf(part) {
  return part ? { F: "forward", W: "gradients of weights" }[part[1]] ?? "backward" : "once a step";
}
