"""`llama-index`: its OpenAI-like model and embeddings, as its docs set them up for a server of one's own."""

from __future__ import annotations

from typing import Any

from llama_index.core import Settings, VectorStoreIndex
from llama_index.core.llms import ChatMessage
from llama_index.core.schema import Document
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike

from tests.clients.checking import PROMPT, Target, run_checks


def model(target: Target, **more: Any) -> OpenAILike:
    usual = {"max_tokens": 12, "temperature": 0, "max_retries": 0, "context_window": 2048}
    options = {"is_chat_model": True, "is_function_calling_model": True, **usual, **more}
    return OpenAILike(model=target.model, api_base=target.base_url, api_key=target.api_key, **options)


def embedding(target: Target) -> OpenAILikeEmbedding:
    return OpenAILikeEmbedding(model_name=target.model, api_base=target.base_url, api_key=target.api_key)


def check_a_chat_whole_and_streamed(target: Target) -> None:
    messages = [ChatMessage(role="user", content=PROMPT)]
    whole = model(target).chat(messages)
    assert whole.message.content
    assert "".join(piece.delta or "" for piece in model(target).stream_chat(messages)) == whole.message.content


def check_a_completion(target: Target) -> None:
    assert model(target, is_chat_model=False).complete("The sea is").text


async def check_async(target: Target) -> None:
    assert (await model(target).achat([ChatMessage(role="user", content=PROMPT)])).message.content


def check_a_tool(target: Target) -> None:
    def get_weather(city: str) -> str:
        """The weather of a city."""
        return f"sunny in {city}"

    tool = FunctionTool.from_defaults(get_weather)
    one = model(target, max_tokens=300)
    told = one.chat_with_tools([tool], user_msg="The weather in Rome?", tool_required=True)
    (call,) = one.get_tool_calls_from_response(told)
    assert call.tool_name == "get_weather"
    assert isinstance(call.tool_kwargs.get("city"), str)


def check_an_index_and_a_query(target: Target) -> None:
    Settings.llm, Settings.embed_model = model(target), embedding(target)
    documents = [Document(text="The sea is blue."), Document(text="A train is late.")]
    index = VectorStoreIndex.from_documents(documents)
    answer = index.as_query_engine(similarity_top_k=1).query("What colour is the sea?")
    assert len(answer.source_nodes) == 1
    assert str(answer)


if __name__ == "__main__":
    run_checks(globals())
