"""LangChain's ChatOpenAI, run by its own interpreter: `with_langchain.py URL MODEL` prints what it got as JSON."""

import json
import sys

from langchain_openai import ChatOpenAI
from openai import APIStatusError

url, model = sys.argv[1:]
asked = "Say something about water."
weather = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"text": {"type": "string"}}}},
}


def chat(name: str) -> ChatOpenAI:
    length = {"x_simulated_output_tokens": 7}
    return ChatOpenAI(base_url=f"{url}/v1", api_key="none", model=name, temperature=0, max_retries=0, extra_body=length)


whole = chat(model).invoke(asked).content
pieces = [str(chunk.content) for chunk in chat(model).stream(asked) if chunk.content]
(call,) = chat(model).bind_tools([weather], tool_choice="required").invoke(asked).tool_calls
try:
    chat("no-such-model").invoke(asked)
    refused = 0
except APIStatusError as error:
    refused = error.status_code
print(json.dumps({"whole": whole, "pieces": pieces, "tool": [call["name"], call["args"]], "refused": refused}))
