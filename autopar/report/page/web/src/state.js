// What the reader opened, in the URL: #timeline;heat=bytes;node=s0n5. A copied URL shows the same.

const [first, ...pairs] = decodeURIComponent(location.hash.slice(1)).split(";");
const values = new Map(pairs.map((pair) => [pair.slice(0, pair.indexOf("=")), pair.slice(pair.indexOf("=") + 1)]));

/** The part of the page, or the line, that the URL leads to. */
export const anchor = () => decodeURIComponent(location.hash.slice(1)).split(";")[0];
export const kept = (name) => values.get(name);

export function keep(name, value) {
  if (value === null || value === "") values.delete(name);
  else values.set(name, String(value));
  write();
}

function write() {
  const hash = [anchor(), ...[...values].map(([name, value]) => `${name}=${value}`)].map(encodeURI).join(";");
  history.replaceState(null, "", values.size || anchor() ? `#${hash}` : location.pathname + location.search);
}

/** Opened parts stay open; links keep what is open. `page` is drawn already. */
export function remember(page) {
  for (const id of (kept("open") ?? "").split(",").filter(Boolean)) document.getElementById(id)?.setAttribute("open", "");
  page.addEventListener("toggle", () => keep("open", [...page.querySelectorAll("details[id][open]")].map((one) => one.id).join(",")), true);
  window.addEventListener("hashchange", () => values.size && write());
  if (first) document.getElementById(first)?.scrollIntoView();
}
