// What would help, and what the plan was chosen over; and commands that can be copied.
import { figure, h } from "./dom.js";
import * as format from "./format.js";

const N_ALTERNATIVES = 5;

/** A command with a button that copies it. */
export function command(text) {
  const button = h("button", { type: "button", class: "copy", onclick: async () => { await copy(text); button.textContent = "copied"; } }, "copy");
  return h("div", { class: "command" }, h("code", {}, text), button);
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch { // no permission, as in a frame or over http
    const field = h("textarea", {}, text);
    document.body.append(field);
    field.select();
    document.execCommand("copy");
    field.remove();
  }
}

export function helps(facts) {
  const rows = (of, id) => h("div", { class: "helps", id }, of.map((row) => h("div", { class: "help" }, h("span", { class: "name" }, row.what),
    h("span", { class: "n" }, figure(row.gain, format.gain)), h("span", { class: "n" }, figure(row.step_time_s, format.seconds)), h("span", { class: "n" }, figure(row.peak_bytes, format.bytes)),
    h("span", { class: "why" }, row.note), command(row.command))));
  return h("div", {}, h("p", { class: "small" }, "Samples per second more or less, the step and the peak memory of a rank then. The same plan is simulated, unless a row says that another was planned."),
    h("h3", {}, "Choices"), rows(facts.choices, "choice-rows"), h("h3", {}, "Another machine"), rows(facts.machine, "machine-rows"));
}

export function alternatives(facts) {
  const rows = facts.alternatives;
  if (!rows.length) return h("p", {}, `${facts.chosen}; no alternatives were tried`);
  const times = rows.map((row) => row.step_time_s).filter((time) => time !== null);
  const most = Math.min(Math.max(...times), 3 * Math.min(...times));
  const first = [...rows.filter((row) => row.chosen), ...rows.filter((row) => !row.chosen)].slice(0, N_ALTERNATIVES + 1);
  const shown = rows.filter((row) => first.includes(row)), rest = rows.filter((row) => !first.includes(row));
  const drawn = (row) => alternative(row, facts, most, rows.indexOf(row));
  return h("div", {}, h("p", { class: "small" }, facts.optimality), rows.some((row) => row.within_error) ? h("p", { class: "small" }, `within the error: ${facts.error}`) : "",
    h("div", { class: "alternatives" }, shown.map(drawn)),
    rest.length ? h("details", { class: "rest", id: "other-alternatives" }, h("summary", {}, `${rest.length} more`), h("div", { class: "alternatives" }, rest.map(drawn))) : "");
}

function alternative(row, facts, most, number) {
  const known = row.step_time_s !== null, inside = difference(row, facts), less = facts.predicted.peak_bytes - row.peak_bytes;
  const memory = known && row.peak_bytes !== null && Math.abs(less) > 0.02 * facts.predicted.peak_bytes ? `${format.bytes(Math.abs(less))} ${less > 0 ? "less" : "more"} memory` : "";
  const line = [h("span", { class: "name" }, row.name),
    h("span", { class: "track" }, known ? h("span", { class: "fill", style: `width: ${100 * Math.min(row.step_time_s / most, 1)}%` }) : ""),
    h("span", { class: "n" }, figure(row.step_time_s, format.seconds)), h("span", { class: "why" }, row.chosen ? "the plan" : [row.why, row.within_error ? "within the error" : "", memory].filter(Boolean).join("; "))];
  const kind = row.chosen ? "alternative chosen" : "alternative";
  return inside ? h("details", { class: kind, id: `alternative-${number}` }, h("summary", {}, line), inside) : h("div", { class: kind }, h("div", { class: "summary" }, line));
}

/** How an alternative differs from the plan; null if the search recorded no more than its row says. */
function difference(row, facts) {
  const own = facts.alternatives.find((one) => one.chosen)?.summary;
  if (row.chosen || !row.summary || !own) return null;
  return h("div", { class: "difference" }, row.peak_bytes === null ? "" : h("p", {}, "peak memory of a rank: ", figure(row.peak_bytes, format.bytes)),
    sideBySide("seconds of a step", own.times_s, row.summary.times_s, format.seconds),
    sideBySide("bytes of collectives", own.traffic_bytes, row.summary.traffic_bytes, format.bytes),
    sideBySide("parameters that differ", own.parameters, row.summary.parameters, (text) => text ?? format.NONE, true));
}

function sideBySide(title, plan, other, text, onlyDifferent = false) {
  const keys = [...new Set([...Object.keys(plan), ...Object.keys(other)])].filter((key) => !onlyDifferent || plan[key] !== other[key]);
  const cell = (value) => h("td", { class: onlyDifferent ? null : "n" }, onlyDifferent ? text(value) : figure(value ?? null, text));
  return h("div", { class: "scroll" }, h("table", {}, h("caption", {}, keys.length ? title : `${title}: none`), h("thead", {}, h("tr", {}, ["", "the plan", "this one"].map((name, k) => h("th", { class: k && !onlyDifferent ? "n" : null }, name)))),
    h("tbody", {}, keys.map((key) => h("tr", {}, h("td", {}, key), cell(plan[key]), cell(other[key]))))));
}
