// Elements by one call: h("p", { class: "note" }, "text", child).

const SVG = "http://www.w3.org/2000/svg";

export function h(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

export function s(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

/** A number as text, with its value and how it is written for whoever reads the page by program. */
export function figure(value, format, attributes = {}) {
  return h("span", { class: "figure", "data-value": value ?? "", "data-format": format.name, ...attributes }, format(value));
}

/** A titled part of the page; `id` is where links lead. */
export function section(id, title, ...children) {
  return h("section", { id, "aria-labelledby": `${id}-title` },
    h("h2", { id: `${id}-title` }, title), ...children);
}
