"""A session outside of its process: as a record, as a file, its KV as bytes on disk; and which model it belongs to.

- `Fingerprint`: the identity of a model. The same files give the same one on any machine.
- `SessionRecord`: all that a session is, without what only a running process needs. The store keeps records.
- `SessionFile`: a record with its fingerprint, to be taken elsewhere; optionally with its KV (docs/durability.md).
- `replay`: a conversation run again from its file, in deterministic mode: is each answer the same, token for token?
- `KVFiles`: KV bytes of sessions, one file a session. A cache: a file that does not fit is as good as none.

Records that are read back are checked: they may come from anywhere.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
import struct
import threading
import time
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import numpy as np

from tokenmill import __version__
from tokenmill.contract import IntArray, Model
from tokenmill.engine.request import Quota
from tokenmill.errors import InvalidRequest, SessionFileError
from tokenmill.files import split_parts
from tokenmill.params import SamplingParams, StructuredOutputs
from tokenmill.session.log import Kind, SharedList, TokenLog, Tokens, Turn
from tokenmill.session.session import (
    OVERFLOW_KEEP,
    LastAnswer,
    Overflow,
    SavedKV,
    Session,
    SessionOptions,
    SessionState,
    check_metadata,
    check_overflow_keep,
    check_template_options,
    check_title,
)
from tokenmill.text.messages import Message, check_messages
from tokenmill.text.model_text import ModelText
from tokenmill.text.tool_grammar import Tool, ToolUse

if TYPE_CHECKING:
    from tokenmill.entrypoints.llm import LLM

log = logging.getLogger(__name__)

# -- which model -------------------------------------------------------------------------------------------------------

WHOLE_BYTES = 512 << 20
PIECE_BYTES = 64 << 10
NUM_PIECES = 256
SPOKEN = "Straße 東京 🙂 I'm 1,234.5\n\tdef f(x): return x"
"""How a text is cut into tokens shows in this one."""


@dataclass(frozen=True)
class Fingerprint:
    """Hexadecimal digests."""

    weights: str
    """Architecture and weights."""
    text: str
    """Tokenizer and chat template."""
    form: str
    """What KV bytes are of use to: weights, and how they are held and computed with."""

    @property
    def of_log(self) -> str:
        """What a log is of."""
        return f"{self.weights}-{self.text}"

    @property
    def of_answers(self) -> str:
        """What answers depend on: weights, how they are computed with, tokenizer and chat template. Short."""
        return _digest_of(self.text.encode(), self.form.encode())[:12]

    def why_not(self, other: str) -> str | None:
        """Why a log of another fingerprint is not this model's; None if it is."""
        weights, _, text = other.partition("-")
        if weights != self.weights:
            return f"it is of another model (weights {weights[:12]}, not {self.weights[:12]})"
        if text != self.text:
            return "it is of the same weights with another tokenizer or chat template"
        return None


def fingerprint(model: Model, text: ModelText) -> Fingerprint:
    """Reads the model's files: not for an event loop."""
    info = model.info
    shape = [info.name, info.vocab_size, info.hidden_size, [list(vars(layer).values()) for layer in info.layers]]
    architecture = [info.vocab_size, info.hidden_size, len(info.layers)] if model.path is not None else shape
    weights = _digest_of(json.dumps(architecture).encode(), *_weight_digests(model.path))
    return Fingerprint(
        weights, _text_digest(text), _digest_of(weights.encode(), json.dumps([*shape, info.form]).encode())
    )


def _weight_digests(path: Path | None) -> Iterator[bytes]:
    """Digests of the files that hold weights; their names do not matter."""
    if path is None:
        return
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else map(path.with_name, split_parts(path.name))
    for file in files:
        yield _file_digest(file).encode()


def _file_digest(path: Path) -> str:
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        if size <= WHOLE_BYTES:
            while piece := file.read(1 << 20):
                digest.update(piece)
        else:
            for i in range(NUM_PIECES):
                file.seek(i * (size - PIECE_BYTES) // (NUM_PIECES - 1))
                digest.update(file.read(PIECE_BYTES))
    return digest.hexdigest()


def _text_digest(text: ModelText) -> str:
    tokenizer = text.tokenizer
    vocabulary = hashlib.sha256()
    for token in range(tokenizer.vocab_size):
        spelled = tokenizer.token_bytes(token)
        vocabulary.update(len(spelled).to_bytes(4, "little") + spelled)
    try:
        cut = tokenizer.encode(SPOKEN)
    except ValueError:  # a vocabulary that does not hold all of it
        cut = []
    told = [sorted(tokenizer.eos_ids), sorted(tokenizer.special_tokens.items()), cut]
    template = "" if text.template is None else text.template.source
    return _digest_of(vocabulary.digest(), json.dumps(told).encode(), template.encode())


def _digest_of(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:32]


# -- records -----------------------------------------------------------------------------------------------------------

Json = dict[str, Any]
MAX_TIME = 1 << 40
"""In seconds."""


@dataclass(frozen=True)
class SessionRecord:
    """A session at one moment. Nothing in it changes any more: any thread may read it."""

    session_id: str
    head: Json
    """Everything but its log."""
    tokens: Tokens
    turns: SharedList[Turn]
    num_bytes: int = 0
    """What it costs, about."""


def record_of(session: Session) -> SessionRecord:
    """A snapshot, for the event loop. Nothing is copied: logs are values."""
    options = session.options
    head = {
        "system": session.system,
        "sampling": options.sampling,
        "overflow": options.overflow,
        "overflow_keep": options.overflow_keep,
        "template_options": options.template_options,
        "key": options.key,
        "namespace": options.namespace,
        "priority": options.priority,
        "inbox": session.inbox,
        "attempt": session.attempt,
        "num_forks": session.num_forks,
        "last_answer": session.last_answer,
        "title": session.title,
        "metadata": session.metadata,
        "created_at": session.created_at,
        "used_at": session.used_at,
    }
    return SessionRecord(session.session_id, head, session.log.tokens, session.log.turns, session.num_bytes)


# -- writing ----------------------------------------------------------------------------------------------------------


def head_json(record: SessionRecord) -> Json:
    """The head as JSON values; `InvalidRequest` for a namespace that is none."""
    head = record.head
    return {
        **head,
        "sampling": asdict(head["sampling"]),
        "template_options": dict(head["template_options"]),
        "namespace": _plain(head["namespace"]),
        "inbox": [dict(message) for message in head["inbox"]],
        "last_answer": None if head["last_answer"] is None else asdict(head["last_answer"]),
        "metadata": dict(head["metadata"]),
    }


def turn_json(turn: Turn) -> Json:
    return {
        "kind": turn.kind,
        "messages": [dict(message) for message in turn.messages],
        "end": turn.end,
        "ended_with": turn.ended_with,
        "finish_reason": turn.finish_reason,
        "changes": None if turn.changes is None else {name: _plain_change(one) for name, one in turn.changes.items()},
        "is_replayable": turn.is_replayable,
    }


def _plain(namespace: Hashable) -> Any:
    """Tuples become lists; what JSON does not know would not be the same when it comes back."""
    if namespace is None or isinstance(namespace, str | int):
        return namespace
    if isinstance(namespace, tuple):
        return [_plain(one) for one in namespace]
    raise InvalidRequest(f"a namespace of type {type(namespace).__name__} cannot be stored; use strings and tuples")


# -- reading ----------------------------------------------------------------------------------------------------------


def restored(record: SessionRecord, core: int, now: float) -> Session:
    """The session that a record is of. Its renderer is its service's to give."""
    head = record.head
    options = SessionOptions(
        sampling=head["sampling"],
        overflow=head["overflow"],
        overflow_keep=head["overflow_keep"],
        template_options=head["template_options"],
        key=head["key"],
        namespace=head["namespace"],
        priority=head["priority"],
    )
    session = Session(record.session_id, core, options, head["system"], now)
    session.log = TokenLog.of(record.tokens, record.turns)
    session.inbox = head["inbox"]
    session.attempt, session.num_forks = head["attempt"], head["num_forks"]
    session.last_answer = head["last_answer"]
    session.title, session.metadata = head["title"], head["metadata"]
    session.used_at = session.used_at if head["used_at"] is None else head["used_at"]
    session.created_at = session.used_at if head["created_at"] is None else head["created_at"]
    session.state = SessionState.APPENDING if session.is_unanswered else SessionState.IDLE
    return session


def read_record(session_id: str, head: Any, turns: Any, tokens: IntArray, vocab_size: int) -> SessionRecord:
    """A record from what was written; `SessionFileError` says what is wrong with it."""
    try:
        if not isinstance(head, Mapping) or not isinstance(turns, Sequence):
            raise InvalidRequest("head or turns are missing")
        outside = tokens[(tokens < 0) | (tokens >= vocab_size)]
        if len(outside):
            raise InvalidRequest(f"token {outside[0]} is outside the vocabulary of {vocab_size}")
        json.dumps([head, turns], ensure_ascii=False).encode()  # invalid Unicode could not be written again
        read = SharedList([_turn(turn) for turn in turns])
        _check_ends(read, len(tokens))
        return SessionRecord(session_id, _head(head), Tokens(tokens), read)
    except (InvalidRequest, KeyError, TypeError, ValueError, RecursionError) as error:
        what = f"{error} is missing" if isinstance(error, KeyError) else error
        raise SessionFileError(f"invalid session: {what}") from None


def _head(head: Mapping[str, Any]) -> Json:
    sampling = {**head["sampling"]}
    return {
        "system": _text_or_none("system", head["system"]),
        "sampling": SamplingParams(**sampling),
        "overflow": _one_of("overflow", head["overflow"], get_args(Overflow)),
        "overflow_keep": check_overflow_keep(head.get("overflow_keep", OVERFLOW_KEEP)),  # older records have none
        "template_options": check_template_options(head["template_options"]),
        "key": str(head["key"]),
        "namespace": _hashable(head["namespace"]),
        "priority": _count("priority", head["priority"], least=None),
        "inbox": _messages(head["inbox"]),
        "attempt": _count("attempt", head["attempt"]),
        "num_forks": _count("num_forks", head["num_forks"]),
        "last_answer": _last_answer(head.get("last_answer")),
        # Sessions of earlier versions have none of these; files have no times.
        "title": check_title(head.get("title")),
        "metadata": check_metadata(head.get("metadata")),
        "created_at": _time("created_at", head.get("created_at")),
        "used_at": _time("used_at", head.get("used_at")),
    }


def _last_answer(answer: Mapping[str, Any] | None) -> LastAnswer | None:
    if answer is None:
        return None
    return LastAnswer(str(answer["request_id"]), _count("num_tokens", answer["num_tokens"]))


def _turn(turn: Mapping[str, Any]) -> Turn:
    return Turn(
        _one_of("kind", turn["kind"], get_args(Kind)),
        _messages(turn["messages"]),
        None if turn["end"] is None else _count("end", turn["end"]),
        None if turn["ended_with"] is None else _count("ended_with", turn["ended_with"]),
        _text_or_none("finish_reason", turn["finish_reason"]),
        None if turn["changes"] is None else _changes(turn["changes"]),
        _one_of("is_replayable", turn.get("is_replayable", True), (True, False)),  # older records do not say
    )


def _plain_change(value: Any) -> Any:
    return asdict(value) if isinstance(value, StructuredOutputs) else value


def _changes(changes: Mapping[str, Any]) -> Json:
    """Fields of `SamplingParams`, as they are there: JSON has no tuples and no numbers for keys."""
    params = SamplingParams(**changes)
    return {name: getattr(params, name) for name in changes}


def answer_json(
    name: str, form: str, given: Any, changes: Mapping[str, Any], use: ToolUse | None, **options: Any
) -> Json:
    """All that is needed to run an answer again, before it has begun."""
    return {
        "id": name,
        "form": form,
        "given": given if given is None or isinstance(given, str) else list(given),
        "changes": {field: _plain_change(value) for field, value in changes.items()},
        "use": None if use is None else asdict(use),
        **options,
    }


def read_answer(answer: Mapping[str, Any]) -> Json:
    """Keywords of `SessionService.answer`."""
    use = answer["use"]
    tools = (
        None if use is None else ToolUse(tuple(Tool(**tool) for tool in use["tools"]), use["required"], use["parallel"])
    )
    options = {name: value for name, value in answer.items() if name not in ("id", "form", "changes", "use", "quota")}
    return {
        **options,
        **_changes(answer["changes"]),
        "use": tools,
        "quota": Quota(**answer["quota"]),
        "request_id": str(answer["id"]),
    }


def _check_ends(turns: Sequence[Turn], num_tokens: int) -> None:
    """Turns follow each other, and the last one ends where the log does."""
    ends = [turn.end for turn in turns if turn.end is not None]
    if ends != sorted(ends) or (ends[-1] if ends else 0) != num_tokens:
        raise InvalidRequest(f"the turns do not match the {num_tokens} tokens")


def _messages(given: Any) -> tuple[Message, ...]:
    return tuple(check_messages(given)) if given else ()


def _hashable(value: Any) -> Hashable:
    return tuple(_hashable(one) for one in value) if isinstance(value, list) else _name(value)


def _name(value: Any) -> Hashable:
    if value is not None and not isinstance(value, str | int):
        raise InvalidRequest("namespace must be a string")
    return value


def _text_or_none(name: str, value: Any) -> str | None:
    if value is not None and not isinstance(value, str):
        raise InvalidRequest(f"{name} must be a string")
    return value


def _count(name: str, value: Any, least: int | None = 0) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or (least is not None and value < least):
        raise InvalidRequest(f"{name} must be a non-negative integer")
    return value


def _time(name: str, value: Any) -> float | None:
    if value is None or (isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < MAX_TIME):
        return value
    raise InvalidRequest(f"{name} must be a Unix time, not {value!r:.40}")


def _one_of(name: str, value: Any, known: Sequence[Any]) -> Any:
    if value not in known:
        raise InvalidRequest(f"{name} must be one of {', '.join(map(repr, known))}, not {value!r:.40}")
    return value


# -- session files -----------------------------------------------------------------------------------------------------

MAGIC = b"tokenmill-session\x00"
VERSION = 1
LENGTHS = struct.Struct("<IQQQ")
"""After the magic: version, bytes of the header, number of ids, bytes of KV."""
DIGEST_BYTES = 32
MEDIA_TYPE = "application/vnd.tokenmill.session"
PRIVATE = {"key": "", "namespace": None, "priority": 0, "created_at": None, "used_at": None, "last_answer": None}
"""Fields that a session file leaves out, and their values in a session that is restored from one."""


@dataclass(frozen=True)
class SessionFile:
    """What a file holds."""

    record: SessionRecord
    fingerprint: Fingerprint
    num_kv_tokens: int
    kv: bytes
    """Of the first `num_kv_tokens` ids; empty: none."""


def pack(record: SessionRecord, fingerprint: Fingerprint, num_kv_tokens: int = 0, kv: bytes = b"") -> bytes:
    """A session as a file's bytes."""
    head = {name: value for name, value in head_json(record).items() if name not in PRIVATE}
    header: dict[str, Any] = {
        "made_by": f"tokenmill {__version__}",
        "model": asdict(fingerprint),
        "session": head,
        "turns": [turn_json(turn) for turn in record.turns],
        "num_kv_tokens": num_kv_tokens,
    }
    written = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    ids = record.tokens.array.astype("<i4").tobytes()
    lengths = LENGTHS.pack(VERSION, len(written), len(record.tokens), len(kv))
    body = b"".join((MAGIC, lengths, written, ids, kv))
    return body + hashlib.sha256(body).digest()


def unpack(data: bytes, session_id: str, vocab_size: int) -> SessionFile:
    """Read a file's bytes; `SessionFileError` says why they are none."""
    header, tokens, kv = _parts(data)
    try:
        model, count = header["model"], header["num_kv_tokens"]
        fingerprint = Fingerprint(*(str(model[name]) for name in ("weights", "text", "form")))
        head = {**header["session"], **PRIVATE}
        turns = header["turns"]
    except (KeyError, TypeError) as error:
        raise SessionFileError(f"incomplete header: {error}") from None
    if not isinstance(count, int) or not 0 <= count <= len(tokens) or bool(count) != bool(kv):
        raise SessionFileError("the KV does not match the token ids")
    return SessionFile(read_record(session_id, head, turns, tokens, vocab_size), fingerprint, count, kv)


def read_fingerprint(data: bytes) -> Fingerprint:
    """The model that a file belongs to, for a server with several; the file is checked."""
    header, _, _ = _parts(data)
    try:
        return Fingerprint(*(str(header["model"][name]) for name in ("weights", "text", "form")))
    except (KeyError, TypeError) as error:
        raise SessionFileError(f"incomplete header: {error}") from None


def read_whole(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise SessionFileError(f"{path} cannot be read: {error.strerror or error}") from None


def write_whole(path: Path, data: bytes) -> Path:
    """Write a file that is whole or not there, and on the disk."""
    # A unique name: the same file may be written twice at once.
    unfinished = path.with_name(f"{path.name}.{secrets.token_hex(4)}.part")
    try:
        with unfinished.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
        _sync_directory(path.parent)
    except OSError as error:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
        raise SessionFileError(f"{path} cannot be written: {error.strerror or error}") from None
    return path


def _sync_directory(directory: Path) -> None:
    """A file's name is on the disk when its directory is; some file systems can't be asked for that."""
    with suppress(OSError):
        held = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(held)
        finally:
            os.close(held)


def _parts(data: bytes) -> tuple[Any, IntArray, bytes]:
    start = len(MAGIC) + LENGTHS.size
    if not data.startswith(MAGIC):
        raise SessionFileError("not a session file" if data else "the file is empty")
    if len(data) < start:
        raise SessionFileError(f"truncated: {len(data)} bytes are less than a header")
    version, header_bytes, num_tokens, kv_bytes = LENGTHS.unpack_from(data, len(MAGIC))
    if version > VERSION:
        raise SessionFileError(f"version {version} is newer than the supported version {VERSION}; upgrade tokenmill")
    expected = start + header_bytes + 4 * num_tokens + kv_bytes + DIGEST_BYTES
    if len(data) != expected:
        what = "truncated" if len(data) < expected else "too long"
        raise SessionFileError(f"{what}: {len(data)} bytes, expected {expected}")
    if hashlib.sha256(memoryview(data)[:-DIGEST_BYTES]).digest() != data[-DIGEST_BYTES:]:
        raise SessionFileError("corrupt: checksum mismatch")
    ids_at = start + header_bytes
    kv_at = ids_at + 4 * num_tokens
    try:
        header = json.loads(data[start:ids_at])
    except (ValueError, RecursionError):
        raise SessionFileError("the header is not valid JSON") from None
    tokens = np.frombuffer(data, dtype="<i4", count=num_tokens, offset=ids_at).astype(np.int32)
    return header, tokens, data[kv_at:-DIGEST_BYTES]


# -- replay ------------------------------------------------------------------------------------------------------------

ENDED_BY_ITSELF = frozenset({"stop", "length"})


@dataclass(frozen=True)
class Replayed:
    """An answer that was run again."""

    turn: int
    num_tokens: int
    """Of the answer as it is in the file."""
    at: int | None
    """The first token of it that is another; None: all are the same."""
    recorded: int | None = None
    drawn: int | None = None
    """None: nothing more was drawn."""


def open_file(path: Path, llm: LLM) -> SessionFile:
    """A session file, if it is of this model."""
    opened, data = llm.opened, read_whole(path)
    refusal = fingerprint(opened.model, opened.text).why_not(read_fingerprint(data).of_log)
    if refusal is not None:
        raise SessionFileError(refusal)
    return unpack(data, path.name, opened.model.info.vocab_size)


def replay(file: SessionFile, llm: LLM) -> Iterator[Replayed]:
    """Each answer of the conversation, run again from the log before it; as they come.

    Answers are skipped that the log does not reproduce: the template has rewritten them since, turns before them were
    dropped to fit the context, or their beginning was given.
    """
    record, sampling = file.record, file.record.head["sampling"]
    begin: int | None = 0
    for number, turn in enumerate(record.turns):
        is_known = begin is not None and turn.end is not None and turn.end > begin
        if turn.kind == "answer" and turn.is_replayable and is_known:
            recorded = record.tokens.array[begin : turn.end].tolist()
            params = _as_it_was(replace(sampling, **(turn.changes or {})), len(recorded), turn.finish_reason)
            (output,) = llm.generate([record.tokens.array[:begin].tolist()], params)
            yield _compared(number, recorded, output.outputs[0].token_ids)
        begin = turn.end


def _as_it_was(params: SamplingParams, num_tokens: int, finish_reason: str | None) -> SamplingParams:
    """The parameters of an answer, as long as it was. One that was cut off did not see its end coming."""
    return replace(
        params,
        max_tokens=num_tokens,
        min_tokens=min(params.min_tokens, num_tokens),
        ignore_eos=params.ignore_eos or finish_reason not in ENDED_BY_ITSELF,
        stop=(),
        logprobs=None,
        prompt_logprobs=None,
    )


def _compared(turn: int, recorded: list[int], drawn: list[int]) -> Replayed:
    for at, token in enumerate(recorded):
        other = drawn[at] if at < len(drawn) else None
        if token != other:
            return Replayed(turn, len(recorded), at, token, other)
    return Replayed(turn, len(recorded), None)


# -- KV files ----------------------------------------------------------------------------------------------------------

MAX_KV_BYTES = 4 << 30
KV_MAGIC = b"TMKVF001"
KV_HEADER = struct.Struct("<8s32s32sq")
"""Before the bytes that `KVMemory.export` gave: magic, the model's form, digest of the ids, number of ids."""
KV_SUFFIX, KV_UNFINISHED = ".kv", ".part"


def packed_kv(form: str, tokens: IntArray, state: bytes) -> tuple[bytes, bytes, bytes]:
    """KV as it goes to another server: the header of a KV file, the state, and a checksum of both."""
    header = _kv_header(form, tokens)
    digest = hashlib.sha256(header)
    digest.update(state)
    return header, state, digest.digest()


def unpacked_kv(data: bytes, form: str, tokens: IntArray) -> SavedKV | None:
    """What another server has sent, if it is of a beginning of this log and arrived whole."""
    content = memoryview(data)[:-DIGEST_BYTES]
    if hashlib.sha256(content).digest() != data[-DIGEST_BYTES:]:
        return None
    count = _num_kv_tokens(bytes(content[: KV_HEADER.size]), form, tokens)
    return None if count is None else SavedKV(count, bytes(content[KV_HEADER.size :]))


def _kv_header(form: str, tokens: IntArray) -> bytes:
    return KV_HEADER.pack(KV_MAGIC, form.encode(), _ids_digest(tokens), len(tokens))


def _num_kv_tokens(header: bytes, form: str, tokens: IntArray) -> int | None:
    """How many ids of this log the KV behind a header is of; None if it is another model's or another log's."""
    try:
        magic, theirs, digest, count = KV_HEADER.unpack(header)
    except struct.error:
        return None
    fits = magic == KV_MAGIC and theirs == form.encode() and 0 < count <= len(tokens)
    return int(count) if fits and digest == _ids_digest(tokens[:count]) else None


class KVFiles:
    """Any thread may call it, but for reading and writing: they take as long as the disk does."""

    def __init__(self, directory: Path, max_bytes: int = MAX_KV_BYTES) -> None:
        self._directory = directory
        self.max_bytes = max_bytes
        self._lock = threading.Lock()

    def write(self, session_id: str, form: str, tokens: IntArray, state: bytes, used_at: float) -> bool:
        """Keep the KV of these ids in place of any before, as last used at this Unix time.

        KV used less recently is evicted for it, nothing else. False: it could not be kept.
        """
        size = KV_HEADER.size + len(state)
        if size > self.max_bytes:
            return False
        header = _kv_header(form, tokens)
        path = self._path(session_id)
        unfinished = path.with_suffix(KV_UNFINISHED)
        try:
            with self._lock:
                self._directory.mkdir(parents=True, exist_ok=True)
                if not self._make_room(size, path, used_at):
                    return False
                with unfinished.open("wb") as file:
                    file.write(header)
                    file.write(state)
                os.utime(unfinished, (used_at, used_at))
                os.replace(unfinished, path)
        except OSError as error:
            log.info("KV of session %s is not kept: %s", session_id, error)
            with suppress(OSError):
                unfinished.unlink()
            return False
        return True

    def read(self, session_id: str, form: str, tokens: IntArray) -> SavedKV | None:
        """KV of a beginning of this log, if there is any that fits."""
        path = self._path(session_id)
        try:
            with path.open("rb") as file:
                count = _num_kv_tokens(file.read(KV_HEADER.size), form, tokens)
                if count is None:
                    return None
                state = file.read()
            now = time.time()
            os.utime(path, (now, now))
        except OSError:
            return None
        return SavedKV(count, state)

    def num_tokens(self, session_id: str) -> int:
        """How many ids there is KV of; 0: none."""
        try:
            with self._path(session_id).open("rb") as file:
                magic, _, _, count = KV_HEADER.unpack(file.read(KV_HEADER.size))
        except (OSError, struct.error):
            return 0
        return int(count) if magic == KV_MAGIC else 0

    def remove(self, session_id: str) -> None:
        with suppress(OSError):
            self._path(session_id).unlink()

    def keep_only(self, session_ids: Iterable[str]) -> None:
        """Remove what is of no session among these, and what a process that was killed has not finished."""
        with suppress(OSError):
            others = {*self._directory.glob(f"*{KV_SUFFIX}"), *self._directory.glob(f"*{KV_UNFINISHED}")}
            for one in session_ids if others else ():
                others.discard(self._path(one))
            for path in others:
                path.unlink(missing_ok=True)

    @property
    def num_bytes(self) -> int:
        return sum(size for _, _, size in self._files())

    def _make_room(self, size: int, path: Path, used_at: float) -> bool:
        """Evict files, least recently used first, until one of this size fits; none if they are not enough."""
        files = sorted(one for one in self._files() if one[1] != path)
        excess = size + sum(one[2] for one in files) - self.max_bytes
        older = [one for one in files if one[0] <= used_at]
        if excess > sum(one[2] for one in older):
            return False
        for _, oldest, their_size in older:
            if excess <= 0:
                break
            oldest.unlink(missing_ok=True)
            excess -= their_size
        return True

    def _files(self) -> list[tuple[float, Path, int]]:
        """(last use, path, size) of each."""
        found = []
        with suppress(OSError):
            for path in self._directory.glob(f"*{KV_SUFFIX}"):
                with suppress(OSError):
                    about = path.stat()
                    found.append((about.st_mtime, path, about.st_size))
        return found

    def _path(self, session_id: str) -> Path:
        """By a digest: a name need not be a file's."""
        return self._directory / (hashlib.sha256(session_id.encode()).hexdigest()[:32] + KV_SUFFIX)


def _ids_digest(tokens: IntArray) -> bytes:
    return hashlib.sha256(tokens.tobytes()).digest()
