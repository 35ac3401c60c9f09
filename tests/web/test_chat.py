"""Questions and answers on the page, with the default model in a real server."""

from __future__ import annotations

import pytest
from playwright.sync_api import Browser, Route, expect

from tests.server.serving import Child, request
from tests.server.wire import until
from tests.web.browsing import LONG, WAIT_MS, Visit, visiting

CAPITAL = "What is the capital of Japan?"
ALSO_LONG = "Write a long story about a ship and its captain."


def in_use(server: Child) -> list[str]:
    """What the engine's slots are doing."""
    cores = request(server.port, "GET", "/v1/scheduler").json()["models"][0]["cores"]
    return [slot["state"] for slot in cores[0]["slots"] if slot["state"] != "idle"]


@pytest.mark.req("R41")
def test_a_question_is_answered_and_shown_as_it_grows(visit: Visit, server: Child) -> None:
    visit.open(max_tokens=160)
    visit.page.evaluate("""() => {
        window.lengths = new Set();
        new MutationObserver(() => {
            const text = document.querySelector("article.assistant .prose")?.textContent ?? "";
            if (document.querySelector("article[aria-busy=true]")) window.lengths.add(text.length);
        }).observe(document.body, { subtree: true, childList: true, characterData: true });
    }""")
    answer = visit.ask(LONG)
    assert "lighthouse" in answer
    assert "lighthouse" in visit.answers.last.inner_text()
    assert visit.page.evaluate("() => window.lengths.size") >= 3, "it was not shown as it grew"
    body = {"messages": [{"role": "user", "content": LONG}], "temperature": 0, "max_tokens": 160}
    plain = request(server.port, "POST", "/v1/chat/completions", {"model": "smollm2-135m", **body}).json()
    assert answer == plain["choices"][0]["message"]["content"]


@pytest.mark.req("R41")
def test_a_question_sent_before_the_server_has_said_that_it_is_ready_is_not_lost(visit: Visit) -> None:
    held: list[Route] = []
    visit.page.route("**/v1/models", lambda route: held.append(route))
    visit.open()
    visit.send(CAPITAL)
    expect(visit.field).to_have_value(CAPITAL)
    assert held, "the page asks for the models when it is opened"
    held[0].continue_()
    expect(visit.answers).to_have_count(1)
    visit.wait_for_answer()
    assert visit.said()[0] == CAPITAL
    expect(visit.field).to_have_value("")


@pytest.mark.req("R41")
def test_a_question_sent_before_the_page_has_drawn_it_is_not_lost(visit: Visit) -> None:
    visit.open()
    expect(visit.page.get_by_label("Model")).to_have_value("smollm2-135m")
    visit.field.evaluate(
        """(field, text) => {
        field.value = text;
        field.dispatchEvent(new Event("input", { bubbles: true }));
        field.dispatchEvent(new KeyboardEvent("keydown", { key: "Enter", bubbles: true }));
    }""",
        CAPITAL,
    )
    expect(visit.answers).to_have_count(1)
    visit.wait_for_answer()
    assert visit.said()[0] == CAPITAL
    expect(visit.field).to_have_value("")


@pytest.mark.req("R41", "R35", "R7")
def test_the_stop_button_ends_the_answer_at_the_engine(visit: Visit, server: Child) -> None:
    visit.open(max_tokens=1000)
    visit.send(LONG)
    visit.wait_for_words(8)
    assert in_use(server) == ["generating"]
    visit.page.get_by_label("Stop the answer").click()
    visit.wait_for_answer()
    until(lambda: in_use(server) == [])  # the engine catches up with the page
    expect(visit.answers.last).to_contain_text("Stopped.")
    said = visit.said()[-1]
    session = next(iter(visit.current()["sessions"]))
    turns = request(server.port, "GET", f"/v1/sessions/{session}/turns").json()["data"]
    assert turns[-1]["messages"][-1]["content"] == said, "the page and the server know the same"
    visit.act(visit.answers.last, "Continue")
    visit.wait_for_words(len(said) + 8)
    visit.page.keyboard.press("Escape")
    visit.wait_for_answer()
    assert visit.said()[-1].startswith(said)


@pytest.mark.req("R41", "R2", "R4")
def test_a_new_turn_sends_only_what_is_new_and_says_what_was_reused(visit: Visit, server: Child) -> None:
    visit.open()
    visit.ask(CAPITAL)
    visit.ask("And of Italy?")
    visit.ask("And of Spain?")
    sent = visit.watched.bodies("/generate")
    assert [body["input"] for body in sent] == [CAPITAL, "And of Italy?", "And of Spain?"]
    assert len(visit.watched.bodies("/v1/sessions")) == 1
    (session,) = visit.current()["sessions"]
    turns = request(server.port, "GET", f"/v1/requests/{session}/timeline").json()["generations"]
    shown = [
        (int(one.get_attribute("data-cached") or 0), int(one.get_attribute("data-prompt") or 0))
        for one in visit.page.locator(".reused").all()
    ]
    assert shown == [(turn["cached_tokens"], turn["prompt_tokens"]) for turn in turns]
    assert all(cached > 30 for cached, _ in shown[1:])


@pytest.mark.req("R41", "R36")
def test_two_conversations_stream_at_once_and_do_not_mix(visit: Visit, server: Child) -> None:
    visit.open(max_tokens=800)
    visit.send(LONG)
    visit.wait_for_words()
    visit.page.get_by_role("button", name="New conversation", exact=True).click()
    expect(visit.messages).to_have_count(0)
    visit.send(ALSO_LONG)
    until(lambda: in_use(server) == ["generating"] * 2)
    visit.wait_for_words()
    visit.wait_for_answer()
    expect(visit.page.locator(".conversations .busy")).to_have_count(0)
    for conversation, question in zip(visit.stored(), (ALSO_LONG, LONG), strict=True):
        asked, answer = (message["content"] for message in conversation["messages"].values())
        assert asked == question
        body = {"messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": 800}
        plain = request(server.port, "POST", "/v1/chat/completions", {"model": "smollm2-135m", **body}).json()
        assert answer == plain["choices"][0]["message"]["content"]


@pytest.mark.req("R41")
def test_a_reload_keeps_everything(visit: Visit) -> None:
    visit.open()
    visit.ask(CAPITAL)
    visit.ask("And of Italy?")
    before, shown = visit.stored_path(), visit.page.locator(".messages").inner_text()
    visit.page.reload()
    expect(visit.messages).to_have_count(4)
    assert visit.stored_path() == before
    assert visit.page.locator(".messages").inner_text() == shown
    visit.ask("And of Spain?")
    assert visit.last_stats()["cached"] > 60, "the server's session was found again"


@pytest.mark.req("R41", "G18")
def test_a_reload_in_the_middle_of_an_answer_loses_nothing(visit: Visit, server: Child) -> None:
    visit.open(max_tokens=800)
    visit.send(LONG)
    visit.wait_for_words(20)
    until(lambda: "resume" in visit.leaf())  # it is stored twice a second
    visit.page.reload()
    expect(visit.answers).to_have_count(1)
    visit.wait_for_answer()
    body = {"messages": [{"role": "user", "content": LONG}], "temperature": 0, "max_tokens": 800}
    plain = request(server.port, "POST", "/v1/chat/completions", {"model": "smollm2-135m", **body}).json()
    assert visit.said()[-1] == plain["choices"][0]["message"]["content"]
    assert visit.last_stats()["completion"] == plain["usage"]["completion_tokens"]


@pytest.mark.req("R41")
def test_21_10_settings_show_the_values_of_the_model(visit: Visit, server: Child) -> None:
    visit.open()
    visit.page.get_by_label("Settings").click()
    dialog = visit.page.get_by_role("dialog")
    dialog.get_by_role("button", name="Clear all").click()
    (model,) = request(server.port, "GET", "/v1/models").json()["data"]
    values = model["default_sampling_params"]
    assert (values["temperature"], values["top_p"], values["top_k"]) == (0.2, 0.9, 0), "what its authors recommend"
    expected = {
        "Temperature": "0.2 (default)",
        "Top p": "0.9 (default)",
        "Top k": "all (default)",
        "Min p": "0 (default)",
        "Repetition penalty": "1 (default)",
        "Presence penalty": "0 (default)",
        "Frequency penalty": "0 (default)",
        "Longest answer": "no limit",
        "Seed": "random",
    }
    for label, placeholder in expected.items():
        expect(dialog.get_by_label(label)).to_have_attribute("placeholder", placeholder)
        expect(dialog.get_by_label(label)).to_have_value("")


@pytest.mark.req("R41")
def test_21_10_icons_have_tooltips(visit: Visit) -> None:
    visit.open()
    visit.ask(CAPITAL)
    with visit.answered():
        visit.act(visit.answers.last, "Another answer")
    tooltip = visit.page.get_by_role("tooltip")
    visit.field.hover()  # the pointer may rest on an icon since the click
    expect(tooltip).to_have_count(0)
    icons = visit.page.locator("button:visible, summary:visible").filter(has=visit.page.locator("svg"))
    silent = [one for one in icons.all() if not (one.inner_text().strip() or one.get_attribute("data-tip"))]
    assert silent == []
    for label in ("Copy", "Edit the answer", "Another answer", "Fork to a new conversation", "Previous branch"):
        visit.answers.last.get_by_role("button", name=label, exact=True).hover()
        expect(tooltip).to_have_text(label)
        inside = tooltip.bounding_box()
        size = visit.page.viewport_size
        assert inside
        assert size
        assert inside["x"] >= 0
        assert inside["x"] + inside["width"] <= size["width"]
        assert inside["y"] + inside["height"] <= size["height"]
    visit.page.get_by_label("Settings").hover()
    expect(tooltip).to_have_text("Settings")
    visit.field.hover()
    expect(tooltip).to_have_count(0)
    visit.page.get_by_label("List of conversations").focus()
    visit.page.keyboard.press("Tab")  # past the model
    visit.page.keyboard.press("Tab")
    expect(tooltip).to_have_text("Settings")
    visit.page.keyboard.press("Escape")
    expect(tooltip).to_have_count(0)
    visit.context.grant_permissions(["clipboard-read", "clipboard-write"])
    visit.act(visit.answers.last, "Copy")
    expect(tooltip).to_have_text("Copied")
    expect(tooltip).to_have_text("Copy")
    visit.act(visit.answers.last, "Edit the answer")
    expect(tooltip).to_have_count(0)


def test_settings_belong_to_a_conversation(visit: Visit) -> None:
    visit.open()
    visit.page.get_by_label("Settings").click()
    dialog = visit.page.get_by_role("dialog")
    dialog.get_by_label("System prompt").fill("You are a parrot. Always say: squawk.")
    dialog.get_by_label("Longest answer").fill("7")
    dialog.get_by_label("Temperature").fill("0.5")
    dialog.get_by_label("Stop at").fill("squawk squawk")
    dialog.get_by_role("button", name="Save").click()
    visit.ask("Who are you?")
    (made,), (sent,) = visit.watched.bodies("/v1/sessions"), visit.watched.bodies("/generate")
    assert made["system"] == "You are a parrot. Always say: squawk."
    assert sent == {"input": "Who are you?", "temperature": 0.5, "max_tokens": 7, "stop": ["squawk squawk"]}
    assert visit.last_stats()["completion"] <= 7
    visit.page.get_by_role("button", name="New conversation", exact=True).click()
    visit.ask(CAPITAL)
    assert "system" not in visit.watched.bodies("/v1/sessions")[1]
    assert visit.watched.bodies("/generate")[1]["max_tokens"] == 24


def test_the_context_gauge_says_what_is_used(visit: Visit) -> None:
    visit.open()
    visit.ask(CAPITAL)
    used = visit.last_stats()["total"]
    expect(visit.page.locator(".gauge")).to_contain_text(f"{used} of 2,048 tokens")


def test_the_first_load_is_small(browser: Browser, server: Child) -> None:
    with visiting(browser, f"http://127.0.0.1:{server.port}") as visit:
        visit.open()
        expect(visit.field).to_be_visible()
        sizes = visit.page.evaluate("""() => Object.fromEntries(
            [...performance.getEntriesByType("navigation"), ...performance.getEntriesByType("resource")]
                .map((entry) => [new URL(entry.name).pathname, entry.decodedBodySize]))""")
        assert sum(sizes.values()) < 400_000, sizes
        assert not any("katex" in path or "highlight" in path for path in sizes)
        visit.page.evaluate("""async () => {
            const { blocks } = await import("/web/js/chat/markdown.js");
            blocks("```python\\nx = 1\\n```");
        }""")


def test_whoever_reads_above_stays_there(browser: Browser, server: Child) -> None:
    options = {"viewport": {"width": 900, "height": 420}}
    with visiting(browser, f"http://127.0.0.1:{server.port}", **options) as visit:
        visit.open(max_tokens=300)
        visit.send(LONG)
        top = "() => document.querySelector('.thread').scrollTop"
        until(lambda: visit.page.evaluate(top) > 200, WAIT_MS / 1000)
        visit.page.mouse.move(500, 200)
        visit.page.mouse.wheel(0, -150)
        expect(visit.page.get_by_label("Go to the end")).to_be_visible()
        before = visit.page.evaluate(top)
        visit.wait_for_answer()
        assert abs(visit.page.evaluate(top) - before) <= 150  # the wheel may still have been turning
        visit.page.get_by_label("Go to the end").click()
        expect(visit.page.get_by_label("Go to the end")).to_have_count(0)
