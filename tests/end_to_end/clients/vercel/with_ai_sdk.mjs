// Vercel's AI SDK on Node: `with_ai_sdk.mjs URL MODEL` prints what it got as JSON.

import { generateText, jsonSchema, streamText, tool } from "ai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";

const [url, model] = process.argv.slice(2);
const headrace = createOpenAICompatible({ name: "headrace", baseURL: `${url}/v1`, apiKey: "none", includeUsage: true });
const asked = (name) => ({
  model: headrace(name),
  messages: [{ role: "user", content: "Say something about water." }],
  temperature: 0,
  maxRetries: 0,
  providerOptions: { headrace: { x_simulated_output_tokens: 7 } },
});

const whole = (await generateText(asked(model))).text;
const pieces = [];
for await (const piece of streamText(asked(model)).textStream) pieces.push(piece);
const parameters = { type: "object", properties: { text: { type: "string" } } };
const weather = tool({ inputSchema: jsonSchema(parameters) });
const [call] = (await generateText({ ...asked(model), tools: { weather }, toolChoice: "required" })).toolCalls;
const refused = await generateText(asked("no-such-model")).then(() => 0, (error) => error.statusCode);
console.log(JSON.stringify({ whole, pieces, tool: [call.toolName, call.input], refused }));
