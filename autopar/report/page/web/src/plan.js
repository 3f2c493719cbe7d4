// The page of one plan, from its verdict to its code.
import { memoryBar, timeBar } from "./bars.js";
import { alternatives, command, helps } from "./choices.js";
import { codeLink, details, shortPath } from "./details.js";
import { figure, h, section } from "./dom.js";
import * as format from "./format.js";
import { Graph } from "./graph.js";
import { anchor } from "./state.js";
import { table } from "./table.js";
import { themeButton } from "./theme.js";
import { TimelineView } from "./timeline.js";

export function planPage(facts) {
  const isSeveral = facts.stages.length > 1;
  const parts = [
    section("made-of", "Time and memory", bars(facts)),
    section("helps", "What would help", helps(facts)),
    section("alternatives", "Alternatives", alternatives(facts)),
    section("operators", "Most expensive operators", operators(facts, isSeveral)),
    section("graph", "Graph", graph(facts)),
    section("timeline", "Timeline", timeline(facts)),
    section("parameters", "Parameters", parameters(facts, isSeveral)),
    section("collectives", "Collectives", collectives(facts, isSeveral)),
    isSeveral ? section("between", "Between stages", between(facts)) : null,
    section("devices", "Devices", devices(facts)),
    section("code", "Generated code", code(facts.code)),
    section("assumptions", "Assumptions", assumptions(facts)),
  ].filter(Boolean);
  return [header(facts), navigation(parts), ...parts];
}

function header(facts) {
  const { setting, predicted, figures } = facts, state = facts.assumptions.find((line) => line.startsWith("state:"));
  const number = (name, value, text) => (value === null ? null : h("div", { class: "number" }, h("dt", {}, name), h("dd", {}, figure(value, text, { "data-predicted": name }))));
  return h("header", { id: "verdict" },
    h("div", { class: "top" }, h("h1", {}, facts.model), themeButton()),
    h("p", { class: "small" }, `${setting.mesh.join(" × ")} ${setting.hardware}; ${setting.inputs.join(", ")}; ${setting.optimizer}, `
      + `${setting.microbatches} microbatch${setting.microbatches === 1 ? "" : "es"}${facts.stages.length > 1 ? `, ${setting.schedule}` : ""}; ${facts.chosen}`),
    h("ul", { class: "verdict" }, facts.verdict.map((sentence) => h("li", {}, sentence))),
    facts.warnings.map((text) => h("p", { class: "note" }, text)),
    h("dl", { class: "numbers" },
      number("step", predicted.step_time_s, format.seconds), interval(facts.interval_s), number("tokens/s", predicted.tokens_per_s, format.count), number("tokens/s per device", figures.tokens_per_s, format.count),
      number("samples/s", predicted.samples_per_s, format.count), number("MFU", predicted.mfu, format.percent), number("per device", figures.flops_per_s, format.flops),
      number("a trillion tokens", figures.days_per_trillion_tokens, format.days),
      number("peak memory", predicted.peak_bytes, format.bytes), number(`free of ${format.bytes(figures.device_bytes)}`, figures.free_bytes, format.bytes),
      number("communication", predicted.comm_time_s, format.seconds), number("of it exposed", predicted.exposed_comm_s, format.seconds),
      facts.stages.length > 1 ? number("bubble", predicted.bubble, format.percent) : null),
    state ? h("p", { class: "small", id: "state" }, state) : null,
    command(facts.command));
}

function interval(bounds) {
  if (bounds === null) return null;
  const [low, high] = bounds.map((time) => figure(time, format.seconds));
  return h("div", { class: "number", id: "interval" }, h("dt", {}, "80% of steps"), h("dd", {}, low, " to ", high));
}

function navigation(parts) {
  return h("nav", { "aria-label": "parts of the page" }, h("a", { href: "#verdict" }, "Verdict"), parts.map((part) => h("a", { href: `#${part.id}` }, part.querySelector("h2").textContent)));
}

function bars(facts) {
  const ofStage = (k) => (facts.stages.length > 1 ? ` of stage ${k}` : "");
  return h("div", { class: "columns" },
    h("div", {}, h("h3", {}, `Time${facts.stages.length > 1 ? ` of ${facts.timeline.devices[facts.time.device]}, the busiest` : ""}`), timeBar(facts.time)),
    h("div", {}, h("h3", {}, `Peak memory of a rank${ofStage(facts.memory.stage)}`), memoryBar(facts.memory)));
}

function graph(facts) {
  const panel = h("aside", { class: "details", id: "details", "aria-live": "polite" }, h("p", {}, "Click a box to see what it is, what it costs, and what else could have been chosen."));
  const drawn = new Graph(facts.stages, (shown) => {
    panel.replaceChildren(...details(shown, facts.stages[shown.stageNumber].axes));
    both.classList.add("has-choice");
  });
  const both = h("div", { class: "graph-and-details" }, drawn.element, panel);
  const begin = new IntersectionObserver((entries) => {
    if (entries.some((entry) => entry.isIntersecting)) { begin.disconnect(); drawn.draw(); }
  }, { rootMargin: "600px" });
  begin.observe(drawn.element);
  return both;
}

/** Layer -> where its first operators are printed. */
function layerLinks(stages) {
  const links = new Map();
  for (const stage of stages) {
    for (const { blocks, copies } of stage.sections) {
      for (const node of copies[0]) {
        const { generated, module } = stage.details[node];
        if (!generated) continue;
        for (const layer of blocks[0] ? blocks : [module]) if (!links.has(layer)) links.set(layer, codeLink(generated));
      }
    }
  }
  return links;
}

function timeline(facts) {
  return new TimelineView(facts.timeline, facts.live, facts.memory.limit_bytes, layerLinks(facts.stages)).element;
}

/** Boxes of the graph by their time in all equal blocks together. */
function operators(facts, isSeveral) {
  const rows = facts.stages.flatMap((stage, number) => stage.sections.flatMap((part) => part.copies[0].map((node) => {
    const d = stage.details[node], count = part.blocks.length;
    const module = count > 1 ? part.blocks[0].replace(/\d+$/, "*") + d.module.slice(part.blocks[0].length) : d.module;
    return { ...d, stage: number, module: module || d.name || d.kind, count, time: count * (d.forward_s + d.backward_s), again: count * d.again_s };
  }))).filter((row) => row.time > 0).sort((a, b) => b.time - a.time);
  const columns = [
    ...(isSeveral ? [stageColumn] : []),
    { name: "module", value: (r) => r.module, show: (r) => h("code", {}, r.module) },
    { name: "operators", value: (r) => r.operators.join(", "), show: (r) => r.operators.slice(0, 4).join(", ") + (r.operators.length > 4 ? ", …" : "") },
    { name: "count", value: (r) => r.count, show: (r) => String(r.count), isNumber: true },
    { name: "placement", value: (r) => r.placements.map((p) => p.placement).join(" "), show: (r) => r.placements.map((p) => `${p.axis} ${p.placement}`).join(", ") },
    { name: "time of all", value: (r) => r.time, show: (r) => figure(r.time, format.seconds), isNumber: true },
    { name: "of it again", value: (r) => r.again, show: (r) => (r.again ? figure(r.again, format.seconds) : ""), isNumber: true },
    { name: "source", value: (r) => r.where.join(" "), show: (r) => h("span", { title: r.where.join("\n") }, shortPath(r.where[0] ?? "")) },
    { name: "generated", value: (r) => r.generated?.line ?? 0, show: (r) => (r.generated ? h("a", { href: codeLink(r.generated) }, `${r.generated.file}:${r.generated.line}`) : "") },
  ];
  return table("operator-rows", "compute of a step, forward and backward, equal blocks together", columns, rows, (r) => [r.module, ...r.operators, ...r.where].join(" "));
}

const stageColumn = { name: "stage", value: (row) => row.stage, show: (row) => String(row.stage), isNumber: true };

function parameters(facts, isSeveral) {
  const words = { step: "", use: "gathered at each use (ZeRO-3)", micro: "gathered once a step, gradients each microbatch (ZeRO-2)" };
  const columns = [
    ...(isSeveral ? [stageColumn] : []),
    { name: "parameter", value: (r) => r.parameter, show: (r) => h("code", {}, r.parameter) },
    { name: "count", value: (r) => r.count, show: (r) => String(r.count), isNumber: true },
    { name: "shape", value: (r) => r.shape.reduce((a, b) => a * b, 1), show: (r) => `${r.dtype} ${format.shape(r.shape)}` },
    { name: "stored", value: (r) => r.stored, show: (r) => r.stored },
    { name: "used", value: (r) => r.used, show: (r) => r.used },
    { name: "", value: (r) => r.period, show: (r) => words[r.period] },
    { name: "bytes on a rank", value: (r) => r.stored_bytes, show: (r) => figure(r.stored_bytes, format.bytes), isNumber: true },
  ];
  const axes = [...new Set(facts.parameters.map((r) => r.axes))].join("; ");
  return table("parameter-rows", `placements on ${axes}. S(d): sharded along dim d; R: whole, each rank has its own gradient, which are summed; I: whole, equal gradients; * stands for a number`, columns, facts.parameters, (r) => Object.values(r).join(" "));
}

function collectives(facts, isSeveral) {
  const columns = [
    ...(isSeveral ? [stageColumn] : []),
    ...["phase", "collective", "axis"].map((name) => ({ name, value: (r) => r[name], show: (r) => r[name] })),
    { name: "of", value: (r) => r.tensor, show: (r) => h("code", {}, r.tensor) },
    { name: "calls", value: (r) => r.calls, show: (r) => String(r.calls), isNumber: true },
    { name: "bytes", value: (r) => r.size_bytes, show: (r) => figure(r.size_bytes, format.bytes), isNumber: true },
    { name: "time", value: (r) => r.time_s, show: (r) => figure(r.time_s, format.seconds), isNumber: true },
  ];
  return table("collective-rows", "per step and rank, most expensive first; time as if alone, hidden or not", columns, facts.collectives, (r) => Object.values(r).join(" "));
}

function between(facts) {
  const columns = [
    ...["value", "stages", "tensor", "sent", "received"].map((name) => ({ name, value: (r) => r[name], show: (r) => r[name] })),
    { name: "forward", value: (r) => r.forward_bytes, show: (r) => figure(r.forward_bytes, format.bytes), isNumber: true },
    { name: "backward", value: (r) => r.backward_bytes, show: (r) => figure(r.backward_bytes, format.bytes), isNumber: true },
  ];
  return h("div", {}, table("crossing-rows", "one microbatch, all ranks together", columns, facts.crossings, (r) => Object.values(r).join(" ")),
    facts.ties.map((text) => h("p", {}, text)));
}

/** Groups and links of each stage; a single axis is said in words. */
function devices(facts) {
  const list = (ranks) => (ranks.length > 6 ? `${ranks.slice(0, 3).join(", ")}, … ${ranks.at(-1)}` : ranks.join(", "));
  const axis = ({ name, size, groups, first, n_nodes, bytes_per_s }) => h("li", {}, h("b", {}, `${name} = `),
    groups === 1 ? `all ${size}, in rank order` : `${groups} groups of ${size}, the first of ranks ${list(first)}`,
    `; ${n_nodes === 1 ? "inside a node" : `across ${n_nodes} nodes`}${bytes_per_s ? `, ${format.bytes(bytes_per_s)}/s` : ""}`);
  const stages = facts.devices.map(({ ranks: [first, last], axes }, k) => h("div", { class: "device-stage", style: `flex-grow: ${last - first + 1}` },
    h("h3", {}, `${facts.stages.length > 1 ? `stage ${k}: ` : ""}${first === last ? `rank ${first}` : `ranks ${first} to ${last}`}`),
    h("ul", {}, axes.length ? axes.map(axis) : h("li", {}, "one rank"))));
  return h("div", { class: "devices" }, stages);
}

function code(files) {
  return h("div", {}, Object.entries(files).map(([name, text]) => h("details", { class: "file", id: name }, h("summary", {}, `${name}, ${text.split("\n").length - 1} lines`),
    h("pre", {}, text.replace(/\n$/, "").split("\n").map((line, k) => h("span", { class: "line", id: `${name}-${k + 1}`, "data-line": k + 1 }, `${line}\n`))))));
}

/** A link into a closed file opens it, whoever follows it. */
function openCode() {
  const line = document.getElementById(anchor());
  const file = line?.closest("details.file");
  if (!file || file.open) return;
  file.open = true;
  line.scrollIntoView();
}
window.addEventListener("hashchange", openCode);

function assumptions(facts) {
  return h("ul", { class: "assumptions" }, [...facts.assumptions, facts.optimality, `graph ${facts.setting.graph_hash}`].map((line) => h("li", {}, line)));
}
