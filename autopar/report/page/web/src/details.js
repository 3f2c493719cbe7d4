// What is known of one node of the graph, beside it.
import { figure, h } from "./dom.js";
import * as format from "./format.js";
import { movedText } from "./graph.js";

export const codeLink = ({ file, line }) => `#${file}-${line}`;

/** A path without what comes before the installed packages. */
export const shortPath = (path) => path.replace(/^.*\/(site|dist)-packages\//, "");

export function details(shown, axes) {
  const d = shown.detail;
  const row = (name, ...value) => h("tr", {}, h("th", { scope: "row" }, name), h("td", {}, ...value.flat()));
  const spec = (text) => `${text} on ${axes.map((a) => a.name).join(" ")}`;
  return [
    h("h3", {}, shown.path || shown.title),
    shown.copies > 1 ? h("p", { class: "small" }, `one of ${shown.copies} equal blocks; times and bytes are of one`) : "",
    h("table", { class: "facts" }, h("tbody", {},
      row("operators", d.operators.join(", ") || d.kind),
      d.shape.length ? row("result", `${d.dtype}[${d.shape.join(", ")}] on a rank, [${d.global_shape.join(", ")}] of a microbatch on all`) : "",
      d.placements.length ? row("placement", d.placements.map((p) => `${p.axis}: ${p.placement}, ${p.kind}`).join("; ")) : "",
      row("forward", figure(d.forward_s, format.seconds, { "data-what": "forward" }), " a step"),
      row("backward", figure(d.backward_s, format.seconds, { "data-what": "backward" }), " a step", d.again_s ? [", of it run again: ", figure(d.again_s, format.seconds)] : ""),
      movedText(d) ? row("communication", `${movedText(d)} a step`) : "",
      row("kept for backward", figure(d.kept_bytes, format.bytes, { "data-what": "kept" }), " a microbatch"),
      d.collectives.length ? row("inside", d.collectives.map((c) => `${c.kind} over ${c.axes}, ${format.bytes(c.size_bytes)}`).join("; ")) : "",
      d.where.length ? row("source", d.where.map((where) => h("div", { class: "source", title: where }, shortPath(where)))) : "",
      d.generated ? row("generated", h("a", { href: codeLink(d.generated) }, `${d.generated.file}:${d.generated.line}`)) : "")),
    runnersUp(d.runners_up),
    d.parameters.map((p) => h("div", { class: "parameter" }, h("h4", {}, shown.named(p.name)),
      h("p", {}, `${format.shape(p.shape)}, stored ${spec(p.stored)}${p.used === p.stored ? "" : `, used ${p.used}`}`,
        p.gathers.length ? `; gathered at use: ${p.gathers.join("; ")}` : "", ". ",
        figure(p.stored_bytes, format.bytes), " on a rank."),
      runnersUp(p.runners_up))),
  ].flat();
}

function runnersUp(options) {
  if (!options.length) return "";
  return h("table", { class: "runners" }, h("caption", {}, "next best, without a memory limit"),
    h("tbody", {}, options.map((o) => h("tr", {}, h("td", {}, h("code", {}, o.option)),
      h("td", { class: "n" }, o.extra_s ? `+${format.seconds(o.extra_s)} a step` : "as fast")))));
}
