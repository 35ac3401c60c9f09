"""API keys: which are known, how much each may use, and what it has used.

Keys come from the command line and from a keys file, TOML or JSON, which holds hashes only and is read again on SIGHUP:

[limits]                            # of every key that does not set its own
requests_per_minute = 600

[[key]]
name = "alice"                      # in logs, metrics and /v1/usage
sha256 = "2bb80d53...79"            # of the key; `tokenmill keys add` writes it
expires = 2027-01-01T00:00:00Z
tokens_per_minute = 100_000

An `Account` is a key's usage and what is left of its limits. Everything here runs on the event loop.
"""

from __future__ import annotations

import hmac
import json
import logging
import math
import re
import time
import tomllib
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

from tokenmill.engine.request import Quota
from tokenmill.errors import ConfigError
from tokenmill.outputs import Usage
from tokenmill.server.config import ServerConfig, hash_key
from tokenmill.server.errors import ApiError
from tokenmill.server.telemetry.figures import KeyTotals
from tokenmill.session.manager import SessionQuota

log = logging.getLogger(__name__)

Clock = Callable[[], float]
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
SHA256 = re.compile(r"[0-9a-f]{64}")
MINUTE_S = 60.0
MAX_RETRY_S = 60.0
"""A client is never told to wait longer for a place in the queue: what is known now does not reach further."""
FIRST_RETRY_S = 1.0
"""Where nothing has been measured yet."""
PACE_ITEMS = 64
"""Finished requests that a pace is measured over."""


# -- keys and their limits --------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class KeyLimits:
    """Limits of one key; None: none of its own."""

    concurrent_requests: int | None = None
    """Requests that are not done: running or queued."""
    running_rows: int | None = None
    """Running requests, per model; further ones wait."""
    queue_slots: int | None = None
    """Queued requests, per model."""
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    """Prompt and output tokens."""
    sessions: int | None = None
    """Per model."""
    session_bytes: int | None = None
    """Size of the key's session logs, per model."""
    stored_responses: int | None = None
    """Stored responses, and stored chat completions; the oldest is evicted."""
    stored_bytes: int | None = None
    """Size of stored responses, chat completions and conversations."""
    file_bytes: int | None = None
    """Size of the key's files (bytes)."""
    max_context: int | None = None
    """Prompt and output tokens of one request."""
    max_tokens_per_step: int | None = None
    """Tokens of one request in an engine step."""


LIMITS = tuple(field.name for field in fields(KeyLimits))


@dataclass(frozen=True, kw_only=True)
class ApiKey:
    """What is known of a key."""

    name: str
    """In logs, metrics and usage."""
    sha256: bytes
    is_admin: bool = False
    expires_at: float | None = None
    """Seconds since the epoch."""
    limits: KeyLimits = KeyLimits()

    @property
    def id(self) -> str:
        """What requests, sessions and KV of this key are told by."""
        return self.sha256.hex()


ANONYMOUS = ApiKey(name="anonymous", sha256=b"", is_admin=True)
"""The caller of a server without keys."""


def known_key(key: bytes | None, key_hashes: Iterable[bytes]) -> bytes | None:
    """The hash of a key that is allowed. All hashes are compared, each in constant time."""
    if key is None:
        return None
    given, found = hash_key(key), None
    for known in key_hashes:
        if hmac.compare_digest(known, given):
            found = known
    return found


# -- the keys file ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class KeysFile:
    """The content of a keys file."""

    keys: tuple[ApiKey, ...] = ()
    limits: KeyLimits = KeyLimits()
    """Defaults for all keys, those of the command line included."""


def read_keys(path: Path) -> KeysFile:
    """Read and check a keys file; `ConfigError` says what is wrong with it."""
    try:
        text = path.read_text(encoding="utf-8")
        content = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:  # UnicodeDecodeError, JSONDecodeError and TOMLDecodeError are all of them
        raise ConfigError(f"{path} is not valid {'JSON' if path.suffix == '.json' else 'TOML'}: {error}") from None
    tables = content.get("key", []) if isinstance(content, dict) else None
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise ConfigError(f"{path}: `key` must be a list of tables")
    if unknown := set(content) - {"key", "limits", "model", "server"}:
        raise ConfigError(f"{path}: unknown {', '.join(sorted(unknown))}; supported: [limits] and [[key]] tables")
    defaults = _limits(content.get("limits", {}), KeyLimits(), f"{path}, [limits]")
    keys = tuple(_key(table, defaults, f"{path}, key {table.get('name', '?')!r}") for table in tables)
    for what in ("name", "sha256"):
        values = [getattr(key, what) for key in keys]
        if repeated := [key.name for key in keys if values.count(getattr(key, what)) > 1]:
            raise ConfigError(f"{path}: keys {', '.join(sorted(set(repeated)))} have the same {what}")
    return KeysFile(keys, defaults)


def has_keys(path: Path) -> bool:
    """Does a file of models define keys or their limits, too?"""
    try:
        return not {"key", "limits"}.isdisjoint(tomllib.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):  # whoever reads the models will say what is wrong with it
        return False


def _key(table: Mapping[str, Any], defaults: KeyLimits, where: str) -> ApiKey:
    own = {"name", "sha256", "admin", "expires"}
    if unknown := set(table) - own - set(LIMITS):
        raise ConfigError(
            f"{where}: unknown {', '.join(sorted(unknown))}; supported: {', '.join((*sorted(own), *LIMITS))}"
        )
    name, digest = table.get("name"), table.get("sha256")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ConfigError(f"{where}: name must be 1 to 64 letters, digits and ._-")
    if not isinstance(digest, str) or not SHA256.fullmatch(digest.lower()):
        raise ConfigError(f"{where}: sha256 must be the 64 hexadecimal digits of the key's SHA-256")
    if not isinstance(table.get("admin", False), bool):
        raise ConfigError(f"{where}: admin must be true or false, not {table['admin']!r}")
    limits = _limits({name: table[name] for name in LIMITS if name in table}, defaults, where)
    expires_at = read_time(table["expires"], where) if "expires" in table else None
    return ApiKey(
        name=name,
        sha256=bytes.fromhex(digest),
        is_admin=table.get("admin", False),
        expires_at=expires_at,
        limits=limits,
    )


def _limits(given: Any, defaults: KeyLimits, where: str) -> KeyLimits:
    if not isinstance(given, dict):
        raise ConfigError(f"{where}: limits must be a table")
    if unknown := set(given) - set(LIMITS):
        raise ConfigError(f"{where}: unknown limit {', '.join(sorted(unknown))}; supported: {', '.join(LIMITS)}")
    for name, value in given.items():
        if type(value) is not int or value < 1:
            raise ConfigError(f"{where}: {name} must be a positive integer, not {value!r}")
    return replace(defaults, **given)


def read_time(given: Any, where: str) -> float:
    """A date or a time, of TOML or as ISO 8601 text; without a time zone it is UTC."""
    try:
        at = datetime.fromisoformat(given) if isinstance(given, str) else given
    except ValueError:
        at = None
    if isinstance(at, date) and not isinstance(at, datetime):
        at = datetime(at.year, at.month, at.day)
    if not isinstance(at, datetime):
        raise ConfigError(f"{where}: expires must be a date or a time such as 2027-01-01T00:00:00Z, not {given!r}")
    return (at if at.tzinfo is not None else at.replace(tzinfo=UTC)).timestamp()


# -- rates ------------------------------------------------------------------------------------------------------------


class Bucket:
    """A token bucket: it holds what a minute brings, and refills continuously. It may be overdrawn.

    In any t minutes, no more than (t + 1) times the limit is taken, beyond what overdraws it.
    """

    def __init__(self, per_minute: int, now: float) -> None:
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._at = now

    def level(self, now: float) -> float:
        """What can be taken now; negative if it is overdrawn."""
        self._level = min(self.per_minute, self._level + (now - self._at) * self.per_minute / MINUTE_S)
        self._at = now
        return self._level

    def take(self, amount: float, now: float) -> None:
        """A negative amount is given back."""
        self._level = min(self.per_minute, self.level(now) - amount)

    def wait_s(self, now: float) -> float:
        """Until 1 can be taken."""
        return max(0.0, 1.0 - self.level(now)) * MINUTE_S / self.per_minute

    def half_s(self, now: float) -> float:
        """Until it is half full."""
        return max(0.0, self.per_minute / 2 - self.level(now)) * MINUTE_S / self.per_minute

    def reset_s(self, now: float) -> float:
        """Until it is full."""
        return (self.per_minute - self.level(now)) * MINUTE_S / self.per_minute

    def resized(self, per_minute: int, now: float) -> Bucket:
        """The same with another limit: what was taken from it stays taken."""
        other = Bucket(per_minute, now)
        other.take(self.per_minute - self.level(now), now)
        return other


class Pace:
    """How fast requests are done, and so when those that were refused can be admitted, one after the other.

    Each refused request is given a time of its own, one interval after the last one given: clients that come back when
    told find a place, instead of all coming at once.
    """

    def __init__(self) -> None:
        self._done: deque[float] = deque(maxlen=PACE_ITEMS)
        self._since: float | None = None
        """The requests in `_done` were done after this; None while nothing runs."""
        self._num_ahead, self._at = 0.0, 0.0
        """Refused requests that were given a time which is still to come; when that was reckoned."""

    def begin(self, now: float) -> None:
        """Something runs, after a time in which nothing did."""
        self._done.clear()
        self._since = now

    def note_done(self, now: float) -> None:
        if len(self._done) == PACE_ITEMS:
            self._since = self._done[0]
        self._done.append(now)

    def interval_s(self, now: float) -> float | None:
        """Mean time from one finished request to the next; None if it is not known."""
        if self._since is None or not self._done:
            return None
        span = self._done[-1] - self._since
        if now - self._done[-1] > span:  # it has become slower than all that was measured
            span = now - self._since
        return span / len(self._done)

    def next_s(self, now: float, interval_s: float) -> float:
        """When the next refused request is to come again, in seconds from now."""
        self._num_ahead = min(self.num_ahead(now, interval_s) + 1, max(1.0, MAX_RETRY_S / interval_s))
        return min(self._num_ahead * interval_s, MAX_RETRY_S)

    def num_ahead(self, now: float, interval_s: float) -> float:
        """About how many refused requests were given a time that is still to come: one is admitted each interval."""
        self._num_ahead = max(0.0, self._num_ahead - (now - self._at) / interval_s)
        self._at = now
        return self._num_ahead


class Everybody:
    """The pace of all keys together, for a key of which nothing has been measured yet.

    It goes by a clock that stands still while nothing runs, so that an idle hour does not make it slow.
    """

    def __init__(self) -> None:
        self._pace = Pace()
        self._pace.begin(0.0)
        self._num_active = 0
        """Keys that have requests running."""
        self._busy_s, self._at = 0.0, 0.0

    def note(self, now: float, more_active: int = 0, *, is_done: bool = False) -> None:
        """A request is done, or so many more keys have requests running."""
        self._busy_s += now - self._at if self._num_active else 0.0
        self._at = now
        self._num_active += more_active
        if is_done:
            self._pace.note_done(self._busy_s)

    def share_s(self, now: float) -> float | None:
        """The interval of one key, if all that are active have equal shares."""
        self.note(now)
        interval_s = self._pace.interval_s(self._busy_s)
        return None if interval_s is None else interval_s * max(1, self._num_active)


# -- accounts ---------------------------------------------------------------------------------------------------------


class Account:
    """A key's usage, and what is left of its limits."""

    def __init__(self, key: ApiKey, everybody: Everybody, clock: Clock) -> None:
        self.key = key
        self.totals = KeyTotals()
        self._clock = clock
        self._pace = Pace()
        self._everybody = everybody
        self._requests: Bucket | None = None
        self._tokens: Bucket | None = None
        self.renew(key)

    def _bucket(self, before: Bucket | None, per_minute: int | None) -> Bucket | None:
        if per_minute is None:
            return None
        now = self._clock()
        return Bucket(per_minute, now) if before is None else before.resized(per_minute, now)

    def renew(self, key: ApiKey) -> None:
        """Other limits, from now on: the keys file has changed."""
        self._requests = self._bucket(self._requests, key.limits.requests_per_minute)
        self._tokens = self._bucket(self._tokens, key.limits.tokens_per_minute)
        self.key = key
        self.is_rated = self._requests is not None or self._tokens is not None
        """Has it limits on what it uses per minute?"""

    # -- requests -----------------------------------------------------------------------------------------------------

    def admit(self) -> ApiError | None:
        """Count a request in, or say which limit it exceeds. One that was admitted has to `leave`."""
        now, limits = self._clock(), self.key.limits
        if limits.concurrent_requests is not None and self.totals.running >= limits.concurrent_requests:
            return self._refusal(f"{limits.concurrent_requests} concurrent requests", self.retry_s())
        if self._requests is not None and self._requests.level(now) < 1:
            return self._refusal(f"{self._requests.per_minute} requests per minute", self._requests.wait_s(now))
        if self._tokens is not None and self._tokens.level(now) < 1:
            return self._refusal(f"{self._tokens.per_minute} tokens per minute", self._tokens.wait_s(now))
        if self._requests is not None:
            self._requests.take(1, now)
        if not self.totals.running:
            self._pace.begin(now)
            self._everybody.note(now, 1)
        self.totals.running += 1
        return None

    def _refusal(self, limit: str, wait_s: float) -> ApiError:
        self.totals.refused += 1
        what = f"Rate limit reached for API key {self.key.name!r}: limit {limit}. Try again in {wait_s:.3g} s."
        return ApiError(429, what, "rate_limit_error", "rate_limit_exceeded", headers=retry_headers(wait_s))

    def leave(self, status: int, reserved: int) -> None:
        """A request that was admitted is over; by the queue it may still have been refused."""
        now = self._clock()
        self.totals.running -= 1
        if self._tokens is not None and reserved:
            self._tokens.take(-reserved, now)
        if status == 429:
            self.totals.refused += 1
        else:
            self.totals.requests += 1
        if status < 400:  # others had no row
            self._pace.note_done(now)
        self._everybody.note(now, 0 if self.totals.running else -1, is_done=status < 400)

    def admit_line(self) -> float:
        """Count a line of a batch in, or say how long it has to wait (s).

        Lines leave half of the key's rates to its requests, and are not counted as concurrent with them.
        """
        now = self._clock()
        wait_s = max((one.half_s(now) for one in (self._requests, self._tokens) if one is not None), default=0.0)
        if not wait_s:
            self.totals.requests += 1
            if self._requests is not None:
                self._requests.take(1, now)
        return wait_s

    def leave_line(self, reserved: int) -> None:
        """A line of a batch is over; tokens that were reserved for it are given back."""
        if self._tokens is not None and reserved:
            self._tokens.take(-reserved, self._clock())

    def reserve(self, num_tokens: int) -> int:
        """Take tokens that a request is going to need, until it leaves; returns how many were taken."""
        if self._tokens is None:
            return 0
        self._tokens.take(num_tokens, self._clock())
        return num_tokens

    def charge(self, usage: Usage, reserved: int = 0) -> None:
        """Tokens that were used, in place of those that were reserved."""
        self.totals.prompt_tokens += usage.prompt_tokens
        self.totals.cached_tokens += usage.cached_tokens
        self.totals.completion_tokens += usage.completion_tokens
        if self._tokens is not None:
            self._tokens.take(usage.prompt_tokens + usage.completion_tokens - reserved, self._clock())

    # -- what clients are told ----------------------------------------------------------------------------------------

    def retry_s(self) -> float:
        """When a request that found no place should come again, by how fast the key's requests are done."""
        now = self._clock()
        interval_s = self._interval_s(now)
        return FIRST_RETRY_S if interval_s is None else self._pace.next_s(now, interval_s)

    def num_refused_ahead(self) -> int:
        """About how many refused requests are expected before another one."""
        now = self._clock()
        interval_s = self._interval_s(now)
        return 0 if interval_s is None else round(self._pace.num_ahead(now, interval_s))

    def _interval_s(self, now: float) -> float | None:
        """Between two of the key's requests that are done, as far as that is known."""
        measured = self._pace.interval_s(now) or self._everybody.share_s(now)
        return None if measured is None else max(measured, 1e-3)

    def rate_headers(self) -> list[tuple[bytes, bytes]]:
        """OpenAI's headers, for the limits that the key has."""
        now, headers = self._clock(), []
        for kind, bucket in (("requests", self._requests), ("tokens", self._tokens)):
            if bucket is not None:
                told = {
                    "limit": bucket.per_minute,
                    "remaining": max(0, math.floor(bucket.level(now))),
                    "reset": duration(bucket.reset_s(now)),
                }
                headers += [
                    (f"x-ratelimit-{what}-{kind}".encode(), str(value).encode()) for what, value in told.items()
                ]
        return headers

    def remaining(self) -> dict[str, int]:
        """What is left now, of the limits that have something left."""
        now, limits = self._clock(), self.key.limits
        left = {
            "requests_per_minute": None if self._requests is None else math.floor(self._requests.level(now)),
            "tokens_per_minute": None if self._tokens is None else math.floor(self._tokens.level(now)),
            "concurrent_requests": limits.concurrent_requests and limits.concurrent_requests - self.totals.running,
        }
        return {name: max(0, count) for name, count in left.items() if count is not None}


def retry_headers(wait_s: float) -> dict[str, str]:
    """`Retry-After` in whole seconds, and OpenAI's finer header, which its clients prefer."""
    return {"Retry-After": str(max(1, math.ceil(wait_s))), "retry-after-ms": str(max(1, math.ceil(1000 * wait_s)))}


def duration(seconds: float) -> str:
    """As OpenAI writes it: 120ms, 1.5s, 6m0s."""
    if seconds < 1:
        return f"{math.ceil(1000 * seconds)}ms"
    minutes, rest = divmod(seconds, MINUTE_S)
    return f"{int(minutes)}m{math.ceil(rest)}s" if minutes else f"{rest:.3g}s"


# -- all of them ------------------------------------------------------------------------------------------------------


class KeyRing:
    """The keys of a server, with an account each."""

    def __init__(self, config: ServerConfig, clock: Clock = time.monotonic, wall_clock: Clock = time.time) -> None:
        self._config = config
        self._clock = clock
        self._wall_clock = wall_clock
        self._everybody = Everybody()
        self._known: dict[bytes, ApiKey] = {}
        self._limits: dict[str, KeyLimits] = {}
        self.quotas: dict[str, Quota] = {}
        """How much of an engine each key may use, by its id."""
        self.are_several = False
        """May there be more than one caller?"""
        self._accounts: dict[bytes, Account] = {}
        self.anonymous = Account(ANONYMOUS, self._everybody, clock)
        self.is_required = bool(config.every_key_hash) or config.keys_file is not None
        """Does every request need a key?"""
        self.reload()

    def reload(self) -> None:
        """Read the keys file again. If there is anything wrong with it, `ConfigError`, and all stays as it was."""
        file = KeysFile() if self._config.keys_file is None else read_keys(self._config.keys_file)
        admins = self._config.admin_key_hashes
        own = [
            ApiKey(name=f"api-key-{number}", sha256=known, is_admin=known in admins, limits=file.limits)
            for number, known in enumerate(self._config.every_key_hash, 1)
        ]
        keys = {key.sha256: key for key in (*file.keys, *own)}
        if hash_key("") in keys:
            raise ConfigError("an API key must not be empty")
        if len({key.name for key in keys.values()}) < len(keys):
            raise ConfigError("the names api-key-1, api-key-2 and so on are those of --api-key and --admin-key")
        self._known, self._limits = keys, {key.id: key.limits for key in keys.values()}
        self.are_several = self._config.keys_file is not None or len(keys) > 1
        self.quotas = {
            name: Quota(
                max_context=limits.max_context,
                max_tokens_per_step=limits.max_tokens_per_step,
                max_rows=limits.running_rows,
                max_queued=limits.queue_slots,
                yields_rows=self.are_several,
            )
            for name, limits in self._limits.items()
        }
        kept = {known: account for known, account in self._accounts.items() if known in keys or account.totals.running}
        for known, key in keys.items():
            if known in kept:
                kept[known].renew(key)
            else:
                kept[known] = Account(key, self._everybody, self._clock)
        self._accounts = kept

    def find(self, given: bytes | None) -> Account | None:
        """The account of a key that is valid now."""
        known = known_key(given, self._known)
        if known is None:
            return None
        expires_at = self._known[known].expires_at
        return None if expires_at is not None and expires_at <= self._wall_clock() else self._accounts[known]

    def account_of(self, key_id: str) -> Account | None:
        """The account of a key by its id, while the key is valid."""
        if not key_id:
            return None if self.is_required else self.anonymous
        known = bytes.fromhex(key_id)
        if known not in self._known:
            return None
        expires_at = self._known[known].expires_at
        return None if expires_at is not None and expires_at <= self._wall_clock() else self._accounts[known]

    @property
    def accounts(self) -> list[Account]:
        """Of all keys; of a server without keys, the one of everybody."""
        return list(self._accounts.values()) if self.is_required else [self.anonymous]

    def limits_of(self, key_id: str) -> KeyLimits:
        """The limits of a key by its id; those of a key that is gone are none, as it can't ask for anything."""
        return self._limits.get(key_id, KeyLimits())

    def session_quota(self, key_id: str) -> SessionQuota:
        """How many sessions a key may have."""
        limits = self.limits_of(key_id)
        return SessionQuota(
            max_sessions=limits.sessions, max_log_bytes=limits.session_bytes, is_shared=self.are_several
        )
