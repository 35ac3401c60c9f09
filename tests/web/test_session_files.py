"""Session files on the page: what was saved, there or elsewhere, goes on; what is no such file is refused plainly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, expect

from tests.server.conversing import SESSIONS, converse
from tests.server.serving import KEY, Child, Running, request, running
from tests.server.telling import make_config, make_llm
from tests.session.test_files import header
from tests.web.browsing import LEAF, Visit
from tests.web.test_conversations import ITALY, JAPAN, download, more
from tests.web.test_trouble import WITH_KEY, fake_visit
from tokenmill.server.config import ServerConfig
from tokenmill.session.records import MAGIC, MEDIA_TYPE

PERU = "And of Peru?"
SHOWS_ANOTHER = f"async (before) => {{ {LEAF} return location.hash !== before && leaf !== undefined; }}"


def save(visit: Visit, folder: Path, place: int = 0) -> Path:
    path = download(visit, place, "Save the session", folder)
    assert path.suffix == ".session"
    return path


def delete(visit: Visit, place: int = 0) -> None:
    count = visit.conversations.count()
    more(visit, place, "Delete")
    visit.page.get_by_role("dialog").get_by_role("button", name="Delete").click()
    expect(visit.conversations).to_have_count(count - 1)


def choose(visit: Visit, path: Path) -> None:
    visit.page.locator("input[type=file]").set_input_files(path)


def take_in(visit: Visit, path: Path) -> None:
    """Choose a file that is one; its conversation is there, and shown."""
    before = visit.page.evaluate("() => location.hash")
    choose(visit, path)
    visit.page.wait_for_function(SHOWS_ANOTHER, arg=before)


def sessions_on(server: Child | Running) -> list[str]:
    return [one["id"] for one in request(server.port, "GET", SESSIONS).json()["data"]]


@pytest.mark.req("R41", "B3")
def test_a_saved_session_is_taken_in_and_goes_on(visit: Visit, server: Child, tmp_path: Path) -> None:
    visit.open(max_tokens=16)
    visit.page.get_by_label("Settings").click()
    visit.page.get_by_label("System prompt").fill("You know the capitals.")
    visit.page.get_by_role("button", name="Save", exact=True).click()
    visit.ask(JAPAN)
    visit.ask(ITALY)
    before, said, total = visit.current(), visit.said(), visit.last_stats()["total"]
    path = save(visit, tmp_path)
    assert path.name == "What-is-the-capital-of-Japan.session"
    assert path.read_bytes().startswith(MAGIC)
    (old,) = before["sessions"]

    delete(visit)
    expect(visit.messages).to_have_count(0)
    assert old not in sessions_on(server)
    renamed = path.rename(tmp_path / "a file.json")  # a file is what it begins with
    take_in(visit, renamed)
    expect(visit.messages).to_have_count(4)
    expect(visit.page.locator("header h1")).to_have_text(JAPAN)
    after = visit.current()
    assert visit.said() == said
    assert (after["system"], after["sampling"], after["model"]) == (
        "You know the capitals.",
        {"temperature": 0, "max_tokens": 16},
        "smollm2-135m",
    )
    (new,) = after["sessions"]
    assert new in sessions_on(server)
    visit.ask(PERU)
    assert len(visit.watched.bodies(SESSIONS)) == 1, "no session is told the history"
    assert visit.watched.bodies(f"{new}/generate") == [{"temperature": 0, "max_tokens": 16, "input": PERU}]
    stats = visit.last_stats()
    assert stats["prompt"] > total, "the session knows all that was said"
    visit.ask(JAPAN)
    assert visit.last_stats()["cached"] >= stats["total"] - 2, (
        "the server has computed what the file told it, and keeps it"
    )

    visit.act(visit.questions.nth(1), "Edit and ask again")  # inside what came from the file
    visit.page.get_by_label("Your question").fill(PERU)
    visit.page.keyboard.press("Control+Enter")
    visit.wait_for_answer()
    assert visit.watched.bodies(f"{new}/fork") == [{"at_turn": 2}]
    assert len(visit.watched.bodies(SESSIONS)) == 1


@pytest.mark.req("R41", "B3")
def test_what_the_server_still_has_is_not_computed_again(visit: Visit, tmp_path: Path) -> None:
    visit.open(max_tokens=16)
    visit.ask(JAPAN)
    said, total = visit.said(), visit.last_stats()["total"]
    take_in(visit, save(visit, tmp_path))
    expect(visit.conversations).to_have_count(2)
    assert visit.said() == said
    visit.ask(ITALY)
    assert visit.last_stats()["cached"] >= total - 2, "all but the last token, which nobody had computed with"
    here, there = visit.stored()
    assert not set(here["sessions"]) & set(there["sessions"])


@pytest.mark.req("R41")
def test_the_branch_that_is_shown_is_saved(visit: Visit, server: Child, tmp_path: Path) -> None:
    visit.open(max_tokens=6)
    visit.ask(JAPAN)
    first = visit.said()
    visit.ask(ITALY)
    whole = visit.said()
    visit.act(visit.questions.first, "Edit and ask again")
    visit.page.get_by_label("Your question").fill("What is a table?")
    visit.page.keyboard.press("Control+Enter")
    visit.wait_for_answer()
    table = visit.said()

    def saved() -> list[str]:
        turns = header(save(visit, tmp_path).read_bytes())["turns"]
        return [message["content"] for turn in turns for message in turn["messages"]]

    assert saved() == table
    visit.act(visit.questions.first, "Previous branch")
    expect(visit.messages).to_have_count(4)
    assert saved() == whole
    assert first == whole[:2]

    for session in visit.current()["sessions"]:
        assert request(server.port, "DELETE", f"{SESSIONS}/{session}").status == 204
    kept = header(save(visit, tmp_path).read_bytes())
    assert kept["turns"] == []
    assert [message["content"] for message in kept["session"]["inbox"]] == whole, "one that is lost is made again"
    take_in(visit, next(tmp_path.glob("*.session")))
    expect(visit.conversations).to_have_count(2)
    expect(visit.messages).to_have_count(4)
    made = len(visit.watched.bodies(SESSIONS))
    visit.ask(PERU)
    assert visit.said()[:4] == whole
    assert len(visit.watched.bodies(SESSIONS)) == made


@pytest.fixture(scope="module")
def foreign_file() -> bytes:
    """Of another model."""
    with running(make_llm(), make_config()) as other:
        talk = converse(other)
        talk.ask("one")
        return talk.post("save").body


@pytest.mark.req("R41", "B3")
def test_a_file_that_is_refused_changes_nothing(
    visit: Visit, server: Child, tmp_path: Path, foreign_file: bytes
) -> None:
    visit.open(max_tokens=6)
    visit.ask(JAPAN)
    path = save(visit, tmp_path)
    data, before, sessions = path.read_bytes(), visit.stored(), sessions_on(server)
    dialog = visit.page.get_by_role("dialog")
    for wrong, words in (
        (data[:-40] + bytes([data[-40] ^ 1]) + data[-39:], "corrupt: checksum mismatch"),
        (data[:100], "truncated: 100 bytes"),
        (data[:18] + b"\x07" + data[19:], "version 7 is newer than the supported version"),
        (foreign_file, "it is of another model"),
        (data + bytes(9 << 20), "larger than the server takes: a body may have 8388608 bytes"),
        (data + bytes(48 << 20), "larger than the server takes"),
        (b"tokenmill", "This file is no JSON."),
    ):
        path.write_bytes(wrong)
        choose(visit, path)
        expect(dialog).to_contain_text("The file can't be taken in")
        expect(dialog).to_contain_text(words)
        expect(dialog.get_by_role("button", name="Close")).to_be_focused()
        visit.page.keyboard.press("Enter")
        expect(dialog).to_have_count(0)
    assert visit.stored() == before
    assert sessions_on(server) == sessions
    expect(visit.conversations).to_have_count(1)
    visit.ask(ITALY)
    assert len(visit.watched.bodies(SESSIONS)) == 1


@pytest.mark.req("R41", "R37")
def test_with_a_key_and_by_keyboard(browser: Browser, tmp_path: Path) -> None:
    with fake_visit(browser, WITH_KEY) as (_, visit):
        visit.open(max_tokens=6)
        visit.page.get_by_role("dialog").get_by_label("API key").fill(KEY)
        visit.page.keyboard.press("Enter")
        expect(visit.page.get_by_role("dialog")).to_have_count(0)
        visit.ask("hi")
        said = visit.said()
        visit.conversations.locator("summary").focus()
        visit.page.keyboard.press("Enter")
        button = visit.page.get_by_role("button", name="Save the session")
        expect(button).to_be_visible()
        for _ in range(4):
            visit.page.keyboard.press("Tab")
        expect(button).to_be_focused()
        with visit.page.expect_download() as waiting:
            visit.page.keyboard.press("Enter")
        waiting.value.save_as(tmp_path / "it")
        take_in(visit, tmp_path / "it")
        expect(visit.conversations).to_have_count(2)
        assert visit.said() == said
        asked = [one for one in visit.watched.requests if one.url.endswith("/save") or "/restore" in one.url]
        assert [one.all_headers()["authorization"] for one in asked] == [f"Bearer {KEY}"] * 2


def saved_elsewhere(server: Running, path: Path, *steps: dict[str, Any], **options: Any) -> Path:
    """The file of a session that was made without the page: what was appended, with an answer where it says so."""
    talk = converse(server, **options)
    for step in steps:
        assert talk.post("append", **step).status == 200
        if step is not steps[-1]:
            talk.ask(max_tokens=4, temperature=0.5)
    path.write_bytes(talk.post("save").body)
    assert talk.delete().status == 204
    return path


@pytest.mark.req("R41")
def test_a_session_that_was_made_elsewhere(browser: Browser, tmp_path: Path) -> None:
    with fake_visit(browser, ServerConfig()) as (server, visit):
        visit.open(max_tokens=6)
        two = [{"role": "user", "content": "one"}, {"role": "user", "content": "two"}]
        path = saved_elsewhere(server, tmp_path / "one", {"input": two}, {"input": "waits"}, system="SYS")
        take_in(visit, path)
        expect(visit.messages).to_have_count(4)
        assert visit.said()[0] == "one\n\ntwo"
        assert visit.said()[2:] == ["waits", ""]
        assert (visit.current()["system"], visit.current()["sampling"]) == (
            "SYS",
            {"temperature": 0.5, "max_tokens": 6},
        )
        expect(visit.page.get_by_role("alert")).to_have_text("This question has no answer yet.")
        visit.page.get_by_role("button", name="Try again").click()
        visit.page.wait_for_function("() => !document.querySelector('.trouble')")
        visit.wait_for_answer()
        assert visit.said()[-1] != ""
        assert visit.watched.bodies("/generate") == [{"temperature": 0.5, "max_tokens": 6}], (
            "the session has heard the question"
        )
        assert len(sessions_on(server)) == 1

        dropping = saved_elsewhere(
            server, tmp_path / "dropping", {"input": "one"}, {"input": "two"}, overflow="drop_oldest_turns"
        )
        take_in(visit, dropping)
        expect(visit.conversations).to_have_count(2)
        expect(visit.questions.last).to_contain_text("two")
        assert visit.current()["sessions"] == {}, "its turns would not stay what the page knows"

        count = visit.conversations.count()
        tool = {"role": "tool", "content": "42", "tool_call_id": "x"}
        for given, words in (
            ([two[0], tool], "messages of other roles (tool)"),
            ([{"role": "assistant", "content": "hi"}, two[0]], "begins with an answer"),
            ([65, 66], "input that is no message"),
        ):
            choose(visit, saved_elsewhere(server, tmp_path / "odd", {"input": given}))
            dialog = visit.page.get_by_role("dialog")
            expect(dialog).to_contain_text(words)
            visit.page.keyboard.press("Escape")
            expect(dialog).to_have_count(0)
        expect(visit.conversations).to_have_count(count)
        visit.page.wait_for_function("async () => (await (await fetch('/v1/sessions')).json()).data.length === 1")
        empty = request(server.port, "POST", SESSIONS, {}).json()["id"]
        (tmp_path / "empty").write_bytes(request(server.port, "POST", f"{SESSIONS}/{empty}/save", {}).body)
        choose(visit, tmp_path / "empty")
        expect(visit.page.get_by_role("dialog")).to_contain_text("Nothing has been said in this session yet.")


@pytest.mark.req("R41")
def test_why_a_session_can_not_be_saved(browser: Browser) -> None:
    with fake_visit(browser) as (server, visit):
        visit.open(max_tokens=6)
        visit.ask("hi")
        visit.page.route("**/save", lambda route: route.abort())
        more(visit, 0, "Save the session")
        dialog = visit.page.get_by_role("dialog")
        expect(dialog).to_contain_text("The session can't be saved")
        expect(dialog).to_contain_text("The server can't be reached.")
        visit.page.keyboard.press("Escape")
        expect(dialog).to_have_count(0)
        assert len(visit.current()["sessions"]) == len(sessions_on(server)) == 1

        visit.start_new()
        visit.page.route("**/generate", lambda route: route.abort())
        visit.ask("is anybody there?")
        more(visit, 0, "Save the session")
        expect(dialog).to_contain_text("Nothing has been said in this conversation yet.")


def test_a_file_of_any_of_the_models_that_are_loaded(browser: Browser, tmp_path: Path) -> None:
    """The page asks the model that is chosen first, and then the others."""
    with fake_visit(browser) as (server, visit):
        path = saved_elsewhere(server, tmp_path / "one", {"input": "one"})
        visit.open()
        asked: list[str] = []

        def restore(route: Any) -> None:
            asked.append(route.request.url.partition("model=")[2])
            assert route.request.headers["content-type"] == MEDIA_TYPE
            if asked[-1] == "first":
                error = {"message": "invalid session file: it is of another model", "code": "bad_session_file"}
                route.fulfill(status=400, json={"error": error})
            else:
                route.continue_(url=route.request.url.partition("?")[0])

        def models(route: Any) -> None:
            loaded = [{"id": name, "aliases": [], "status": "loaded"} for name in ("first", "fake")]
            route.fulfill(json={"data": [*loaded, {"id": "last", "aliases": [], "status": "unloaded"}]})

        visit.page.route("**/v1/models", models)
        visit.page.route("**/restore?*", restore)
        visit.page.reload()
        expect(visit.page.locator("header select")).to_have_value("first")
        take_in(visit, path)
        expect(visit.messages).to_have_count(2)
        assert asked == ["first", "fake"]
        expect(visit.page.locator("header select")).to_have_value("fake")
