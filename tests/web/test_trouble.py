"""What goes wrong is said in plain words, and can be mended."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, expect

from tests.server.serving import KEY, Running, child, request, running
from tests.server.wire import Wire, chat_request, held, until, wait_for_inbox
from tests.web.browsing import LONG, Visit, visiting
from tokenmill import AsyncLLM
from tokenmill.backends.fake import FakeConfig, FakeModel
from tokenmill.config import EngineConfig
from tokenmill.server.config import ServerConfig, hash_key

OPTIONS = ("smollm2-135m", "--context", "2048", "--threads", "1")
WITH_KEY = ServerConfig(key_hashes=(hash_key(KEY),))


@contextmanager
def fake_visit(
    browser: Browser, config: ServerConfig = ServerConfig(), max_context: int = 4096, **engine: Any
) -> Iterator[tuple[Running, Visit]]:
    """A server over the fake model, and the page on it."""
    model = FakeModel(FakeConfig(vocab_size=258, max_context=max_context))
    llm = AsyncLLM(model, config=EngineConfig(**engine), kv_cache_tokens=8192)
    with running(llm, config) as server, visiting(browser, f"http://127.0.0.1:{server.port}") as visit:
        yield server, visit


@pytest.mark.req("R41")
def test_a_server_that_dies_in_the_middle_of_an_answer(browser: Browser, tmp_path: Path) -> None:
    with child(tmp_path / "first", *OPTIONS) as server, visiting(browser, f"http://127.0.0.1:{server.port}") as visit:
        visit.open(max_tokens=600)
        visit.ask("What is the capital of Japan?")
        visit.send(LONG)
        visit.wait_for_words(20)
        server.process.kill()
        expect(visit.answers.last).to_contain_text("connection was lost")
        banner = visit.page.get_by_role("status")
        with child(tmp_path / "second", *OPTIONS, port=server.port):
            alert = visit.page.get_by_role("alert")
            expect(alert).to_contain_text("may have been restarted")
            expect(banner).to_have_count(0)
            partial = visit.said()[-1]
            assert len(partial) >= 20, "what was said is kept"
            with visit.answered():
                visit.page.get_by_role("button", name="Try again").click()
            expect(visit.answers.last.locator(".branches")).to_contain_text("2/2")
            expect(alert).to_have_count(0)
            assert visit.said()[-1]
            made = visit.watched.bodies("/v1/sessions")[-1]
            assert [message["role"] for message in made["messages"]] == ["user", "assistant"]


@pytest.mark.req("R41", "R36")
@pytest.mark.parametrize("how", ["kill", "terminate"])
def test_21_6_an_answer_that_a_restart_cut_off_goes_on(browser: Browser, tmp_path: Path, how: str) -> None:
    options = (*OPTIONS, "--store", str(tmp_path / "store"), "--drain", "0")
    with child(tmp_path / "first", *options) as server, visiting(browser, f"http://127.0.0.1:{server.port}") as visit:
        visit.open(max_tokens=600)
        visit.ask("What is the capital of Japan?")
        visit.send(LONG)
        visit.wait_for_words(20)
        getattr(server.process, how)()
        server.process.wait()
        with child(tmp_path / "second", *options, port=server.port):
            button = visit.page.get_by_role("button", name="Continue", exact=True)
            expect(button).to_be_visible()
            expect(visit.page.get_by_text("has no answer to read")).to_have_count(0)
            expect(visit.page.get_by_role("alert")).to_contain_text("before this answer was complete")
            partial = visit.said()[-1]
            assert len(partial) >= 20
            button.click()
            expect(button).to_have_count(0)
            visit.wait_for_answer()
            expect(visit.page.get_by_role("alert")).to_have_count(0)
            assert visit.said()[-1].startswith(partial), "what was said stays, and nothing is said twice"
            assert len(visit.said()[-1]) > len(partial)
            assert len(visit.said()) == 4
            expect(visit.answers.last.locator(".branches")).to_have_count(0)
            assert visit.last_stats()["prompt"] > 0
            (session,) = visit.current()["sessions"]
            turns = request(server.port, "GET", f"/v1/sessions/{session}/turns", key=None).json()["data"]
            assert [message["content"] for turn in turns for message in turn["messages"]] == visit.said()
            visit.ask("And of Italy?")
            assert len(visit.said()) == 6


@pytest.mark.req("R41", "R37")
def test_a_key_is_asked_for_and_kept_only_if_wanted(browser: Browser) -> None:
    with fake_visit(browser, WITH_KEY) as (_, visit):
        visit.open()
        dialog = visit.page.get_by_role("dialog")
        expect(dialog).to_contain_text("wants an API key")
        visit.page.keyboard.press("Escape")
        expect(dialog).to_be_visible()
        dialog.get_by_label("API key").fill("wrong")
        visit.page.keyboard.press("Enter")
        expect(dialog.get_by_role("alert")).to_contain_text("not one of the server's")
        dialog.get_by_label("API key").fill(KEY)
        visit.page.keyboard.press("Enter")
        expect(dialog).to_have_count(0)
        visit.ask("hi")
        stored = "() => [sessionStorage, localStorage].map((store) => JSON.stringify(store))"
        in_session, kept = visit.page.evaluate(stored)
        assert KEY in in_session
        assert KEY not in kept
        assert all(KEY not in one.url for one in visit.watched.requests)
        visit.page.reload()
        expect(visit.messages).to_have_count(2)
        expect(dialog).to_have_count(0)


@pytest.mark.req("R41", "R15")
def test_a_server_that_is_full_says_so_and_is_asked_again(browser: Browser) -> None:
    with fake_visit(browser, max_num_seqs=1, max_queue=1) as (server, visit):
        visit.open()
        expect(visit.page.get_by_label("Model")).to_have_value("fake")
        alert = visit.page.get_by_role("alert")
        with held(server) as hold, Wire(server.port) as first, Wire(server.port) as second:
            first.send(chat_request())
            hold.wait()
            second.send(chat_request())
            wait_for_inbox(server)
            hold.step()
            visit.send("hi")
            wait_for_inbox(server)
            hold.step()  # it looks into its inbox
            hold.step()  # it tells what it found there
            expect(alert).to_contain_text("busy with others")
        server.wait_until_idle()  # it has noticed that the others left
        with visit.answered():
            visit.page.get_by_role("button", name="Try again").click()
        expect(alert).to_have_count(0)
        assert len(visit.said()) == 2


def test_a_conversation_that_outgrows_the_context(browser: Browser) -> None:
    with fake_visit(browser, max_context=256) as (_, visit):
        visit.open(max_tokens=8)
        visit.ask("short")
        visit.send("long " * 100)
        expect(visit.page.get_by_role("alert")).to_contain_text("outgrown the model's context")
        visit.start_new()
        visit.ask("short again")


def test_21_10_the_context_meter_of_a_conversation_that_has_outgrown_it(browser: Browser) -> None:
    with fake_visit(browser, max_context=256) as (_, visit):
        visit.open(max_tokens=8)
        visit.ask("short")
        visit.send("long " * 100)
        expect(visit.page.get_by_role("alert")).to_contain_text("outgrown the model's context")
        gauge = visit.page.locator(".gauge")
        expect(gauge).to_have_text(re.compile(r"^\s*5\d\d of 256 tokens of context\s*$"))
        expect(gauge).to_have_class("gauge hint over")
        expect(gauge.get_by_label("Context used")).to_have_js_property("value", 256)  # it is full
        visit.act(visit.questions.last, "Edit and ask again")
        visit.page.get_by_label("Your question").fill("shorter")
        with visit.answered():
            visit.page.keyboard.press("Control+Enter")
        expect(gauge).to_have_text(f"{visit.last_stats()['total']} of 256 tokens of context")


def test_a_page_that_dies_before_the_first_word_leaves_nothing_behind(browser: Browser) -> None:
    with fake_visit(browser) as (server, visit):
        visit.open(max_tokens=8)
        visit.ask("one")
        with held(server) as hold:
            visit.send("two")
            hold.wait()
            until(lambda: "session" in visit.leaf())
            name = visit.leaf()["session"]
            visit.watched.expected = ("",)
            visit.page.goto("about:blank")  # no time to say good-bye
            visit.page.goto(visit.watched.origin)
        visit.watched.problems.clear()
        visit.conversations.first.locator("a").click()
        alert = visit.page.get_by_role("alert")
        expect(alert).to_contain_text("left before the answer began")
        with visit.answered():
            visit.page.get_by_role("button", name="Try again").click()
        assert len(visit.said()) == 4
        assert name not in visit.current()["sessions"]
        (session,) = visit.current()["sessions"]
        turns = server.get(f"/v1/sessions/{session}/turns", key=None).json()["data"]
        assert [message["content"] for turn in turns for message in turn["messages"]] == visit.said()


def test_a_key_that_can_not_be_sent_does_not_lock_the_page(browser: Browser) -> None:
    with fake_visit(browser, WITH_KEY) as (_, visit):
        visit.open()
        dialog = visit.page.get_by_role("dialog")
        dialog.get_by_label("API key").fill("schlüssel☃")
        visit.page.keyboard.press("Enter")
        expect(dialog.get_by_role("alert")).to_contain_text("not one of the server's")
        visit.page.reload()
        dialog.get_by_label("API key").fill(KEY)
        visit.page.keyboard.press("Enter")
        expect(dialog).to_have_count(0)
        visit.page.get_by_role("button", name="Forget the key").click()
        expect(dialog).to_be_visible()


def test_a_model_that_is_gone_is_replaced(browser: Browser) -> None:
    with fake_visit(browser) as (_, visit):
        visit.context.add_init_script("localStorage['tokenmill.defaults'] = '{\"model\": \"old\"}'")
        visit.open()
        visit.ask("hi")
        expect(visit.page.get_by_role("alert")).to_have_count(0)
