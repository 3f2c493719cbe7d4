// Bundles the page: `npm ci && npm run build` writes bundle/page.js and bundle/page.css.
//
// Each begins with the SHA-256 of what it was built of, so that a test without Node can tell whether
// a bundle is stale. page.js lists the libraries in it with version and licence; LICENSES.txt has
// their texts.
import { createHash } from "node:crypto";
import { existsSync, readFileSync, readdirSync, writeFileSync } from "node:fs";
import { build } from "esbuild";

const sources = ["package-lock.json", "build.mjs", ...readdirSync("src").sort().map((f) => `src/${f}`)];
const hash = createHash("sha256");
for (const path of sources) hash.update(path).update("\0").update(readFileSync(path)).update("\0");
const stamp = `sources ${hash.digest("hex")}`;

const { packages } = JSON.parse(readFileSync("package-lock.json", "utf8"));
const made = await build({
  entryPoints: ["src/main.js"],
  bundle: true,
  minify: true,
  keepNames: true, // `figure` writes the names of formats into the page
  format: "iife",
  target: "es2022",
  legalComments: "inline",
  metafile: true,
  write: false,
});
const used = new Set(
  Object.keys(made.metafile.inputs)
    .map((path) => path.match(/node_modules\/(@[^/]+\/[^/]+|[^/]+)\//)?.[1])
    .filter(Boolean),
);
const libraries = [...used]
  .sort()
  .map((name) => [name, packages[`node_modules/${name}`]])
  .map(([name, { version, license }]) => ` * ${name} ${version}, ${license}`);

// No text of a script may end its element.
const script = made.outputFiles[0].text.replaceAll("</script", "<\\/script");
writeFileSync("bundle/page.js", `/*! ${stamp}\n * with\n${libraries.join("\n")}\n */\n${script}`);
const style = await build({ entryPoints: ["src/page.css"], bundle: true, minify: true, write: false });
writeFileSync("bundle/page.css", `/* ${stamp} */\n${style.outputFiles[0].text}`);

const texts = [...used].sort().map((name) => {
  const folder = `node_modules/${name}`;
  const file = ["LICENSE", "LICENSE.md", "LICENSE.txt", "License", "license"].map((f) => `${folder}/${f}`).find(existsSync);
  const { version, license } = packages[folder];
  const text = file ? readFileSync(file, "utf8").trim() : `${license}; the package has no licence file.`;
  return `${name} ${version}\n\n${text}\n`;
});
writeFileSync("bundle/LICENSES.txt", `What page.js is made of.\n\n${texts.join(`\n${"-".repeat(72)}\n\n`)}`);
