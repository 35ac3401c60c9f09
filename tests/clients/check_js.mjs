// The official JavaScript packages of OpenAI, Anthropic, Ollama and Vercel against a running server: one line a check.
import Anthropic from "@anthropic-ai/sdk";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { embedMany, generateText, jsonSchema, Output, stepCountIs, streamText, tool } from "ai";
import { Ollama } from "ollama";
import OpenAI from "openai";
import assert from "node:assert/strict";

const [baseURL, apiKey, model] = process.argv.slice(2);
const root = baseURL.replace(/\/v1$/, "");
const openai = new OpenAI({ baseURL, apiKey, maxRetries: 0 });
const anthropic = new Anthropic({ baseURL: root, apiKey, maxRetries: 0 });
const ollama = new Ollama({ host: root, headers: { Authorization: `Bearer ${apiKey}` } });
const vercel = createOpenAICompatible({ name: "tokenmill", baseURL, apiKey, supportsStructuredOutputs: true, includeUsage: true });
const messages = [{ role: "user", content: "Write one short sentence about the sea." }];
const options = { num_predict: 12, temperature: 0 };
const schema = {
  type: "object",
  properties: { city: { enum: ["Rome", "Oslo"] } },
  required: ["city"],
  additionalProperties: false,
};

const checks = {
  "openai: a chat, whole and streamed": async () => {
    const asked = { model, messages, max_tokens: 12, temperature: 0 };
    const whole = await openai.chat.completions.create(asked);
    const final = await openai.chat.completions.stream(asked).finalChatCompletion();
    assert.equal(final.choices[0].message.content, whole.choices[0].message.content);
  },
  "openai: a response, streamed": async () => {
    const stream = openai.responses.stream({ model, input: "Hello", max_output_tokens: 8 });
    const final = await stream.finalResponse();
    assert.ok(final.output_text);
  },
  "openai: a conversation, a tool of responses, a stored chat": async () => {
    const talk = await openai.conversations.create({ items: messages });
    const tools = [{ type: "function", name: "get_weather", parameters: schema, strict: true }];
    const asked = { model, conversation: talk.id, max_output_tokens: 300, parallel_tool_calls: false };
    const first = await openai.responses.create({ ...asked, input: "Rome?", tools, tool_choice: "required" });
    const [call] = first.output.filter((item) => item.type === "function_call");
    assert.ok(["Rome", "Oslo"].includes(JSON.parse(call.arguments).city));
    const output = { type: "function_call_output", call_id: call.call_id, output: "sunny" };
    await openai.responses.create({ ...asked, input: [output], tools, tool_choice: "none", max_output_tokens: 8 });
    const items = [];
    for await (const item of openai.conversations.items.list(talk.id, { order: "asc", limit: 2 })) items.push(item.type);
    assert.deepEqual(items, ["message", "message", "function_call", "function_call_output", "message"]);
    const kept = await openai.chat.completions.create({ model, messages, max_tokens: 4, store: true });
    assert.equal((await openai.chat.completions.retrieve(kept.id)).id, kept.id);
  },
  "anthropic: a message, whole and streamed": async () => {
    const asked = { model, messages, max_tokens: 12, temperature: 0 };
    const whole = await anthropic.messages.create(asked);
    const final = await anthropic.messages.stream(asked).finalMessage();
    assert.equal(final.content[0].text, whole.content[0].text);
    assert.equal(final.stop_reason, whole.stop_reason);
  },
  "anthropic: a tool": async () => {
    const tools = [{ name: "get_weather", input_schema: schema }];
    const asked = { model, messages, tools, max_tokens: 300, tool_choice: { type: "any", disable_parallel_tool_use: true } };
    const final = await anthropic.messages.stream(asked).finalMessage();
    assert.equal(final.stop_reason, "tool_use");
    assert.ok(["Rome", "Oslo"].includes(final.content.at(-1).input.city));
  },
  "anthropic: counting and errors": async () => {
    assert.ok((await anthropic.messages.countTokens({ model, messages })).input_tokens > 0);
    await assert.rejects(anthropic.messages.create({ model: "nothing", messages, max_tokens: 1 }), Anthropic.NotFoundError);
  },
  "ollama: a chat, whole and streamed": async () => {
    const whole = await ollama.chat({ model, messages, options });
    let text = "";
    for await (const part of await ollama.chat({ model, messages, options, stream: true })) text += part.message.content;
    assert.equal(text, whole.message.content);
  },
  "ollama: structured output": async () => {
    const told = await ollama.generate({ model, prompt: "A city", format: schema, options: { num_predict: 100 } });
    assert.ok(["Rome", "Oslo"].includes(JSON.parse(told.response).city));
  },
  "ollama: models and embeddings": async () => {
    assert.equal((await ollama.list()).models[0].name, model);
    assert.ok((await ollama.show({ model })).capabilities.includes("completion"));
    assert.equal((await ollama.ps()).models.length, 1);
    assert.equal((await ollama.embed({ model, input: ["a", "b"] })).embeddings.length, 2);
  },
};

Object.assign(checks, {
  "openai: a batch": async () => {
    const body = { model, messages, max_tokens: 4 };
    const line = JSON.stringify({ custom_id: "a", method: "POST", url: "/v1/chat/completions", body });
    const file = await openai.files.create({ file: new File([line], "lines.jsonl"), purpose: "batch" });
    const asked = { input_file_id: file.id, endpoint: "/v1/chat/completions", completion_window: "24h" };
    let batch = await openai.batches.create(asked);
    while (!["completed", "failed"].includes(batch.status)) batch = await openai.batches.retrieve(batch.id);
    assert.equal(batch.request_counts.completed, 1);
    const told = JSON.parse(await (await openai.files.content(batch.output_file_id)).text());
    assert.equal(told.custom_id, "a");
  },
  "ai: text, whole and streamed": async () => {
    const asked = { model: vercel(model), prompt: messages[0].content, maxOutputTokens: 12, temperature: 0, maxRetries: 0 };
    const whole = await generateText(asked);
    const stream = streamText(asked);
    let text = "";
    for await (const piece of stream.textStream) text += piece;
    assert.equal(text, whole.text);
    assert.equal((await stream.usage).outputTokens, whole.usage.outputTokens);
    assert.ok(["stop", "length"].includes(whole.finishReason));
  },
  "ai: structured output": async () => {
    const asked = { model: vercel(model), prompt: "A city", maxOutputTokens: 200, maxRetries: 0 };
    const told = await generateText({ ...asked, output: Output.object({ schema: jsonSchema(schema) }) });
    assert.ok(["Rome", "Oslo"].includes(told.output.city));
  },
  "ai: a tool": async () => {
    const asked = [];
    const get_weather = tool({
      description: "The weather of a city.",
      inputSchema: jsonSchema(schema),
      execute: async ({ city }) => (asked.push(city), "sunny"),
    });
    const told = await generateText({
      model: vercel(model),
      prompt: "The weather in Rome?",
      tools: { get_weather },
      toolChoice: "required",
      stopWhen: stepCountIs(1),
      maxOutputTokens: 300,
      maxRetries: 0,
    });
    assert.ok(["Rome", "Oslo"].includes(asked[0]));
    assert.equal(told.toolResults[0].output, "sunny");
  },
  "ai: embeddings": async () => {
    const told = await embedMany({ model: vercel.textEmbeddingModel(model), values: ["a", "b"], maxRetries: 0 });
    assert.equal(told.embeddings.length, 2);
  },
  "ai: errors": async () => {
    const asked = { model: vercel("nothing"), prompt: "Hello", maxRetries: 0 };
    await assert.rejects(generateText(asked), (error) => error.statusCode === 404);
  },
});

let failed = 0;
for (const [what, check] of Object.entries(checks)) {
  try {
    await check();
    console.log(`ok ${what}`);
  } catch (error) {
    failed = 1;
    console.log(`FAILED ${what}: ${String(error).replace(/\s+/g, " ").slice(0, 600)}`);
  }
}
process.exit(failed);
