// node main.mjs RUN_DIR MODEL PROMPT [--max-tokens N] [--seed S]
// Prints the text as it arrives. Exit code 0: the completion is complete; 1: it is not, with the
// reason.

import { resolve } from "node:path";
import { parseArgs } from "node:util";

import { Client } from "./client.mjs";

const { positionals, values } = parseArgs({
  allowPositionals: true,
  options: { "max-tokens": { type: "string", default: "64" }, seed: { type: "string" } },
});
if (positionals.length !== 3) {
  console.error("usage: node main.mjs RUN_DIR MODEL PROMPT [--max-tokens N] [--seed S]");
  process.exit(2);
}
const [runDir, model, prompt] = positionals;
const options = { max_tokens: Number(values["max-tokens"]) };
if (values.seed !== undefined) options.seed = Number(values.seed);

const client = new Client(`ipc://${resolve(runDir)}/front.ipc`);
const stream = client.stream(model, prompt, options);
process.on("SIGINT", () => client.close());
try {
  for await (const delta of stream) process.stdout.write(delta.text);
  console.log();
  process.exitCode = stream.result.reason === "cancelled" ? 1 : 0;
} catch (error) {
  console.error(`\n${error.code}: ${error.message}`);
  process.exitCode = 1;
} finally {
  await client.close();
}
