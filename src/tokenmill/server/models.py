"""The models of a server: which there are, by name, and which of them are loaded.

A model is loaded at startup, on first use or on request, and never if it would not fit. One that was idle for its
`keep_alive_s`, and has no sessions, is unloaded again. `Models` runs on the event loop; models load on threads.

Models come from the command line or from a TOML file:

[[model]]
name = "small"                  # what clients call it
path = "smollm2-135m"           # a name (docs/models.md), a Hugging Face directory or a .gguf file
aliases = ["default"]
keep_alive_s = 600              # unload after this many idle seconds
at_start = false                # load on first use
dtype = "int8"                  # and any other engine option
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
import tomllib
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from tokenmill.backends.gguf_file import GGUFFile
from tokenmill.backends.huggingface import CachedModel
from tokenmill.backends.library import cached_models, hub_name
from tokenmill.contract.backend import trim_host_memory
from tokenmill.entrypoints.async_llm import AsyncLLM
from tokenmill.entrypoints.fit import Fit, plan_one_session
from tokenmill.entrypoints.options import EngineOptions, check_options, runs_in_process
from tokenmill.errors import ConfigError, InsufficientMemory, TokenmillError
from tokenmill.server.errors import ApiError, model_not_found, stopping
from tokenmill.server.streaming import OpenCalls
from tokenmill.server.telemetry.hub import Telemetry
from tokenmill.server.tokens import TokenForms
from tokenmill.session.manager import SessionLimits
from tokenmill.session.service import SessionService
from tokenmill.session.store import Store
from tokenmill.text.workers import TextWorkers

log = logging.getLogger(__name__)

ENGINE_S = 5.0
"""How long shutdown waits for the step of an engine to return."""
ANY_NAME = "*"
"""As a name of a server's only model: clients may use any name."""
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A model that can be served."""

    name: str
    """The name that clients use."""
    load: Callable[[], AsyncLLM]
    """Opens it; runs on a thread."""
    fit: Callable[[], Fit] | None = None
    """Its memory requirements; None if `load` checks them itself (`InsufficientMemory`), or they are unknown."""
    aliases: frozenset[str] = frozenset()
    """Other names; `*` matches every name."""
    keep_alive_s: float | None = None
    """Unload the model after this many idle seconds; None: never."""
    at_start: bool = True
    """Load it at startup, otherwise on first use."""


class State(Enum):
    UNLOADED = "unloaded"
    LOADING = "loading"
    LOADED = "loaded"


class ServedModel:
    """A loaded model: its engine, and the sessions that share it. Created on a thread, as it reads files."""

    def __init__(
        self,
        spec: ModelSpec,
        llm: AsyncLLM,
        limits: SessionLimits,
        store: Store | None,
        texts: TextWorkers | None,
    ) -> None:
        self.spec = spec
        self.name = spec.name
        self.llm = llm
        self.forms = TokenForms(llm.get_tokenizer())
        self.default_params = llm.get_default_sampling_params()
        """What the model recommends, where a request says nothing."""
        self.chat_params = replace(self.default_params, max_tokens=None, logprobs=None)
        """The same for chats, whose answers may be as long as the context."""
        template = llm.opened.text.template
        self.reasons = template is not None and template.turn_format.reasons
        """May its answers begin with thinking?"""
        self.sessions = SessionService(llm, routing="least_loaded", limits=limits, store=store, texts=texts)
        self._fingerprint = f"fp_{self.sessions.fingerprint.of_answers}"
        self.last_used = time.monotonic()
        self.keep_alive_s = spec.keep_alive_s
        """Idle seconds after which it is unloaded; None: never."""

    @property
    def system_fingerprint(self) -> str:
        """Changes when the same request may give another answer: with the model's files, and with replaced weights."""
        version = self.llm.opened.model.weights_version
        return f"{self._fingerprint}_{version}" if version else self._fingerprint

    @cached_property
    def files(self) -> tuple[str, int]:
        """The family that its files name, and their size in bytes. Reads them: for any thread but the event loop's."""
        path = self.llm.opened.model.path
        if path is None:
            return "", 0
        if path.is_file():
            return str(GGUFFile(path).get("general.architecture", "")), path.stat().st_size
        config = path / "config.json"
        family = json.loads(config.read_text()).get("model_type", "") if config.is_file() else ""
        return str(family), sum(file.stat().st_size for file in path.iterdir() if file.is_file())

    async def close(self, engine_s: float | None = None) -> bool:
        """False if a step of the engine has not returned within `engine_s`."""
        await self.sessions.close()
        return await self.llm.close(engine_s)


class ModelEntry:
    """A model of the server, loaded or not."""

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self.model: ServedModel | None = None
        self.loading: asyncio.Task[ServedModel] | None = None
        self.num_waiting = 0
        """Requests that wait for it to load. They count as users, so that it is not unloaded before they run."""

    @property
    def state(self) -> State:
        if self.model is not None:
            return State.LOADED
        return State.UNLOADED if self.loading is None else State.LOADING


class Models:
    """All models of a server. Runs on the event loop."""

    def __init__(
        self,
        specs: Sequence[ModelSpec],
        calls: OpenCalls,
        telemetry: Telemetry,
        limits: SessionLimits,
        store: Store | None = None,
        texts: TextWorkers | None = None,
        spec_of: Callable[[str], ModelSpec] | None = None,
    ) -> None:
        self._calls = calls
        self._spec_of = spec_of
        """For a downloaded model that the server was not started with; None: there are no others."""
        self._telemetry = telemetry
        self._limits = limits
        self._store = store
        self._texts = texts
        self._entries: dict[str, ModelEntry] = {}
        self._names: dict[str, str] = {}
        """Every name and alias -> the model's own name."""
        self._added: set[str] = set()
        """Downloaded models that were added since the start."""
        self._memory = asyncio.Lock()
        """Serializes loading and unloading: each is planned with the memory that the others leave free."""
        self._closing = asyncio.Event()
        self._ending: asyncio.Task[None] | None = None
        """Closes the loaded models, once."""
        self.is_stuck = False
        """Is an engine inside a step that has not returned when it was closed?"""
        self.after_change: Callable[[], None] = lambda: None
        """Called on a thread when a model was loaded or unloaded."""
        for spec in specs:
            self.add(spec)

    def add(self, spec: ModelSpec) -> ModelEntry:
        """Add a model."""
        for name in (spec.name, *spec.aliases):
            if name in self._names:
                raise ConfigError(f"duplicate model name {name!r}")
            self._names[name] = spec.name
        entry = self._entries[spec.name] = ModelEntry(spec)
        if ANY_NAME in self._names and len(self._entries) > 1:
            raise ConfigError(f"the model name {ANY_NAME!r} requires a server with one model, not {len(self._entries)}")
        return entry

    async def cached(self) -> list[CachedModel]:
        """Downloaded models that could be loaded as well."""
        if self._spec_of is None or ANY_NAME in self._names:
            return []
        found = await asyncio.to_thread(cached_models)
        return [one for one in found if one.path is not None and one.name not in self._names]

    async def load_cached(self, name: str) -> None:
        """Add a downloaded model and load it. Other names are left alone: nothing is downloaded, no path is opened."""
        entry = await self.offer_cached(name)
        if entry is None:
            return
        try:
            await self._loaded(entry)
        except BaseException:
            if entry.model is None and entry.loading is None:
                self._drop(name)
            raise

    async def offer_cached(self, name: str) -> ModelEntry | None:
        """Add a downloaded model, which is loaded on first use; None if it is there already, or was not downloaded."""
        if name in self._names or name not in {one.name for one in await self.cached()}:
            return None
        if self._spec_of is None or name in self._names:  # meanwhile
            return None
        self._added.add(name)
        return self.add(self._spec_of(name))

    async def forget(self, name: str) -> None:
        """Unload a downloaded model and offer it no more. One that the server was started with stays."""
        if name not in self._names:
            return
        if name not in self._added:
            raise ApiError(409, f"{name} was named when the server was started", code="model_in_use", param="model")
        await self.unload(self.entry(name))
        self._drop(name)

    def _drop(self, name: str) -> None:
        del self._entries[name], self._names[name]
        self._added.discard(name)

    def has(self, name: str) -> bool:
        return name in self._names

    # -- which there are ----------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def entries(self) -> list[ModelEntry]:
        return list(self._entries.values())

    @property
    def loaded(self) -> list[ServedModel]:
        return [entry.model for entry in self._entries.values() if entry.model is not None]

    def entry(self, name: str | None) -> ModelEntry:
        """The model of this name, loaded or not; the first one if no name is given."""
        own = next(iter(self._entries)) if name is None else self._names.get(name, self._names.get(ANY_NAME))
        if own is None:
            raise model_not_found(name or "")
        return self._entries[own]

    async def use(self, name: str | None, *, default_model: bool | None = None) -> ServedModel:
        """The model of this name, for a request; loaded first if it is not.

        Without a name, the first one. With `default_model`, the only one, or none if it is false.
        """
        if name is None and default_model is not None and not (default_model and len(self._entries) == 1):
            names = ", ".join(self._entries)
            raise ApiError(400, f"model is required; served models: {names:.200}", param="model")
        entry = self.entry(name)
        model = entry.model or await self._loaded(entry)
        model.last_used = time.monotonic()
        return model

    async def _loaded(self, entry: ModelEntry) -> ServedModel:
        """A model that is not loaded, once it is. The log says why it could not be loaded; the client is not told."""
        entry.num_waiting += 1
        try:
            return await self._while_open(self.load(entry))
        except TokenmillError as error:
            what = f"{entry.spec.name} failed to load"
            raise ApiError(503, what, "server_error", "model_load_failed", cause=str(error)) from None
        finally:
            entry.num_waiting -= 1

    async def _while_open(self, loading: Coroutine[Any, Any, ServedModel]) -> ServedModel:
        """Fail requests that wait for a model when the server stops."""
        waiting, closing = asyncio.ensure_future(loading), asyncio.ensure_future(self._closing.wait())
        either: set[asyncio.Future[Any]] = {waiting, closing}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done():
                raise stopping()
            return waiting.result()
        finally:
            waiting.cancel()
            closing.cancel()

    # -- loading ------------------------------------------------------------------------------------------------------

    async def load(self, entry: ModelEntry) -> ServedModel:
        """Load it unless it is loaded; concurrent callers share one load. Raises an `ApiError` if it does not fit."""
        if entry.model is not None:
            return entry.model
        if entry.loading is None:
            entry.loading = asyncio.create_task(self._load(entry), name=f"tokenmill-load-{entry.spec.name}")
        return await asyncio.shield(entry.loading)

    async def _load(self, entry: ModelEntry) -> ServedModel:
        try:
            async with self._memory:
                await self._make_room(entry.spec)
                began = time.monotonic()
                llm = await self._open(entry.spec)
                if self._closing.is_set():
                    await llm.close()
                    raise stopping()
                # On a thread: the model's files are read for its fingerprint.
                try:
                    shared = (self._limits, self._store, self._texts)
                    model = await asyncio.to_thread(ServedModel, entry.spec, llm, *shared)
                except BaseException:
                    await llm.close()
                    raise
                if self._closing.is_set():
                    await model.close()
                    raise stopping()
                model.sessions.watch_idle()
                entry.model = model
                await asyncio.to_thread(self._telemetry.attach, entry.spec.name, llm)
                await asyncio.to_thread(self.after_change)
                await asyncio.to_thread(trim_host_memory)
                log.info("loaded %s in %.1f s", entry.spec.name, time.monotonic() - began)
                return model
        finally:
            entry.loading = None

    async def _make_room(self, spec: ModelSpec) -> None:
        """Check that it fits; unload idle models that may be unloaded until it does."""
        if spec.fit is None:
            return
        fit = await asyncio.to_thread(spec.fit)
        while not fit.fits and (unused := self._unused()):  # looked at anew each time: requests come meanwhile
            await self._unload(min(unused, key=lambda one: one.last_used))
            fit = await asyncio.to_thread(spec.fit)
        if not fit.fits:
            raise out_of_memory(fit.shortage(spec.name))

    async def _open(self, spec: ModelSpec) -> AsyncLLM:
        """Open it. An engine process sees for itself whether it fits; unload idle models until it does."""
        while True:
            try:
                return await asyncio.wrap_future(on_a_thread(spec.load))
            except InsufficientMemory as error:
                unused = self._unused()
                if not unused:
                    raise out_of_memory(str(error)) from None
                await self._unload(min(unused, key=lambda one: one.last_used))

    def _unused(self) -> list[ServedModel]:
        """Models that may be unloaded and have no requests or sessions."""
        return [one for one in self.loaded if one.spec.keep_alive_s is not None and not self.users(one)]

    def users(self, model: ServedModel) -> int:
        """Number of requests and sessions of a model."""
        return self._calls.of(model.llm) + len(model.sessions) + self._entries[model.name].num_waiting

    # -- unloading ----------------------------------------------------------------------------------------------------

    async def unload(self, entry: ModelEntry, *, force: bool = False) -> bool:
        """Unload it; was it loaded? With requests or sessions it takes `force`, which ends them."""
        async with self._memory:
            model = entry.model
            if model is None:
                return False
            if not force and (count := self.users(model)):
                what = f"{model.name} has {count} requests and sessions; end them, or use force"
                raise ApiError(409, what, code="model_in_use", param="model")
            await self._unload(model)
            return True

    async def _unload(self, model: ServedModel) -> None:
        self._entries[model.name].model = None
        await asyncio.to_thread(self._telemetry.detach, model.name)
        await model.close()
        await asyncio.to_thread(self.after_change)
        log.info("unloaded %s", model.name)

    async def unload_idle(self) -> list[str]:
        """Unload models that were idle for their `keep_alive_s`; returns their names."""
        names = []
        async with self._memory:
            while idle := self._idle():  # looked at anew each time: requests come meanwhile
                names.append(idle[0].name)
                await self._unload(idle[0])
        return names

    def _idle(self) -> list[ServedModel]:
        """Models that were idle for their `keep_alive_s`, counted from the end of the last request or session."""
        now = time.monotonic()
        for model in self.loaded:
            if self.users(model):
                model.last_used = now
        return [one for one in self._unused() if now - one.last_used >= (one.keep_alive_s or 0.0)]

    async def close(self) -> None:
        """Everything that runs ends with `shutdown`. Engine steps that do not return are not waited for."""
        self._closing.set()
        if self._ending is None:
            self._ending = asyncio.create_task(self._close_all(), name="tokenmill-close")
        await asyncio.shield(self._ending)

    async def _close_all(self) -> None:
        for model in self.loaded:
            try:
                self.is_stuck = not await model.close(ENGINE_S) or self.is_stuck
            except Exception:  # the others are to be closed, too
                log.exception("%s could not be closed", model.name)


def out_of_memory(shortage: str) -> ApiError:
    return ApiError(507, shortage, "server_error", "out_of_memory")


def on_a_thread(work: Callable[[], T]) -> Future[T]:
    """Run some work on a daemon thread: shutdown does not wait for it."""
    done: Future[T] = Future()
    done.set_running_or_notify_cancel()  # it can't be cancelled: its result may come when nobody waits any more

    def run() -> None:
        try:
            result = work()
        except BaseException as error:
            done.set_exception(error)
        else:
            done.set_result(result)

    threading.Thread(target=run, name="tokenmill-load", daemon=True).start()
    return done


DEFAULTS_SHOWN = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
"""Sampling parameters whose defaults `/v1/models` shows."""


def describe(entry: ModelEntry, created: int) -> dict[str, Any]:
    """A model, as `/v1/models` shows it."""
    name, model = entry.spec.name, entry.model
    about: dict[str, Any] = {"id": name, "object": "model", "created": created, "owned_by": "tokenmill", "root": name}
    length = None if model is None else model.llm.max_model_len
    about |= {"max_model_len": length, "status": entry.state.value, "aliases": sorted(entry.spec.aliases)}
    sampling = None if model is None else model.default_params
    return {**about, "default_sampling_params": sampling and {name: getattr(sampling, name) for name in DEFAULTS_SHOWN}}


# -- from the command line or a TOML file -----------------------------------------------------------------------------


def _plain_type(kind: Any) -> Any:
    """The type to check in TOML: of a container only that it is one; an integer is a valid float."""
    return (int, float) if kind is float else get_origin(kind) or kind


OWN: dict[str, Any] = {"name": str, "path": str, "aliases": list, "keep_alive_s": (int, float), "at_start": bool}
"""Settings of a model that are not the engine's, with their types."""
OPTIONS = {
    name: _plain_type((get_args(kind) or (kind,))[0])
    for name, kind in get_type_hints(EngineOptions).items()
    if name not in ("tokenizer", "config")
}
"""Engine settings."""


def named(given: str) -> tuple[str, str]:
    """The name and the path of NAME=PATH, or of a path alone."""
    name, is_named, path = given.partition("=")
    if not is_named:
        return short_name(given), given
    if not name or not path:
        raise ConfigError(f"--model must be NAME=PATH, not {given!r}")
    return name, path


def short_name(path: str) -> str:
    """The default name of a model: a repository's as it is, of a path the last part."""
    is_local = path.endswith(".gguf") or Path(path).expanduser().exists() or hub_name(path) is None
    return Path(path).name if is_local and "/" in path else path


def spec(
    name: str,
    path: str,
    options: Mapping[str, Any],
    *,
    aliases: Sequence[str] = (),
    keep_alive_s: float | None = None,
    at_start: bool = True,
) -> ModelSpec:
    """A model by its name and path, with options for its engine."""
    if keep_alive_s is not None and not keep_alive_s > 0:
        raise ConfigError(f"keep_alive_s must be positive, not {keep_alive_s}")
    check_options(options)

    def load() -> AsyncLLM:
        return AsyncLLM(path, **options)

    def fit() -> Fit:
        return plan_one_session(path, options)

    return ModelSpec(
        name=name,
        load=load,
        fit=None if path == "fake" or runs_in_process(path, options) else fit,
        aliases=frozenset(aliases),
        keep_alive_s=keep_alive_s,
        at_start=at_start,
    )


def read_catalogue(path: Path, options: Mapping[str, Any], keep_alive_s: float | None = None) -> list[ModelSpec]:
    """The models of a TOML file; `options` and `keep_alive_s` are its defaults."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
    unknown = set(content) - {"model", "key", "limits", "server"}
    if unknown:
        supported = "[[model]], [[key]], [limits] and [server]"
        raise ConfigError(f"{path}: unknown {', '.join(sorted(unknown))}; supported: {supported}")
    tables = content.get("model")
    if not isinstance(tables, list) or not tables or not all(isinstance(table, dict) for table in tables):
        raise ConfigError(f"{path} has no [[model]] table")
    return [from_table(table, str(path), options, keep_alive_s) for table in tables]


def from_table(
    table: Mapping[str, Any], file: str, options: Mapping[str, Any], keep_alive_s: float | None = None
) -> ModelSpec:
    """A model as a file describes it; `options` and `keep_alive_s` are its defaults."""
    where = f"{file}, model {table.get('name', table.get('path', '?'))!r}"
    known = {**OWN, **OPTIONS}
    unknown = set(table) - set(known)
    if unknown:
        what = f"unknown setting {', '.join(sorted(unknown))}; known: {', '.join(sorted(known))}"
        raise ConfigError(f"{where}: {what}")
    for name, kind in known.items():
        if name in table and (not isinstance(table[name], kind) or isinstance(table[name], bool) != (kind is bool)):
            raise ConfigError(f"{where}: invalid {name} {table[name]!r}")
    if "path" not in table:
        raise ConfigError(f"{where}: path is missing")
    if not all(isinstance(alias, str) for alias in table.get("aliases", [])):
        raise ConfigError(f"{where}: aliases must be strings")
    own = {name: table[name] for name in ("aliases", "at_start") if name in table}
    name = table.get("name") or short_name(table["path"])
    return spec(
        name,
        table["path"],
        {**options, **{key: table[key] for key in set(OPTIONS) & set(table)}},
        keep_alive_s=table.get("keep_alive_s", keep_alive_s),
        **own,
    )
