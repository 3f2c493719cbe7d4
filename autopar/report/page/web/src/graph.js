// The graph of the stages: laid out by Graphviz (viz.js), drawn here, folded or not.
//
// Edges between shown nodes follow autopar/report/picture/folding.py: of a folded block the first
// copy is shown, what leaves the fold leaves from its last copy, and edges into other copies are
// left out.
import { instance } from "@viz-js/viz";
import { select } from "d3-selection";
import { zoom, zoomIdentity } from "d3-zoom";
import { h, s } from "./dom.js";
import * as format from "./format.js";
import { PLACED } from "./kinds.js";
import { keep, kept } from "./state.js";
import { HOW, isAsked } from "./zooms.js";

// The smallest text is of 11 px, and readable from 9.
const LEAST_SCALE = 9 / 11;
const CHIP = 17, LINE = 15, PAD = 8;
const layouts = instance();

/** Everything that is known of one drawn node. */
export class Shown {
  constructor(stageNumber, stage, section, copy, place) {
    this.stageNumber = stageNumber;
    this.number = section.copies[copy][place];
    this.detail = stage.details[section.copies[0][place]];
    this.block = section.blocks[copy];
    this.copies = section.blocks.length;
    this.firstBlock = section.blocks[0];
    this.id = `s${stageNumber}n${this.number}`;
  }

  /** A name of the first block's, as this block has it. */
  named(name) {
    const isInside = this.firstBlock && (name === this.firstBlock || name.startsWith(`${this.firstBlock}.`));
    return isInside ? this.block + name.slice(this.firstBlock.length) : name;
  }

  get title() {
    const { kind, name, module } = this.detail;
    return name || this.named(module) || kind;
  }

  get path() {
    return this.named(this.detail.module) || this.detail.name;
  }

  /** Seconds of a step, forward and backward. */
  get time() {
    return this.detail.forward_s + this.detail.backward_s;
  }

  /** Bytes that its parameters and kept results take on a rank. */
  get bytes() {
    return this.detail.kept_bytes + this.detail.parameters.reduce((sum, p) => sum + p.stored_bytes, 0);
  }

  get words() {
    const { operators, parameters, kind, where } = this.detail;
    return [this.path, this.title, kind, ...operators, ...where, ...parameters.map((p) => this.named(p.name))].join(" ");
  }
}

export class Graph {
  /** `onselect(shown)` is called with the node that the reader clicks. */
  constructor(stages, onselect) {
    this.stages = stages;
    this.onselect = onselect;
    this.unfolded = new Set(kept("unfold")?.split(",").filter(Boolean));
    this.heat = kept("heat") ?? "time";
    this.view = s("g");
    this.svg = s("svg", { class: "graph", role: "group", "aria-label": "graph of the stages", tabindex: 0 }, this.view);
    this.zoom = zoom().filter(isAsked).scaleExtent([0.02, 4]).on("zoom", ({ transform }) => this.zoomed(transform));
    select(this.svg).call(this.zoom).on("dblclick.zoom", null);
    this.search = h("input", { type: "search", id: "graph-search", placeholder: "search modules, operators, parameters", "aria-label": "search the graph", oninput: () => this.find() });
    this.found = h("span", { class: "small", role: "status", id: "graph-found" });
    const heat = h("select", { id: "heat", "aria-label": "colour by", onchange: () => { this.heat = heat.value; keep("heat", heat.value); this.paint(); } },
      h("option", { value: "time" }, "colour by time"), h("option", { value: "bytes" }, "colour by bytes"), h("option", { value: "none" }, "no colour"));
    heat.value = this.heat;
    this.scaleOf = h("span", { class: "heat-scale", id: "heat-scale" });
    const button = (id, text, act) => h("button", { type: "button", id, onclick: act }, text);
    this.element = h("div", { class: "graph-box" },
      h("div", { class: "tools" }, this.search, this.found, heat, this.scaleOf,
        button("zoom-in", "+", () => this.scale(1.4)), button("zoom-out", "−", () => this.scale(1 / 1.4)), button("fit", "fit", () => this.fit()),
        button("unfold-all", "unfold all", () => this.foldAll(false)), button("fold-all", "fold all", () => this.foldAll(true)), h("span", { class: "small" }, HOW)),
      legend(), this.svg);
    this.svg.addEventListener("keydown", (event) => this.key(event));
  }

  async draw() {
    const drawn = this.drawn();
    const viz = await layouts;
    const laid = viz.renderJSON(input(drawn), { engine: "dot" });
    this.paper(laid, drawn);
    this.paint();
    this.find(false);
    if (kept("node")) this.choose(kept("node"));
    this.element.dataset.nodes = drawn.nodes.length;
  }

  /** The nodes, edges and frames that are shown now. */
  drawn() {
    const nodes = [], edges = [], frames = [];
    this.stages.forEach((stage, k) => {
      const home = new Map(), isTarget = new Set(), shownAs = new Map();
      stage.sections.forEach((section, number) => {
        const isUnfolded = this.unfolded.has(`${k}:${number}`);
        const copies = isUnfolded ? section.copies.map((_, copy) => copy) : [0];
        for (const copy of copies) {
          const members = section.copies[copy].map((node, place) => {
            const shown = new Shown(k, stage, section, copy, place);
            nodes.push(shown);
            home.set(node, shown);
            isTarget.add(node);
            shownAs.set(node, node);
            return shown;
          });
          const isBlock = section.blocks[copy] && (members.length > 1 || section.blocks.length > 1);
          frames.push({ stage: k, section: number, members, isBlock, isUnfolded, blocks: isUnfolded ? [section.blocks[copy]] : section.blocks, count: section.blocks.length });
        }
        if (!isUnfolded) section.copies.at(-1).forEach((node, place) => shownAs.set(node, section.copies[0][place]));
      });
      const made = new Map();
      for (const [source, target, value, label] of stage.edges) {
        if (!isTarget.has(target) || !shownAs.has(source)) continue;
        const from = shownAs.get(source), key = `${from}:${value}`;
        if (!made.has(key)) made.set(key, { stage: k, from: home.get(from), to: [], label: label < 0 ? null : stage.labels[label], key: `s${k}e${from}_${value}` });
        made.get(key).to.push(home.get(target));
      }
      edges.push(...made.values());
    });
    return { nodes, edges, frames };
  }

  paper(laid, { nodes, edges, frames }) {
    const [, , width, height] = laid.bb.split(",").map(Number);
    this.size = { width, height };
    const at = new Map(laid.objects.map((o) => [o.name, o]));
    const point = (text) => { const [x, y] = text.split(",").map(Number); return [x, height - y]; };
    const layer = (name) => s("g", { class: name });
    const back = layer("frames"), lines = layer("edges"), front = layer("nodes");
    this.stages.forEach((stage, k) => {
      const found = at.get(`cluster_stage_${k}`);
      if (found) back.append(box(found.bb, height, "stage", `stage ${k}: ${stage.axes.map((a) => `${a.name}=${a.size}`).join(" × ")}`));
    });
    frames.forEach((frame, number) => {
      const found = frame.isBlock && at.get(`cluster_block_${number}`);
      if (!found) return;
      const [first, last] = [frame.blocks[0], frame.blocks.at(-1)];
      const name = frame.blocks.length > 1 ? `${first} … ${last.split(".").at(-1)}  ×${frame.blocks.length}` : first;
      const drawn = box(found.bb, height, "block", name);
      if (frame.count > 1) {
        const act = () => this.toggle(`${frame.stage}:${frame.section}`);
        const [x0, , , y1] = found.bb.split(",").map(Number);
        drawn.append(s("text", { class: "fold", x: x0 + 10, y: height - y1 + 32, tabindex: 0, role: "button", onclick: act, onkeydown: (e) => e.key === "Enter" && act() }, frame.isUnfolded ? "fold" : "unfold"));
      }
      back.append(drawn);
    });
    for (const edge of laid.edges ?? []) {
      const color = edge.class ?? "";
      lines.append(s("path", { class: `edge ${color}`, d: spline(edge.pos, point) }), ...arrow(edge.pos, point));
    }
    this.boxes = new Map();
    for (const shown of nodes) {
      const [x, y] = point(at.get(shown.id).pos);
      const drawn = nodeBox(shown, x, y, () => this.choose(shown.id));
      this.boxes.set(shown.id, { shown, drawn, x, y });
      front.append(drawn);
    }
    for (const edge of edges.filter((e) => e.label)) {
      const [x, y] = point(at.get(edge.key).pos);
      front.append(pill(edge.label, x, y));
    }
    this.view.replaceChildren(back, lines, front);
    if (!this.isPlaced) this.begin();
    this.isPlaced = true;
  }

  /** Colour boxes by time or bytes; the number is in the box as well. */
  paint() {
    const of = (shown) => (this.heat === "bytes" ? shown.bytes : shown.time);
    const most = Math.max(...[...this.boxes.values()].map(({ shown }) => of(shown)), 1e-30);
    const text = this.heat === "bytes" ? format.bytes : format.seconds; // a box's share of the colour is its share of the most
    this.scaleOf.replaceChildren(...(this.heat === "none" ? [] : ["0", h("span", { class: "ramp" }), text(most)]));
    for (const { shown, drawn } of this.boxes.values()) {
      const share = this.heat === "none" ? 0 : of(shown) / most;
      drawn.querySelector(".body").style.setProperty("--share", `${(85 * share).toFixed(0)}%`);
      const number = drawn.querySelector(".number");
      number.textContent = this.heat === "none" || !of(shown) ? "" : text(of(shown));
    }
  }

  choose(id) {
    const found = this.boxes.get(id);
    if (!found) return;
    keep("node", id);
    for (const { drawn } of this.boxes.values()) drawn.classList.toggle("chosen", drawn === found.drawn);
    this.onselect(found.shown);
  }

  /** Mark what the search finds, and go to the first. A name in a folded block finds its stand-in. */
  find(isMoving = true) {
    const words = this.search.value.toLowerCase().split(/\s+/).filter(Boolean);
    let n = 0, first = null;
    for (const { shown, drawn, x, y } of this.boxes.values()) {
      const text = shown.words.toLowerCase();
      const isHit = words.length > 0 && words.every((word) => text.includes(word) || this.standsFor(shown, word));
      drawn.classList.toggle("hit", isHit);
      drawn.classList.toggle("miss", words.length > 0 && !isHit);
      if (isHit) { n += 1; first ??= { x, y }; }
    }
    this.found.textContent = words.length ? `${n} found` : "";
    if (first && isMoving) this.centre(first.x, first.y);
  }

  /** Does a folded node have this name in another copy of its block? */
  standsFor(shown, word) {
    const match = word.match(/^(.*?\D)?(\d+)(\..*)?$/);
    if (!match || shown.copies === 1 || !shown.firstBlock) return false;
    const stage = this.stages[shown.stageNumber];
    const section = stage.sections.find((one) => one.copies[0].includes(shown.number));
    if (!section) return false;
    const text = shown.words.toLowerCase(), first = shown.firstBlock.toLowerCase();
    return section.blocks.some((block) => text.replaceAll(first, block.toLowerCase()).includes(word));
  }

  toggle(key) {
    if (!this.unfolded.delete(key)) this.unfolded.add(key);
    keep("unfold", [...this.unfolded].join(","));
    return this.draw();
  }

  foldAll(isFolded) {
    this.unfolded.clear();
    if (!isFolded) this.stages.forEach((stage, k) => stage.sections.forEach((section, n) => section.blocks.length > 1 && this.unfolded.add(`${k}:${n}`)));
    keep("unfold", [...this.unfolded].join(","));
    this.isPlaced = false;
    return this.draw();
  }

  scale(factor) { select(this.svg).call(this.zoom.scaleBy, factor); }

  /** Text that would be too small is left out; titles of frames keep their size. */
  zoomed(transform) {
    this.view.setAttribute("transform", transform);
    this.view.classList.toggle("far", transform.k < LEAST_SCALE);
    this.view.style.setProperty("--k", Math.min(transform.k, 1));
  }

  /** The whole graph. */
  fit() {
    const { width, height } = this.svg.getBoundingClientRect();
    const k = Math.min(width / (this.size.width + 40), height / (this.size.height + 40), 1.1);
    select(this.svg).call(this.zoom.transform, zoomIdentity.translate((width - k * this.size.width) / 2, 20).scale(k));
  }

  /** Where reading begins: the first node, large enough to read. */
  begin() {
    const { width } = this.svg.getBoundingClientRect();
    const k = Math.max(Math.min(width / (this.size.width + 40), 1), LEAST_SCALE);
    this.svg.style.height = `${Math.min(k * this.size.height + 40, Math.max(0.75 * window.innerHeight, 320))}px`;
    const first = [...this.boxes.values()].reduce((a, b) => (b.y < a.y ? b : a));
    const left = Math.min(Math.max(width / 2 - k * first.x, width - k * this.size.width - 20), (width - k * Math.min(this.size.width, width / k)) / 2);
    select(this.svg).call(this.zoom.transform, zoomIdentity.translate(left, 20).scale(k));
  }

  centre(x, y) {
    const { width, height } = this.svg.getBoundingClientRect();
    select(this.svg).call(this.zoom.transform, zoomIdentity.translate(width / 2 - x, height / 2 - y).scale(1));
  }

  key(event) {
    const move = { ArrowLeft: [60, 0], ArrowRight: [-60, 0], ArrowUp: [0, 60], ArrowDown: [0, -60] }[event.key];
    if (move && event.target === this.svg) { select(this.svg).call(this.zoom.translateBy, ...move); event.preventDefault(); }
    if (event.target === this.svg && event.key === "+") this.scale(1.4);
    if (event.target === this.svg && event.key === "-") this.scale(1 / 1.4);
  }
}

/** What Graphviz lays out: boxes of fixed size, clusters of stages and of blocks. */
function input({ nodes, edges, frames }) {
  const stages = new Map(), frameOf = new Map();
  const sized = (name, { width, height }) => ({ name, attributes: { width: width / 72, height: height / 72 } });
  const stageOf = (k) => stages.get(k) ?? stages.set(k, { nodes: [], blocks: new Map() }).get(k);
  frames.forEach((frame, number) => {
    const members = frame.members.map((shown) => sized(shown.id, size(shown)));
    for (const shown of frame.members) frameOf.set(shown.id, number);
    if (frame.isBlock) stageOf(frame.stage).blocks.set(number, members);
    else stageOf(frame.stage).nodes.push(...members);
  });
  const lines = [];
  for (const edge of edges) {
    const ends = [edge.from, ...edge.to].map((shown) => shown.id);
    if (!edge.label) {
      for (const to of ends.slice(1)) lines.push({ tail: ends[0], head: to });
      continue;
    }
    const homes = new Set(ends.map((id) => frameOf.get(id))), [home] = homes;
    const drawn = sized(edge.key, pillSize(edge.label)), style = edge.label.communicates ? "traffic" : "local";
    (homes.size === 1 && stageOf(edge.stage).blocks.get(home) || stageOf(edge.stage).nodes).push(drawn);
    lines.push({ tail: ends[0], head: edge.key, attributes: { arrowhead: "none", class: style } });
    for (const to of ends.slice(1)) lines.push({ tail: edge.key, head: to, attributes: { class: style } });
  }
  return {
    directed: true,
    graphAttributes: { rankdir: "TB", nodesep: 0.25, ranksep: 0.25, newrank: true },
    nodeAttributes: { shape: "box", fixedsize: true, label: "" },
    edges: [...lines, ...crossings(nodes)],
    subgraphs: [...stages].map(([k, { nodes: own, blocks }]) => cluster(`stage_${k}`, own,
      [...blocks].map(([number, members]) => cluster(`block_${number}`, members)))),
  };
}

function cluster(name, nodes, subgraphs = []) {
  return { name: `cluster_${name}`, graphAttributes: { margin: 14, label: " \n ", labelloc: "t" }, nodes, subgraphs };
}

/** What a stage sends goes to the later stages that receive it. */
function crossings(nodes) {
  const sent = new Map(nodes.filter((n) => n.detail.kind === "sent").map((n) => [`${n.stageNumber}:${n.detail.name}`, n]));
  const found = [];
  for (const node of nodes.filter((n) => n.detail.kind === "received")) {
    for (let k = node.stageNumber - 1; k >= 0; k -= 1) {
      const from = sent.get(`${k}:${node.detail.name}`);
      if (from) { found.push({ tail: from.id, head: node.id, attributes: { class: "traffic" } }); break; }
    }
  }
  return found;
}

const canvas = document.createElement("canvas").getContext("2d");

function textWidth(text, font) {
  canvas.font = font;
  return canvas.measureText(text).width;
}

const chipText = (p) => `${p.axis} ${p.placement}`;
const chipWidth = (p) => textWidth(chipText(p), "11px sans-serif") + 12;

function size(shown) {
  const { operators, placements } = shown.detail;
  const chips = placements.reduce((sum, p) => sum + chipWidth(p) + 4, 0);
  const moved = movedText(shown.detail);
  const width = Math.max(textWidth(shown.title, "bold 13px sans-serif") + 74, textWidth(operatorText(operators), "11px sans-serif"), textWidth(moved, "11px sans-serif"), chips, 90) + 2 * PAD;
  return { width, height: LINE + (operators.length ? LINE : 0) + (moved ? LINE : 0) + (placements.length ? CHIP + 4 : 0) + 2 * PAD };
}

function operatorText(operators) {
  const text = operators.join(", ");
  return text.length > 48 ? `${text.slice(0, 46)} …` : text;
}

/** `gathers 1.8 GiB dp, syncs 448 MiB dp`: what a step moves of its parameters, on a rank. */
export function movedText({ parameters }) {
  const sums = new Map();
  for (const { phase, axes, size_bytes } of parameters.flatMap((p) => p.moved)) {
    const name = `${phase}:${axes}`;
    sums.set(name, (sums.get(name) ?? 0) + size_bytes);
  }
  return [...sums].map(([name, size]) => `${name.startsWith("param") ? "gathers" : "syncs"} ${format.bytes(size)} ${name.split(":")[1]}`).join(", ");
}

function nodeBox(shown, x, y, act) {
  const { width, height } = size(shown), { operators, placements, kind } = shown.detail;
  const left = x - width / 2, top = y - height / 2;
  const drawn = s("g", { class: `node ${kind.replaceAll(" ", "-")}`, tabindex: 0, role: "button", "data-node": shown.id, "data-path": shown.path,
    "aria-label": `${shown.title}, ${placements.map(chipText).join(", ")}`, onclick: act, onkeydown: (e) => (e.key === "Enter" || e.key === " ") && (e.preventDefault(), act()) },
    s("title", {}, shown.path || shown.title),
    s("rect", { class: "body", x: left, y: top, width, height, rx: operators.length ? 4 : 14 }),
    s("text", { class: "title", x: left + PAD, y: top + PAD + 11 }, shown.title),
    s("text", { class: "number", x: left + width - PAD, y: top + PAD + 11, "text-anchor": "end" }));
  let line = top + PAD + LINE;
  if (operators.length) { drawn.append(s("text", { class: "small-text", x: left + PAD, y: line + 11 }, operatorText(operators))); line += LINE; }
  const moved = movedText(shown.detail);
  if (moved) { drawn.append(s("text", { class: "moved", x: left + PAD, y: line + 11 }, moved)); line += LINE; }
  let across = left + PAD;
  for (const p of placements) {
    const wide = chipWidth(p);
    drawn.append(s("rect", { class: `chip ${p.kind}`, x: across, y: line + 2, width: wide, height: CHIP, rx: 3 }),
      s("text", { class: "chip-text", x: across + 6, y: line + 14 }, chipText(p)));
    across += wide + 4;
  }
  return drawn;
}

function pillSize(label) {
  return { width: Math.max(...label.lines.map((line) => textWidth(line, "11px sans-serif"))) + 16, height: 14 * label.lines.length + 6 };
}

function pill(label, x, y) {
  const { width, height } = pillSize(label);
  return s("g", { class: label.communicates ? "pill traffic" : "pill local" },
    s("title", {}, `forward | backward, bytes of one microbatch and rank; ${format.seconds(label.time_s)} a step`),
    s("rect", { x: x - width / 2, y: y - height / 2, width, height, rx: 9 }),
    ...label.lines.map((line, k) => s("text", { x, y: y - height / 2 + 14 * (k + 1), "text-anchor": "middle" }, line)));
}

function box(bb, height, kind, title) {
  const [x0, y0, x1, y1] = bb.split(",").map(Number);
  return s("g", { class: `frame ${kind}` }, s("rect", { x: x0, y: height - y1, width: x1 - x0, height: y1 - y0, rx: 8 }),
    s("text", { x: x0 + 10, y: height - y1 + 17 }, title));
}

function spline(pos, point) {
  const words = pos.split(" ").filter((word) => !/^[es],/.test(word)).map(point);
  return `M${words[0]}C${words.slice(1).map(([x, y]) => `${x},${y}`).join(" ")}`;
}

/** The head of an edge, from the end of its curve to the point after `e,`. */
function arrow(pos, point) {
  const words = pos.split(" "), end = words.find((word) => word.startsWith("e,"));
  if (!end) return [];
  const [x1, y1] = point(end.slice(2)), [x0, y0] = point(words.at(-1));
  const length = Math.hypot(x1 - x0, y1 - y0) || 1, dx = (x1 - x0) / length, dy = (y1 - y0) / length;
  return [s("path", { class: "head", d: `M${x1},${y1}L${x1 - 8 * dx + 3.5 * dy},${y1 - 8 * dy - 3.5 * dx}L${x1 - 8 * dx - 3.5 * dy},${y1 - 8 * dy + 3.5 * dx}Z` })];
}

function legend() {
  return h("details", { class: "legend-box" }, h("summary", {}, "legend"),
    h("ul", {}, Object.entries(PLACED).map(([kind, text]) => h("li", {}, h("span", { class: `chip-word ${kind}` }, kind), ` ${text}`)),
      h("li", {}, "a pill on an edge: the tensor is resharded, forward | backward, with the bytes of one microbatch and rank"),
      h("li", {}, "gathers, syncs: bytes of its parameters that a rank gathers, and of their gradients that it reduces, in a step"),
      h("li", {}, "×N: N equal blocks in a row, drawn once")));
}
