// The official JavaScript packages of OpenAI, Anthropic and Ollama against a running server: one line a check.
import Anthropic from "@anthropic-ai/sdk";
import { Ollama } from "ollama";
import OpenAI from "openai";
import assert from "node:assert/strict";

const [baseURL, apiKey, model] = process.argv.slice(2);
const root = baseURL.replace(/\/v1$/, "");
const openai = new OpenAI({ baseURL, apiKey, maxRetries: 0 });
const anthropic = new Anthropic({ baseURL: root, apiKey, maxRetries: 0 });
const ollama = new Ollama({ host: root, headers: { Authorization: `Bearer ${apiKey}` } });
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
