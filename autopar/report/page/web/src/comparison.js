// Plans side by side, in columns: bars on one scale, then tables of what they decided and cost.
import { memoryBar, timeBar } from "./bars.js";
import { h, section } from "./dom.js";
import { table } from "./table.js";
import { themeButton } from "./theme.js";

export function comparisonPage(facts) {
  const drawn = facts.bars.filter((plan) => plan.time);
  const longest = Math.max(...drawn.map((plan) => plan.time.step_time_s));
  const fullest = Math.max(...drawn.map((plan) => Math.max(plan.memory.peak_bytes, plan.memory.limit_bytes)));
  return [
    h("header", { class: "top" }, h("h1", {}, facts.names.join(" and ")), themeButton()),
    ...facts.notes.map((note) => h("p", { class: "note" }, note)),
    drawn.length ? section("time", "What a step is made of", h("div", { class: "columns" }, drawn.map((plan) =>
      h("div", { class: "of-plan" }, h("h3", {}, plan.name), timeBar(plan.time, longest))))) : "",
    drawn.length ? section("memory", "What memory is made of", h("div", { class: "columns" }, drawn.map((plan) =>
      h("div", { class: "of-plan" }, h("h3", {}, plan.name), memoryBar(plan.memory, fullest))))) : "",
    ...facts.tables.map((made, k) => section(`table-${k}`, made.title, made.rows.length
      ? table(`rows-${k}`, made.title, made.heads.map((name, at) => ({ name, value: (row) => row[at], show: (row) => row[at] })),
        made.rows, (row) => row.join(" "))
      : h("p", {}, "none"))),
  ];
}
