// The page of a plan, or of plans side by side, drawn from the JSON in the element `facts`.
import { comparisonPage } from "./comparison.js";
import { planPage } from "./plan.js";
import { remember } from "./state.js";

const facts = JSON.parse(document.getElementById("facts").textContent);
const page = document.getElementById("page");
page.append(...(facts.format === "autopar comparison" ? comparisonPage(facts) : planPage(facts)));
remember(page);
document.documentElement.dataset.ready = performance.now().toFixed(0); // milliseconds of loading
