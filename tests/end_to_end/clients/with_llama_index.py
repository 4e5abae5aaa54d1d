"""LlamaIndex's OpenAILike, run by its own interpreter: `with_llama_index.py URL MODEL` prints what it got as JSON."""

import json
import sys

from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from openai import APIStatusError

url, model = sys.argv[1:]
asked = [ChatMessage(role="user", content="Say something about water.")]


def chat(name: str) -> OpenAILike:
    return OpenAILike(
        api_base=f"{url}/v1",
        api_key="none",
        model=name,
        is_chat_model=True,
        is_function_calling_model=True,
        context_window=2048,
        temperature=0,
        max_retries=0,
        additional_kwargs={"extra_body": {"x_simulated_output_tokens": 7}},
    )


def weather(text: str) -> str:
    """Tell the weather."""
    return text


whole = chat(model).chat(asked).message.content
pieces = [part.delta for part in chat(model).stream_chat(asked) if part.delta]
said = chat(model).chat_with_tools([FunctionTool.from_defaults(fn=weather)], chat_history=asked, tool_required=True)
(call,) = chat(model).get_tool_calls_from_response(said)
try:
    chat("no-such-model").chat(asked)
    refused = 0
except APIStatusError as error:
    refused = error.status_code
print(json.dumps({"whole": whole, "pieces": pieces, "tool": [call.tool_name, call.tool_kwargs], "refused": refused}))
