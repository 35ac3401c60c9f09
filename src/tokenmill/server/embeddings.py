"""`POST /v1/embeddings`, `/tokenize` and `/detokenize`: what a model makes of a text without going on with it."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import numpy as np

from tokenmill.engine.async_llm import AsyncLLM
from tokenmill.params import token_ids
from tokenmill.server.completions import prompts_of
from tokenmill.server.config import ServerConfig
from tokenmill.server.errors import model_not_found
from tokenmill.server.requests import DetokenizeRequest, EmbeddingRequest, TokenizeRequest


async def embeddings(body: EmbeddingRequest, llm: AsyncLLM, config: ServerConfig) -> dict[str, Any]:
    """One vector for each input, as numbers or as base64 of little-endian float32."""
    if body.model != config.model_name:
        raise model_not_found(body.model)
    inputs = prompts_of(body.input, config.max_prompts)
    outputs = await asyncio.gather(*(llm.embed(one, pooling=body.pooling) for one in inputs))
    data = []
    for index, output in enumerate(outputs):
        vector: Any = output.outputs.embedding
        if body.encoding_format == "base64":
            vector = base64.b64encode(np.asarray(vector, dtype="<f4").tobytes()).decode()
        data.append({"object": "embedding", "index": index, "embedding": vector})
    num_tokens = sum(output.usage.prompt_tokens for output in outputs)
    used = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    return {"object": "list", "data": data, "model": body.model, "usage": used}


def tokenize(body: TokenizeRequest, llm: AsyncLLM, max_model_len: int) -> dict[str, Any]:
    """The ids of a text."""
    ids = llm.get_tokenizer().encode(body.prompt, add_special=body.add_special_tokens)
    return {"count": len(ids), "max_model_len": max_model_len, "tokens": ids}


def detokenize(body: DetokenizeRequest, llm: AsyncLLM) -> dict[str, Any]:
    """The text of ids."""
    return {"prompt": llm.get_tokenizer().decode(token_ids("tokens", body.tokens), skip_special=False)}
