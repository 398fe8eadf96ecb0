// Parses the Mermaid texts whose files are given, and says of each "parsed" or what is wrong. Needs mermaid and jsdom.
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const require = createRequire(pathToFileURL(`${process.argv[2]}/`));
const { JSDOM } = require("jsdom");
const { window } = new JSDOM("");
global.window = window;
global.document = window.document;
const { default: mermaid } = await import(pathToFileURL(require.resolve("mermaid")));

for (const file of process.argv.slice(3)) {
  try {
    const { diagramType } = await mermaid.parse(readFileSync(file, "utf8"));
    const { db } = await mermaid.mermaidAPI.getDiagramFromText(readFileSync(file, "utf8"));
    const edges = db.getEdges().map(({ start, end, text, stroke }) => ({ start, end, text, stroke }));
    const nodes = [...db.getVertices().values()].map(({ id, text }) => ({ id, text }));
    console.log(JSON.stringify({ diagramType, nodes, edges }));
  } catch (error) {
    console.log(JSON.stringify({ error: String(error) }));
  }
}
