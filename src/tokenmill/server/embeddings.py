"""`POST /v1/embeddings`, `/tokenize` and `/detokenize`: what a model makes of a text without going on with it."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import numpy as np

from tokenmill.engine.async_llm import AsyncLLM
from tokenmill.params import check_ids, token_ids
from tokenmill.server.calls import Call, off_the_loop, together
from tokenmill.server.completions import as_prompts
from tokenmill.server.config import ServerConfig
from tokenmill.server.errors import ApiError
from tokenmill.server.requests import DetokenizeRequest, EmbeddingRequest, TokenizeRequest


async def embeddings(call: Call, body: EmbeddingRequest, config: ServerConfig) -> dict[str, Any]:
    """One vector for each input, as numbers or as base64 of little-endian float32."""
    inputs = as_prompts(body.input, config.max_prompts, "input")
    prompts = [
        await call.tokens(len(one), lambda one=one: call.llm.prompt_ids(one))  # type: ignore[misc]
        for one in inputs
    ]
    options: dict[str, Any] = {"pooling": body.pooling, "hints": call.hints, "timeout_s": call.timeout_s}
    outputs = await call.do(asyncio.ensure_future(together(call.llm.embed(one, **options) for one in prompts)))
    data = []
    for index, output in enumerate(outputs):
        vector: Any = output.outputs.embedding
        if body.dimensions is not None and body.dimensions != len(vector):
            raise ApiError(400, f"this model's embeddings have {len(vector)} dimensions", param="dimensions")
        if body.encoding_format == "base64":
            vector = base64.b64encode(np.asarray(vector, dtype="<f4").tobytes()).decode()
        data.append({"object": "embedding", "index": index, "embedding": vector})
    num_tokens = sum(output.usage.prompt_tokens for output in outputs)
    used = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    return {"object": "list", "data": data, "model": body.model, "usage": used}


async def tokenize(body: TokenizeRequest, llm: AsyncLLM) -> dict[str, Any]:
    """The ids of a text."""
    encode = llm.get_tokenizer().encode
    ids = await off_the_loop(len(body.prompt), lambda: encode(body.prompt, add_special=body.add_special_tokens))
    return {"count": len(ids), "max_model_len": llm.max_model_len, "tokens": ids}


def detokenize(body: DetokenizeRequest, llm: AsyncLLM) -> dict[str, Any]:
    """The text of ids."""
    ids = token_ids("tokens", body.tokens)
    check_ids("tokens", ids, llm.get_tokenizer().vocab_size)
    return {"prompt": llm.get_tokenizer().decode(ids, skip_special=False)}
