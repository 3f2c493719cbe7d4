// Who zooms: a drag, a pinch, or the wheel with Ctrl or ⌘. A plain wheel and one finger scroll the page.

export function isAsked(event) {
  if (event.type === "wheel") return event.ctrlKey || event.metaKey;
  if (event.touches) return event.touches.length > 1;
  return !event.button && !event.ctrlKey;
}

export const HOW = "Ctrl + wheel or + − zoom, drag or arrows move";
