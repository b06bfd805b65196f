// Runs jobs with lines of @ai-sdk/openai. Reads {baseURL, jobs: [{line, turns: [...]}]} from standard input, writes
// [{turns: [...]}]: what each turn gave. A turn after the first goes on from what the one before said.

import { readFileSync } from "node:fs";

const { baseURL, jobs } = JSON.parse(readFileSync(0, "utf8"));
const results = [];
for (const job of jobs) results.push(await run(job));
console.log(JSON.stringify(results));

async function run({ line, turns }) {
  const { createOpenAI } = await import(line);
  const done = [];
  let prompt = [];
  for (const turn of turns) {
    const provider = createOpenAI({ baseURL, apiKey: "sk-test", fetch: scripted(turn.steps) });
    prompt = [...prompt, ...(turn.prompt ?? [])];
    const given = { prompt, ...turn.settings };
    const result = await (turn.stream ? streamed : generated)(provider.responses("m"), given).catch(failed);
    done.push(result);
    prompt = [...prompt, { role: "assistant", content: result.said }];
    for (const call of result.calls) prompt.push(toolResult(call));
  }
  return { turns: done };
}

// The scripted server does what the request says; a client cannot know of it.
function scripted(steps) {
  return (url, init) => {
    if (!steps || !init.body) return fetch(url, init);
    return fetch(url, { ...init, body: JSON.stringify({ ...JSON.parse(init.body), fake_script: steps }) });
  };
}

function failed(error) {
  return { ...empty(), thrown: `${error.name}: ${error.message}`, status: error.statusCode ?? null };
}

function empty() {
  return { text: "", reasoning: "", calls: [], said: [], errors: [], finish: null, usage: null, thrown: null };
}

async function generated(model, given) {
  const answer = await model.doGenerate(given);
  const result = empty();
  for (const part of answer.content) {
    if (part.type === "text") result.text += part.text;
    if (part.type === "reasoning") result.reasoning += part.text;
    if (part.type === "tool-call") result.calls.push(part);
    result.said.push(asPrompt(part, part.text));
  }
  return { ...result, finish: unified(answer.finishReason), usage: total(answer.usage) };
}

async function streamed(model, given) {
  const { stream } = await model.doStream(given);
  const result = empty();
  const open = new Map();
  for await (const part of stream) {
    const [kind, phase] = part.type.split("-");
    if (part.type === "error") result.errors.push(String(part.error?.message ?? JSON.stringify(part.error)));
    if (part.type === "finish") Object.assign(result, { finish: unified(part.finishReason), usage: total(part.usage) });
    if (part.type === "tool-call") {
      result.calls.push(part);
      result.said.push(asPrompt(part));
    }
    if (kind !== "text" && kind !== "reasoning") continue;
    if (phase === "start") {
      open.set(part.id, asPrompt({ ...part, type: kind }, ""));
      result.said.push(open.get(part.id));
    }
    if (phase === "delta") {
      open.get(part.id).text += part.delta;
      result[kind] += part.delta;
    }
    if (part.providerMetadata) open.get(part.id).providerOptions = part.providerMetadata;
    if (phase === "end") open.delete(part.id);
  }
  return { ...result, unclosed: open.size };
}

function asPrompt(part, text) {
  const providerOptions = part.providerMetadata;
  if (part.type !== "tool-call") return { type: part.type, text, providerOptions };
  let input = part.input;
  try {
    input = JSON.parse(input);
  } catch {}
  return { type: part.type, toolCallId: part.toolCallId, toolName: part.toolName, input, providerOptions };
}

function toolResult({ toolCallId, toolName }) {
  const result = { type: "tool-result", toolCallId, toolName, output: { type: "text", value: "5" } };
  return { role: "tool", content: [result] };
}

function unified(reason) {
  return reason?.unified ?? reason;
}

function total(usage) {
  return usage.outputTokens?.total ?? usage.outputTokens;
}
