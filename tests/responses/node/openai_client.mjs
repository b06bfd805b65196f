// Runs the `openai` package's stream helper. Reads {baseURL, jobs: [{body}]} from standard input, writes what it gave.

import { readFileSync } from "node:fs";
import OpenAI from "openai";

const { baseURL, jobs } = JSON.parse(readFileSync(0, "utf8"));
const client = new OpenAI({ baseURL, apiKey: "sk-test", maxRetries: 0 });
const results = [];
for (const { body } of jobs) results.push(await run(body).catch((error) => ({ thrown: String(error.message) })));
console.log(JSON.stringify(results));

async function run(body) {
  const kinds = [];
  const stream = client.responses.stream(body);
  for await (const event of stream) kinds.push(event.type);
  const final = await stream.finalResponse();
  return { kinds, status: final.status, text: final.output_text, output: final.output, thrown: null };
}
