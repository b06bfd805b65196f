// Runs the `openai` package's stream helper. Reads {baseURL, jobs: [body, ...]} from standard input, writes what each
// gave.

import { readFileSync } from "node:fs";
import OpenAI from "openai";

const { baseURL, jobs } = JSON.parse(readFileSync(0, "utf8"));
const client = new OpenAI({ baseURL, apiKey: "sk-test", maxRetries: 0, timeout: 240_000 });
const results = [];
for (const body of jobs) results.push(await run(body));
console.log(JSON.stringify(results));

async function run(body) {
  const result = { kinds: [], text: "", final: null, thrown: null };
  try {
    const stream = client.responses.stream(body);
    for await (const event of stream) {
      result.kinds.push(event.type);
      if (event.type === "response.output_text.delta") result.text += event.delta;
    }
    result.final = await stream.finalResponse();
  } catch (error) {
    result.thrown = String(error.message);
  }
  return result;
}
