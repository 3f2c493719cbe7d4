// Light or dark: the system's choice until the reader makes one.
import { h } from "./dom.js";
import { keep, kept } from "./state.js";

export function themeButton() {
  const root = document.documentElement;
  const isDark = () => (root.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  const button = h("button", { type: "button", id: "theme", onclick: () => { root.dataset.theme = isDark() ? "light" : "dark"; keep("theme", root.dataset.theme); name(); } });
  const name = () => { button.textContent = isDark() ? "light" : "dark"; };
  if (kept("theme")) root.dataset.theme = kept("theme");
  name();
  return button;
}
