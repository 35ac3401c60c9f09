"""`/v1/files` and `/v1/batches`: what is uploaded, what runs, what is answered, and what a crash leaves of it."""

from __future__ import annotations

import asyncio
import io
import json
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.planting import PlantedBug, plant
from tests.server.rules import fake_server
from tests.server.serving import HI, KEY, WAIT_S, Child, Reply, Running, child, request
from tests.server.wire import held
from tokenmill.config import EngineConfig
from tokenmill.errors import NotDurable
from tokenmill.server import batch_runner
from tokenmill.server.batch_runner import Batches, BatchJob, Result, ResultFiles
from tokenmill.server.config import hash_key
from tokenmill.server.errors import ApiError
from tokenmill.server.stored_files import Files
from tokenmill.server.telemetry.figures import BatchFigures
from tokenmill.session.documents import Documents

CHAT = "/v1/chat/completions"
HOUR: Any = {"anchor": "created_at", "seconds": 3600}
OVER = ("completed", "failed", "expired", "cancelled")


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with fake_server(key_hashes=(hash_key(KEY), hash_key("other"))) as one:
        yield one


def assert_error(reply: Reply, status: int, code: str | None = None, param: str | None = None) -> None:
    assert reply.status == status, reply.body
    assert (reply.error["code"], reply.error["param"]) == (code, param)


def line(custom_id: str, url: str = CHAT, **body: Any) -> dict[str, Any]:
    usual = {"messages": HI, "max_tokens": 4, "temperature": 0} if url == CHAT else {}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {"model": "fake", **usual, **body}}


def upload(client: openai.OpenAI, lines: list[Any], name: str = "requests.jsonl") -> Any:
    text = "\n".join(one if isinstance(one, str) else json.dumps(one) for one in lines)
    return client.files.create(file=(name, io.BytesIO(text.encode())), purpose="batch")


def begin(client: openai.OpenAI, lines: list[Any], url: Any = CHAT, window: Any = "24h", **more: Any) -> Any:
    file = upload(client, lines)
    return client.batches.create(input_file_id=file.id, endpoint=url, completion_window=window, **more)


def until_over(client: openai.OpenAI, batch: Any) -> Any:
    deadline = time.monotonic() + WAIT_S
    while (found := client.batches.retrieve(batch.id)).status not in OVER:
        assert time.monotonic() < deadline, found
        time.sleep(0.005)
    return found


def results(client: openai.OpenAI, file_id: str | None) -> dict[str, Any]:
    """By custom_id; none is there twice."""
    if file_id is None:
        return {}
    found = [json.loads(one) for one in client.files.content(file_id).text.splitlines()]
    assert len({one["custom_id"] for one in found}) == len(found)
    assert all(set(one) == {"id", "custom_id", "response", "error"} for one in found)
    return {one["custom_id"]: one for one in found}


# -- files ------------------------------------------------------------------------------------------------------------


def test_a_file_is_listed_read_and_deleted(server: Running) -> None:
    files = server.client.files
    made = upload(server.client, [line("a")], "my requests.jsonl")
    assert (made.purpose, made.filename, made.status) == ("batch", "my requests.jsonl", "processed")
    assert made.expires_at == made.created_at + 30 * 86400
    other = upload(server.client, [line("b")])
    assert [one.id for one in files.list()][:2] == [other.id, made.id]
    assert [one.id for one in files.list(order="asc", after=made.id)] == [other.id]
    assert [one.id for one in files.list(limit=1)] == [one.id for one in files.list()], "page by page"
    assert files.list(purpose="batch_output", limit=1).data == []
    assert files.retrieve(made.id) == made
    assert json.loads(files.content(made.id).text) == line("a")
    assert len(files.content(made.id).content) == made.bytes
    for one in (made, other):
        assert files.delete(one.id).deleted
    assert_error(server.get(f"/v1/files/{made.id}"), 404, code="file_not_found")


def test_files_and_batches_of_other_keys_are_not_found(server: Running) -> None:
    batch = begin(server.client, [line("a")])
    until_over(server.client, batch)
    stranger = server.client.with_options(api_key="other")
    assert list(stranger.files.list()) == list(stranger.batches.list()) == []
    for path in (f"/v1/files/{batch.input_file_id}", f"/v1/files/{batch.input_file_id}/content"):
        assert_error(server.get(path, key="other"), 404, code="file_not_found")
    assert_error(server.get(f"/v1/batches/{batch.id}", key="other"), 404, code="batch_not_found")
    assert_error(server.post(f"/v1/batches/{batch.id}/cancel", {}, key="other"), 404, code="batch_not_found")
    body = {"input_file_id": batch.input_file_id, "endpoint": CHAT, "completion_window": "24h"}
    assert_error(server.post("/v1/batches", body, key="other"), 404, code="file_not_found", param="input_file_id")


def form(fields: dict[str, str], file: bytes | None = b"{}") -> tuple[bytes, dict[str, str]]:
    parts = [
        f'--x\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n' for name, value in fields.items()
    ]
    if file is not None:
        parts.append(f'--x\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n{file.decode()}\r\n')
    return "".join([*parts, "--x--\r\n"]).encode(), {"Content-Type": "multipart/form-data; boundary=x"}


@pytest.mark.parametrize(
    ("fields", "file", "param"),
    [
        ({}, b"{}", "purpose"),
        ({"purpose": "fine-tune"}, b"{}", "purpose"),
        ({"purpose": "batch"}, None, "file"),
        ({"purpose": "batch"}, b"", "file"),
        ({"purpose": "batch", "file": "text"}, None, "file"),
        ({"purpose": "batch", "expires_after[anchor]": "created_at"}, b"{}", "expires_after"),
        ({"purpose": "batch", "expires_after[seconds]": "7200"}, b"{}", "expires_after"),
    ],
)
def test_a_wrong_upload_is_refused(server: Running, fields: dict[str, str], file: bytes | None, param: str) -> None:
    body, headers = form(fields, file)
    assert_error(server.post("/v1/files", body, headers=headers), 400, param=param)


def test_an_upload_is_a_form_of_bounded_size_and_not_of_another_web_page() -> None:
    with fake_server(max_file_bytes=1000, max_files_bytes=1500) as server:
        for file, status in ((b"x" * 1001, 413), (b"x" * (1 << 17), 413), (b"x" * 900, 200), (b"x" * 900, 507)):
            body, headers = form({"purpose": "batch"}, file)
            assert server.post("/v1/files", body, headers=headers).status == status
        assert server.post("/v1/files", {"purpose": "batch"}).status == 415
        body, headers = form(
            {"purpose": "batch", "expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}
        )
        evil = {**headers, "Origin": "https://evil.example"}
        assert_error(server.post("/v1/files", body, headers=evil), 403)
        own = {**headers, "Origin": f"http://127.0.0.1:{server.port}"}
        made = server.post("/v1/files", body, headers=own).json()
        assert made["expires_at"] == made["created_at"] + 3600


# -- batches ----------------------------------------------------------------------------------------------------------


def test_a_batch_is_answered_as_requests_are(server: Running) -> None:
    wrong = line("wrong", temperature=-1)
    lines = [line(f"n{number}", seed=number, temperature=1, max_tokens=1 + number % 7) for number in range(12)]
    batch = until_over(server.client, begin(server.client, [*lines, "", wrong], metadata={"kind": "test"}))
    assert (batch.status, batch.errors) == ("completed", None)
    assert batch.metadata == {"kind": "test"}
    assert batch.request_counts.model_dump() == {"total": 13, "completed": 12, "failed": 1}
    times = [batch.created_at, batch.in_progress_at, batch.finalizing_at, batch.completed_at]
    assert times == sorted(times)
    answers = results(server.client, batch.output_file_id)
    assert set(answers) == {one["custom_id"] for one in lines}
    for one in lines:
        response = answers[one["custom_id"]]["response"]
        assert response["status_code"] == 200
        live = server.post(CHAT, one["body"]).json()
        assert response["body"]["choices"] == live["choices"]
        assert set(response["body"]) == set(live)
    used = [answer["response"]["body"]["usage"] for answer in answers.values()]
    assert batch.usage.output_tokens == sum(one["completion_tokens"] for one in used)
    assert batch.usage.input_tokens == sum(one["prompt_tokens"] for one in used)
    (error,) = results(server.client, batch.error_file_id).values()
    assert error["response"]["status_code"] == 400
    assert error["response"]["body"]["error"]["param"] == "temperature"
    assert server.client.batches.list(limit=1).data[0].id == batch.id
    text = server.get("/metrics").body.decode()
    assert 'tokenmill_batches{status="completed"}' in text
    assert "tokenmill_batch_lines_running 0.0" in text


@pytest.mark.parametrize(
    ("url", "body", "kind"),
    [
        ("/v1/completions", {"prompt": "once", "max_tokens": 3}, "text_completion"),
        ("/v1/embeddings", {"input": ["one", "two"]}, "list"),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 3}, "response"),
    ],
)
def test_each_endpoint_runs_in_batches(server: Running, url: str, body: dict[str, Any], kind: str) -> None:
    stream = {} if url == "/v1/embeddings" else {"stream": True}
    lines = [line("good", url, **body), line("unknown", url, **body, model="none"), line("odd", url, **body | stream)]
    batch = until_over(server.client, begin(server.client, lines[: 3 if stream else 2], url))
    (answer,) = results(server.client, batch.output_file_id).values()
    assert answer["response"]["body"]["object"] == kind
    errors = {
        name: one["response"]["body"]["error"] for name, one in results(server.client, batch.error_file_id).items()
    }
    assert errors["unknown"]["code"] == "model_not_found"
    assert not stream or errors["odd"]["param"] == "stream"


def test_files_of_results_expire_when_the_batch_says(server: Running) -> None:
    """Otherwise what was to be gone after an hour would be there for a month."""
    lines = [line("a"), line("b", model="nothing")]
    batch = until_over(server.client, begin(server.client, lines, output_expires_after=HOUR))
    for name in (batch.output_file_id, batch.error_file_id):
        file = server.client.files.retrieve(name)
        assert file.expires_at == file.created_at + HOUR["seconds"]
    usual = until_over(server.client, begin(server.client, lines[:1]))
    file = server.client.files.retrieve(usual.output_file_id)
    assert file.expires_at == file.created_at + 30 * 24 * 3600
    asked = {"input_file_id": usual.input_file_id, "endpoint": CHAT, "completion_window": "24h"}
    for wrong in ({**HOUR, "seconds": 60}, {**HOUR, "seconds": "x"}, {"seconds": 3600}, {**HOUR, "seconds": True}):
        reply = server.post("/v1/batches", {**asked, "output_expires_after": wrong})
        assert_error(reply, 400, param="output_expires_after")


def test_metadata_of_a_batch_is_bounded(server: Running) -> None:
    """It is in memory as long as the batch is known."""
    asked = {"input_file_id": upload(server.client, [line("a")]).id, "endpoint": CHAT, "completion_window": "24h"}
    for metadata in ({"a": "x" * 513}, {"a" * 65: "x"}, {str(number): "" for number in range(17)}):
        assert_error(server.post("/v1/batches", {**asked, "metadata": metadata}), 400, param="metadata")


def test_lines_that_are_no_requests_fail_the_batch_and_are_told_by_number(server: Running) -> None:
    lines = [
        line("good"),
        "{not json",
        "[]",
        {**line("x"), "custom_id": 7},
        {**line("y"), "url": "/v1/embeddings"},
        {**line("z"), "method": "GET"},
        {**line("w"), "body": "text"},
        line("good"),
    ]
    batch = until_over(server.client, begin(server.client, lines))
    assert batch.status == "failed"
    assert batch.output_file_id is batch.error_file_id is None
    assert batch.request_counts.total == 0
    told = [(one.line, one.code) for one in batch.errors.data]
    assert told == [
        (2, "invalid_json_line"),
        (3, "invalid_json_line"),
        (4, "missing_required_parameter"),
        (5, "invalid_url"),
        (6, "invalid_method"),
        (7, "missing_required_parameter"),
        (8, "duplicate_custom_id"),
    ]
    empty = until_over(server.client, begin(server.client, ["", " "]))
    assert [one.code for one in empty.errors.data] == ["empty_file"]
    file = upload(server.client, [line("a")])
    for wrong in ({"endpoint": "/v1/messages"}, {"completion_window": "8d"}, {"completion_window": "soon"}):
        body = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h", **wrong}
        assert_error(server.post("/v1/batches", body), 400, param=next(iter(wrong)))


def test_a_cancelled_batch_keeps_what_was_answered(server: Running) -> None:
    with held(server, after=20):
        batch = begin(server.client, [line("a", max_tokens=2), *(line(f"b{n}", max_tokens=2000) for n in range(20))])
        file = batch.input_file_id
        assert_error(request(server.port, "DELETE", f"/v1/files/{file}"), 409, code="file_in_use")
        cancelled = server.client.batches.cancel(batch.id)
        assert cancelled.status in ("cancelling", "cancelled")
    batch = until_over(server.client, batch)
    assert (batch.status, batch.error_file_id) == ("cancelled", None)
    assert batch.request_counts.completed == len(results(server.client, batch.output_file_id)) < 21
    assert_error(server.post(f"/v1/batches/{batch.id}/cancel", {}), 409, code="batch_not_cancellable")
    assert server.client.files.delete(file).deleted


def test_lines_that_were_not_run_in_time_expire(server: Running) -> None:
    with held(server, after=4):
        batch = begin(server.client, [line(f"a{n}", max_tokens=500) for n in range(30)])
        server.served.batches.find(batch_key(), batch.id).expires_at = int(time.time()) + 1
        server.do(restart(server, batch.id))
        time.sleep(1.1)
    batch = until_over(server.client, batch)
    assert batch.status == "expired"
    assert batch.request_counts.completed + batch.request_counts.failed == 30
    errors = results(server.client, batch.error_file_id)
    assert {one["error"]["code"] for one in errors.values()} == {"batch_expired"}
    assert {*errors, *results(server.client, batch.output_file_id)} == {f"a{n}" for n in range(30)}


def batch_key() -> str:
    return hash_key(KEY).hex()


async def restart(server: Running, batch_id: str) -> None:
    """As after a restart of the server: the time that is left is looked at anew."""
    batches = server.served.batches
    task = batches._running[batch_id]
    task.cancel()
    while not task.done():
        await asyncio.sleep(0)
    batches._begin(batches._batches[batch_id])


def test_live_requests_go_before_lines(server: Running) -> None:
    """All rows are taken by lines that go on for long; a request is answered all the same."""
    batch = begin(server.client, [line(f"a{n}", max_tokens=3000) for n in range(8)])
    while server.core.call(lambda core: core.stats()).result(WAIT_S).num_running < 4:
        pass
    assert server.chat(max_tokens=4).status == 200
    assert server.client.batches.retrieve(batch.id).request_counts.completed == 0
    server.client.batches.cancel(batch.id)
    assert until_over(server.client, batch).status == "cancelled"


# -- crashes ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_after_kill_9_midway_each_line_is_answered_once(tmp_path: Path) -> None:
    numbers, options = range(300), ("fake", "--store", str(tmp_path / "store"))
    lines = [line(f"n{number}", seed=number, temperature=1, max_tokens=40) for number in numbers]
    with child(tmp_path / "first.log", *options) as first:
        batch = begin(client_of(first), lines)
        while not (done := client_of(first).batches.retrieve(batch.id).request_counts.completed) >= 20:
            pass
        first.process.kill()
    assert done < 300, "it was killed midway"
    torn = next((tmp_path / "store" / "batches").glob("*.output.jsonl"))
    kept = torn.read_bytes()
    torn.write_bytes(kept + b'{"id":"batch_req_1","custom_id":"n29')  # as a power cut leaves it
    with child(tmp_path / "second.log", *options) as second:
        client = client_of(second)
        batch = until_over(client, batch)
        assert batch.status == "completed"
        assert batch.request_counts.model_dump() == {"total": 300, "completed": 300, "failed": 0}
        answers = results(client, batch.output_file_id)
        assert set(answers) == {f"n{number}" for number in numbers}
        assert client.files.content(batch.output_file_id).content.startswith(kept), "nothing was run twice"
        assert client.batches.list().data[0].usage.output_tokens == sum(
            one["response"]["body"]["usage"]["completion_tokens"] for one in answers.values()
        )


def client_of(one: Child) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://127.0.0.1:{one.port}/v1", api_key="none", timeout=WAIT_S)


def test_a_batch_that_was_finalizing_has_its_files_after_a_restart(tmp_path: Path) -> None:
    with fake_server(store=tmp_path / "store") as server:
        made = until_over(server.client, begin(server.client, [line("a"), line("b", temperature=-1)]))
        batch = server.served.batches._batches[made.id]
        answers = results(server.client, made.output_file_id)
        # As a crash leaves it between the two files: the errors are not moved yet, their document is not there.
        files = tmp_path / "store" / "files"
        (files / made.error_file_id).rename(tmp_path / "store" / "batches" / f"{made.id}.errors.jsonl")
        batch.status, batch.output_file_id, batch.error_file_id = type(batch.status)("finalizing"), None, None
        server.do(server.served.batches._save(batch))
    with fake_server(store=tmp_path / "store") as server:
        again = until_over(server.client, made)
        assert again.request_counts == made.request_counts
        assert results(server.client, again.output_file_id) == answers
        assert list(results(server.client, again.error_file_id)) == ["b"]
        assert len(list(server.client.files.list())) == 3


def test_results_outlive_a_disk_that_fails_while_they_become_files(tmp_path: Path) -> None:
    (tmp_path / "written").write_bytes(b"results")
    documents = Documents.in_memory()
    files = Files(documents, tmp_path, 1 << 20, lambda key: None)  # noqa: ARG005
    what = ("file-1", "key", tmp_path / "written", "out.jsonl", "batch_output")

    async def scenario() -> None:
        post = documents._post
        documents._post = lambda *_, **__: failed_future()
        with pytest.raises(ApiError):
            await files.adopt(*what)
        documents._post = post
        assert (made := await files.adopt(*what)) is not None
        assert (made, files.path("file-1").read_bytes()) == (files.find("key", "file-1"), b"results")
        assert await files.adopt(*what) == made, "it can be repeated"
        again = Files(documents, tmp_path, 1 << 20, lambda key: None)  # noqa: ARG005
        await again.load()
        assert again.of("key") == [made]

    asyncio.run(scenario())


def failed_future() -> Future[Any]:
    failed: Future[Any] = Future()
    failed.set_exception(NotDurable("the disk is full"))
    return failed


def test_a_batch_whose_file_is_gone_fails(server: Running) -> None:
    with held(server, after=1):
        batch = begin(server.client, [line(f"a{n}") for n in range(30)])
        server.served.files.path(batch.input_file_id).unlink()
        server.do(restart(server, batch.id))
        found = until_over(server.client, batch)
    assert (found.status, [one.code for one in found.errors.data]) == ("failed", ["file_not_found"])


def test_a_file_that_fails_does_not_repeat_the_other_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_runner, "RETRY_S", 0.001)
    batch = BatchJob("batch_1", "key", CHAT, "file-1", "24h", 0, 0)

    async def scenario() -> None:
        written = ResultFiles(tmp_path, batch, BatchFigures())
        written.errors.mkdir()  # it can't be written
        written.add(Result(False, b"error\n"))
        written.add(Result(True, b"one\n"))
        while not batch.completed:
            await asyncio.sleep(0.001)
        written.add(Result(True, b"two\n"))
        while batch.completed < 2:
            await asyncio.sleep(0.001)
        assert batch.failed == 0
        written.errors.rmdir()
        await written.flush()
        assert (written.answers.read_bytes(), written.errors.read_bytes()) == (b"one\ntwo\n", b"error\n")
        assert (batch.completed, batch.failed) == (2, 1)

    asyncio.run(scenario())


def test_a_key_that_waits_for_its_rate_holds_nobody_up(tmp_path: Path) -> None:
    keys, names = tmp_path / "keys.toml", {"slow": "requests_per_minute = 2\n", KEY: ""}
    keys.write_text(
        "".join(f'[[key]]\nname = "{key}"\nsha256 = "{hash_key(key).hex()}"\n{rate}' for key, rate in names.items())
    )
    with fake_server(engine=EngineConfig(max_num_seqs=1), key_hashes=(), keys_file=keys) as server:
        slow = server.client.with_options(api_key="slow")
        file = upload(server.client.with_options(api_key="slow"), [line(f"a{n}") for n in range(9)])
        for _ in range(4):
            slow.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
        while not any(one.request_counts.completed for one in slow.batches.list()):
            pass
        assert until_over(server.client, begin(server.client, [line("b")])).request_counts.completed == 1


def test_lines_whose_answers_have_no_room_are_not_run() -> None:
    with fake_server(max_files_bytes=4000) as server:
        batch = until_over(server.client, begin(server.client, [line(f"a{n}") for n in range(20)]))
        assert batch.status == "completed"
        errors = results(server.client, batch.error_file_id)
        assert {one["error"]["code"] for one in errors.values()} == {"file_storage_full"}
        answers = results(server.client, batch.output_file_id)
        assert {*answers, *errors} == {f"a{n}" for n in range(20)}


def test_batches_that_are_over_are_bounded(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_runner, "MAX_FINISHED", 2)
    made = [until_over(server.client, begin(server.client, [line("a")])) for _ in range(4)]
    assert [one.id for one in server.client.batches.list()] == [one.id for one in made[:0:-1]]


def test_lines_leave_half_of_a_keys_rates_to_its_requests(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(f'[[key]]\nname = "a"\nsha256 = "{hash_key(KEY).hex()}"\nrequests_per_minute = 10\n')
    with fake_server(engine=EngineConfig(max_num_seqs=4), key_hashes=(), keys_file=keys) as server:
        batch = begin(server.client, [line(f"a{n}") for n in range(20)])
        deadline = time.monotonic() + WAIT_S
        while (found := server.client.batches.retrieve(batch.id)).request_counts.completed < 5:
            assert time.monotonic() < deadline, found
        assert [server.chat().status for _ in range(4)] == [200] * 4
        server.client.batches.cancel(batch.id)
        found = until_over(server.client, batch)
        assert found.status == "cancelled"
        assert found.request_counts.completed < 10


def test_a_batch_goes_on_after_a_restart_and_runs_no_line_twice(tmp_path: Path) -> None:
    lines = [line(f"n{number}", max_tokens=20, seed=number) for number in range(60)]
    with fake_server(store=tmp_path / "store") as server, held(server, after=60):
        batch = begin(server.client, lines)
        deadline = time.monotonic() + WAIT_S
        while (done := server.client.batches.retrieve(batch.id)).request_counts.completed < 5:
            assert time.monotonic() < deadline, done
        server.do(server.served.batches.stop())
    (path,) = (tmp_path / "store" / "batches").glob("*.output.jsonl")
    kept = path.read_bytes()
    assert 5 <= kept.count(b"\n") < 60, "it was stopped midway"
    path.write_bytes(kept + b'{"id":"batch_req_1","custom_id":"n5')  # as a power cut leaves it
    with fake_server(store=tmp_path / "store") as server:
        batch = until_over(server.client, batch)
        assert batch.request_counts.model_dump() == {"total": 60, "completed": 60, "failed": 0}
        assert set(results(server.client, batch.output_file_id)) == {f"n{number}" for number in range(60)}
        assert server.client.files.content(batch.output_file_id).content.startswith(kept)


BUGS = [
    PlantedBug("lines are run again", Batches, "_run_once", "one.custom_id not in done", "True"),
    PlantedBug("half a line is kept", ResultFiles, "replay", "file.truncate(end)", "pass"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS, ids=[bug.name for bug in BUGS])
def test_a_planted_bug_is_caught(bug: PlantedBug, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(bug, monkeypatch)
    with pytest.raises((AssertionError, ValueError)):
        test_a_batch_goes_on_after_a_restart_and_runs_no_line_twice(tmp_path)
