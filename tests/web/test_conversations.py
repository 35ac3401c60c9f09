"""Many conversations: titles, search, files; the server's sessions are theirs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.server.serving import Child, request
from tests.server.wire import until
from tests.web.browsing import Visit

JAPAN, ITALY = "What is the capital of Japan?", "And of Italy?"


def more(visit: Visit, place: int, action: str) -> None:
    entry = visit.conversations.nth(place)
    entry.locator("summary").click()
    entry.get_by_role("button", name=action).click()


@pytest.mark.req("R41")
def test_titles_search_rename_and_delete(visit: Visit, server: Child) -> None:
    visit.open(max_tokens=6)
    for question in (JAPAN, "How do bees\nfind flowers?"):
        visit.start_new()
        visit.ask(question)
    titles = visit.conversations.locator(".title")
    expect(titles).to_have_text(["How do bees", JAPAN])

    visit.page.keyboard.press("Control+k")
    words = visit.page.get_by_label("Words to look for")
    words.fill("flowers find")
    expect(visit.page.get_by_role("listbox").get_by_role("option")).to_have_text(["How do bees"])
    words.fill("capital")
    expect(visit.page.get_by_role("listbox").get_by_role("option")).to_have_text([JAPAN])
    visit.page.keyboard.press("Enter")
    expect(visit.page.locator("header h1")).to_have_text(JAPAN)

    more(visit, 1, "Rename")
    visit.page.get_by_label("Title").fill("Cities")
    visit.page.keyboard.press("Enter")
    expect(titles.last).to_have_text("Cities")

    (session,) = visit.current()["sessions"]
    more(visit, 1, "Delete")
    visit.page.get_by_role("dialog").get_by_role("button", name="Delete").click()
    expect(visit.conversations).to_have_count(1)
    expect(visit.messages).to_have_count(0)
    until(lambda: request(server.port, "GET", f"/v1/sessions/{session}").status == 404)  # it is gone there, too
    visit.page.reload()
    expect(titles).to_have_text(["How do bees"])


def download(visit: Visit, place: int, action: str, folder: Path) -> Path:
    with visit.page.expect_download() as waiting:
        more(visit, place, action)
    path = folder / waiting.value.suggested_filename
    waiting.value.save_as(path)
    return path


@pytest.mark.req("R41")
def test_what_is_exported_can_be_taken_in_again(visit: Visit, tmp_path: Path) -> None:
    visit.open()
    visit.ask(JAPAN)
    visit.act(visit.answers.last, "Edit the answer")
    visit.page.get_by_label("The answer").fill("**Tokyo**, of course.")
    visit.page.get_by_role("button", name="Save", exact=True).click()
    expect(visit.answers.last.locator("strong")).to_have_text("Tokyo")
    path = download(visit, 0, "Export as JSON", tmp_path)
    markdown = download(visit, 0, "Export as Markdown", tmp_path).read_text()
    assert markdown == f"# {JAPAN}\n\n## You\n\n{JAPAN}\n\n## Model\n\n**Tokyo**, of course.\n"
    assert "sessions" not in path.read_text()

    more(visit, 0, "Delete")
    visit.page.get_by_role("dialog").get_by_role("button", name="Delete").click()
    expect(visit.conversations).to_have_count(0)
    visit.page.locator("input[type=file]").set_input_files(path)
    expect(visit.messages).to_have_count(2)
    expect(visit.answers.last).to_contain_text("Tokyo, of course.")
    expect(visit.answers.last.locator(".branches")).to_contain_text("2/2")
    visit.ask(ITALY)
    (made,) = visit.watched.bodies("/v1/sessions")[1:]
    assert made["messages"][1]["content"] == "**Tokyo**, of course."


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("not JSON", "no JSON"),
        ("{}", "no conversations"),
        (json.dumps({"format": "tokenmill.conversations", "version": 9, "conversations": []}), "newer version"),
        (
            json.dumps(
                {
                    "format": "tokenmill.conversations",
                    "version": 1,
                    "conversations": [{"messages": {"a": {"role": "user", "content": "x", "parent": "b"}}}],
                }
            ),
            "not there",
        ),
        (
            json.dumps(
                {
                    "format": "tokenmill.conversations",
                    "version": 1,
                    "conversations": [
                        {
                            "messages": {
                                "a": {"role": "user", "content": "x", "parent": "b"},
                                "b": {"role": "assistant", "content": "x", "parent": "a"},
                            }
                        }
                    ],
                }
            ),
            "not there",
        ),
    ],
)
def test_a_file_of_another_kind_is_refused(visit: Visit, tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "file.json"
    path.write_text(content)
    visit.open()
    visit.page.locator("input[type=file]").set_input_files(path)
    expect(visit.page.get_by_role("dialog")).to_contain_text(words)
    visit.page.keyboard.press("Escape")
    expect(visit.conversations).to_have_count(0)


@pytest.mark.req("R41")
def test_a_session_that_the_server_has_lost_is_made_again(visit: Visit, server: Child) -> None:
    visit.open()
    visit.ask(JAPAN)
    (session,) = visit.current()["sessions"]
    assert request(server.port, "DELETE", f"/v1/sessions/{session}").status == 204
    visit.ask(ITALY)
    expect(visit.page.get_by_role("alert")).to_have_count(0)
    assert [len(body.get("messages", ())) for body in visit.watched.bodies("/v1/sessions")] == [0, 2]
    (another,) = visit.current()["sessions"]
    assert another != session
    visit.act(visit.questions.last, "Edit and ask again")
    visit.page.get_by_label("Your question").fill("And of Peru?")
    with visit.answered():
        visit.page.keyboard.press("Control+Enter")
    assert len(visit.said()) == 4


def test_two_tabs_see_the_same_conversations(visit: Visit) -> None:
    visit.open(max_tokens=6)
    other = visit.context.new_page()
    other.goto(visit.watched.origin)
    visit.ask(JAPAN)
    expect(other.locator(".conversations .title")).to_have_text([JAPAN])
    other.locator(".conversations a").click()
    expect(other.locator("article.message")).to_have_count(2)
    visit.ask(ITALY)
    expect(other.locator("article.message")).to_have_count(4)
    more(visit, 0, "Delete")
    visit.page.get_by_role("dialog").get_by_role("button", name="Delete").click()
    expect(other.locator("article.message")).to_have_count(0)


def test_what_is_written_stays_while_another_conversation_is_looked_at(visit: Visit) -> None:
    visit.open(max_tokens=6)
    visit.ask(JAPAN)
    visit.field.fill("half a quest")
    visit.page.keyboard.press("Control+Shift+O")
    expect(visit.field).to_have_value("")
    visit.conversations.locator("a").click()
    expect(visit.field).to_have_value("half a quest")
