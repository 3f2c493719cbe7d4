// A table that sorts by a click on its heads and filters by words.
import { h } from "./dom.js";

/**
 * columns   [{ name, value: row => what sorts, show: row => text or element, isNumber }]
 * words     row => the text that the filter looks through
 */
export function table(id, caption, columns, rows, words) {
  const body = h("tbody");
  const shown = h("span", { class: "small", role: "status" });
  const filter = h("input", { type: "search", placeholder: "filter", "aria-label": `filter ${caption}` });
  let sorted = rows, by = null, isDown = false;

  function draw() {
    const wanted = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = sorted.filter((row) => wanted.every((word) => words(row).toLowerCase().includes(word)));
    body.replaceChildren(...found.map((row) => h("tr", {}, columns.map((c) =>
      h("td", { class: c.isNumber ? "n" : null }, c.show(row))))));
    shown.textContent = found.length === rows.length ? `${rows.length} rows` : `${found.length} of ${rows.length} rows`;
  }

  const heads = columns.map((column) => {
    const button = h("button", { type: "button", onclick: () => sort(column, head) }, column.name);
    const head = h("th", { scope: "col", class: column.isNumber ? "n" : null }, button);
    return head;
  });

  function sort(column, head) {
    isDown = by === column ? !isDown : Boolean(column.isNumber);
    by = column;
    const sign = isDown ? -1 : 1;
    sorted = [...rows].sort((a, b) => sign * compare(column.value(a), column.value(b)));
    for (const other of heads) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", isDown ? "descending" : "ascending");
    draw();
  }

  filter.addEventListener("input", draw);
  draw();
  return h("div", { class: "table", id }, h("div", { class: "tools" }, filter, shown),
    h("div", { class: "scroll" }, h("table", {}, h("caption", {}, caption),
      h("thead", {}, h("tr", {}, heads)), body)));
}

function compare(a, b) {
  if (typeof a === "number" || typeof b === "number") return (a ?? -Infinity) - (b ?? -Infinity);
  return String(a).localeCompare(String(b), undefined, { numeric: true });
}
