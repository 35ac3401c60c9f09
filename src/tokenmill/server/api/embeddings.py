"""`POST /v1/embeddings`, `/tokenize` and `/detokenize`: texts as vectors and as token ids."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np
from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from tokenmill.entrypoints.async_llm import AsyncLLM
from tokenmill.errors import InvalidRequest
from tokenmill.outputs import EmbeddingRequestOutput
from tokenmill.params import check_ids, token_ids
from tokenmill.server import schemas
from tokenmill.server.api.completions import Prompt, as_prompts
from tokenmill.server.bodies import KEY, JsonRoute
from tokenmill.server.config import ServerConfig
from tokenmill.server.errors import ApiError
from tokenmill.server.fields import MOST_IDS
from tokenmill.server.middleware import Caller
from tokenmill.server.models import ServedModel
from tokenmill.server.requests import DetokenizeRequest, EmbeddingRequest, TokenizeRequest, template_options
from tokenmill.server.served import Served
from tokenmill.server.streaming import Call, together, while_connected

AT_A_TIME = 16
"""Inputs of one request that are in the engine at the same time."""
PIECE_ITEMS = 1 << 14


def embedding_routes(served: Served) -> APIRouter:
    api = APIRouter(route_class=JsonRoute.with_texts(served.texts), dependencies=[KEY], tags=["texts"])

    @api.post(
        "/embeddings",
        responses={200: {"model": schemas.EmbeddingList}, **schemas.errors(400, 401, 404, 413, 429, 499, 500, 503)},
    )
    async def create_embedding(http: Request, body: EmbeddingRequest) -> Response:
        """Texts as vectors."""
        return await create_embeddings(served, http.state.caller, body)

    return api


def token_routes(served: Served) -> APIRouter:
    """Tokenization, at the root only, as vLLM and llama-server have it."""
    api = APIRouter(route_class=JsonRoute.with_texts(served.texts), dependencies=[KEY], tags=["texts"])
    refusals = schemas.errors(400, 401, 404, 413, 429, 503)

    async def on_text(http: Request, work: Callable[[], bytes]) -> Response:
        answer = await while_connected(http.state.caller, served.texts.run(http.state.caller.body_bytes, work))
        return Response(answer, media_type="application/json")

    @api.post("/tokenize", responses={200: {"model": schemas.Tokens}, **refusals})
    async def create_tokens(http: Request, body: TokenizeRequest) -> Response:
        """The ids of a text or a conversation."""
        body.check(served.config)
        options = template_options(body, served.config)
        model = await served.models.use(body.model)
        return await on_text(http, lambda: tokenized(body, model, options))

    @api.post("/detokenize", responses={200: {"model": schemas.Detokenized}, **refusals})
    async def create_text(http: Request, body: DetokenizeRequest) -> Response:
        """The text of ids."""
        model = await served.models.use(body.model)
        return await on_text(http, lambda: detokenized(body, model.llm))

    return api


# -- vectors ----------------------------------------------------------------------------------------------------------


async def create_embeddings(served: Served, caller: Caller, body: EmbeddingRequest) -> Response:
    """One vector for each input."""
    model = await served.models.use(body.model, default_model=served.config.default_model)
    call = served.call(caller, body, model, "embd-")
    return JSONResponse(await embeddings(call, body, model, served.config))


async def embeddings(call: Call, body: EmbeddingRequest, model: ServedModel, config: ServerConfig) -> dict[str, Any]:
    """One vector for each input, as numbers or as base64 of little-endian float32."""
    check_dimensions(body.dimensions, call.llm)
    outputs = await embed_all(call, body.input, config.max_inputs, pooling=body.pooling)
    data = []
    for index, output in enumerate(outputs):
        vector: Any = output.outputs.embedding
        if body.encoding_format == "base64":
            vector = base64.b64encode(np.asarray(vector, dtype="<f4").tobytes()).decode()
        data.append({"object": "embedding", "index": index, "embedding": vector})
    num_tokens = sum(output.usage.prompt_tokens for output in outputs)
    used = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    return {"object": "list", "data": data, "model": body.model or model.name, "usage": used}


def check_dimensions(wanted: int | None, llm: AsyncLLM) -> None:
    if wanted is not None and wanted != llm.embedding_size:
        raise ApiError(400, f"embeddings of this model have {llm.embedding_size} dimensions", param="dimensions")


async def embed_all(
    call: Call, given: Any, most: int, *, pooling: str = "last", truncate: bool = False
) -> list[EmbeddingRequestOutput]:
    """The embeddings of all inputs; with `truncate`, those of texts that exceed the context are of their beginning."""
    inputs = as_prompts(given, most, "input")
    prompts = await call.tokens(lambda: [_checked(one, call.llm, truncate=truncate) for one in inputs])
    options: dict[str, Any] = {"pooling": pooling, "hints": call.hints, "timeout_s": call.timeout_s}
    outputs: list[EmbeddingRequestOutput] = []
    named = [(f"{call.id}/{place}", prompt) for place, prompt in enumerate(prompts)]
    for begin in range(0, len(named), AT_A_TIME):  # a long list must not fill the queue
        some = named[begin : begin + AT_A_TIME]
        embedding = together(call.llm.embed(prompt, name, **options) for name, prompt in some)
        outputs += await call.do(embedding)
    for output in outputs:
        call.caller.charge(output.usage)
    return outputs


def _checked(one: Prompt, llm: AsyncLLM, *, truncate: bool) -> list[int]:
    """The ids of an input that can be run: all are looked at before one is."""
    try:
        if truncate and isinstance(one, str):
            return llm.get_tokenizer().encode(one, limit=MOST_IDS)[: llm.max_model_len - 1]
        ids = llm.prompt_ids(one)
        llm.check_prompt(ids)
    except InvalidRequest as error:
        error.param = "input"
        raise
    return ids


# -- token ids --------------------------------------------------------------------------------------------------------


def tokenized(body: TokenizeRequest, model: ServedModel, options: dict[str, Any]) -> bytes:
    """The ids of a text or a conversation, as vLLM and llama-server give them, in JSON. For any thread."""
    ids = _ids_of(body, model.llm, options)
    pieces = ({"id": token, "piece": model.forms.piece(token)} for token in ids) if body.with_pieces else ids
    lists: dict[str, Iterable[Any]] = {"tokens": pieces}
    if body.return_token_strs:
        lists["token_strs"] = map(model.forms.text, ids)
    return _to_json({"count": len(ids), "max_model_len": model.llm.max_model_len}, lists)


def _ids_of(body: TokenizeRequest, llm: AsyncLLM, options: dict[str, Any]) -> list[int]:
    if body.messages is not None:
        messages = [message.model_dump(exclude_unset=True) for message in body.messages]
        return llm.opened.text.chat_template().encode(messages, MOST_IDS, **options)
    tokenizer, text = llm.get_tokenizer(), (body.content if body.prompt is None else body.prompt) or ""
    if not body.parses_special:
        return tokenizer.encode(text, add_special=body.adds_special, limit=MOST_IDS)
    ids = tokenizer.encode_template(text, limit=MOST_IDS)
    if not body.adds_special:
        return ids
    # What is added around a text is the same around all of them.
    plain, full = tokenizer.encode("a", add_special=False), tokenizer.encode("a")
    at = next(place for place in range(len(full)) if full[place : place + len(plain)] == plain)
    return [*full[:at], *ids, *full[at + len(plain) :]]


def detokenized(body: DetokenizeRequest, llm: AsyncLLM) -> bytes:
    """The text of ids, in JSON. For any thread."""
    ids, tokenizer = token_ids("tokens", body.tokens), llm.get_tokenizer()
    check_ids("tokens", ids, tokenizer.vocab_size)
    return _to_json({"prompt": tokenizer.decode(ids, skip_special=False)}, {})


def _to_json(head: dict[str, Any], lists: Mapping[str, Iterable[Any]]) -> bytes:
    """An object with lists that may be long: they are written in pieces, and other threads run in between."""
    encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
    parts = [encode(head)[:-1]]
    for name, values in lists.items():
        parts.append(f",{encode(name)}:[{','.join(encode(piece)[1:-1] for piece in _pieces(values))}]")
    return "".join([*parts, "}"]).encode()


def _pieces(values: Iterable[Any]) -> Iterator[list[Any]]:
    left = iter(values)
    while piece := list(islice(left, PIECE_ITEMS)):
        yield piece
