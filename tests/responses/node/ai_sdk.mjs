// Runs jobs with lines of @ai-sdk/openai. Reads {baseURL, jobs: [{line, turns: [...]}]} from standard input, writes
// [[...]]: what each turn of each job gave. A turn goes on from what the ones before said, and `results` answers their
// calls; with `byId` it refers to the one before by its id alone.

import { readFileSync } from "node:fs";

const WAIT_MS = 240_000;
const { baseURL, jobs } = JSON.parse(readFileSync(0, "utf8"));
const done = [];
for (const job of jobs) done.push(await run(job));
console.log(JSON.stringify(done));

async function run({ line, turns }) {
  const { createOpenAI } = await import(line);
  const provider = createOpenAI({ baseURL, apiKey: "sk-test" });
  const results = [];
  let prompt = [];
  let last = empty();
  for (const turn of turns) {
    const answers = last.calls.map((call, number) => toolResult(call, turn.results?.[number] ?? "none"));
    prompt = [...(turn.byId ? [] : prompt), ...answers, ...(turn.prompt ?? [])];
    const settings = structuredClone(turn.settings);
    if (turn.byId) settings.providerOptions = { openai: { previousResponseId: last.responseId } };
    const model = provider.responses(turn.model);
    last = await outcome(model, { prompt, ...settings }, turn);
    results.push(last);
    prompt = [...prompt, { role: "assistant", content: last.said }];
  }
  return results;
}

function empty() {
  const nothing = { finish: null, usage: null, responseId: null, thrown: null, status: null };
  return { text: "", deltas: 0, reasoning: "", calls: [], said: [], errors: [], unbegun: 0, unclosed: 0, ...nothing };
}

async function outcome(model, given, { stream, abortAfter }) {
  const result = empty();
  const abort = new AbortController();
  const abortSignal = AbortSignal.any([abort.signal, AbortSignal.timeout(WAIT_MS)]);
  try {
    const parts = stream ? (await model.doStream({ ...given, abortSignal })).stream
      : asStream(await model.doGenerate({ ...given, abortSignal }));
    const open = new Map();
    for await (const part of parts) {
      take(part, result, open);
      if (abortAfter && result.deltas >= abortAfter) abort.abort();
    }
    result.unclosed = open.size;
  } catch (error) {
    result.thrown = `${error.name}: ${error.message}`;
    result.status = error.statusCode ?? null;
  }
  return result;
}

function* asStream({ content, ...end }) {
  for (const { type, text, ...part } of content) {
    if (text === undefined) yield { type, ...part };
    else for (const phase of ["start", "delta", "end"]) yield { ...part, type: `${type}-${phase}`, id: type, delta: text };
  }
  yield { type: "finish", ...end };
}

function take(part, result, open) {
  const [kind, phase] = part.type.split("-");
  if (part.type === "error") result.errors.push(String(part.error?.message ?? JSON.stringify(part.error)));
  if (part.type === "finish") finish(result, part);
  if (part.type === "tool-call") {
    result.calls.push(part);
    result.said.push(asPrompt(part));
  }
  if (kind !== "text" && kind !== "reasoning") return;
  if (phase === "start") {
    open.set(part.id, asPrompt({ ...part, type: kind }, ""));
    result.said.push(open.get(part.id));
  }
  if (!open.has(part.id)) result.unbegun += 1; // the SDK's own users throw here
  if (phase === "delta") {
    if (open.has(part.id)) open.get(part.id).text += part.delta;
    result[kind] += part.delta;
    result.deltas += kind === "text" ? 1 : 0;
  }
  if (part.providerMetadata && open.has(part.id)) open.get(part.id).providerOptions = part.providerMetadata;
  if (phase === "end") open.delete(part.id);
}

// Old lines give the finish reason and the token counts flat, new ones nested.
function finish(result, { finishReason, usage, providerMetadata }) {
  result.finish = finishReason?.unified ?? finishReason;
  result.usage = {
    input: usage.inputTokens?.total ?? usage.inputTokens,
    output: usage.outputTokens?.total ?? usage.outputTokens,
  };
  result.responseId = providerMetadata?.openai?.responseId ?? null;
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

function toolResult({ toolCallId, toolName }, value) {
  const result = { type: "tool-result", toolCallId, toolName, output: { type: "text", value } };
  return { role: "tool", content: [result] };
}
