"""Other questions and other answers: branches of a conversation, forks of a session."""

from __future__ import annotations

from itertools import cycle

import pytest
from playwright.sync_api import expect

from tests.server.serving import Child, request
from tests.server.wire import until
from tests.web.browsing import LONG, Visit

JAPAN, ITALY, SPAIN = "What is the capital of Japan?", "And of Italy?", "And of Spain?"


def num_turns(server: Child, session: str) -> int:
    return int(request(server.port, "GET", f"/v1/sessions/{session}").json()["num_turns"])


@pytest.mark.req("R41", "G6")
def test_an_edited_question_is_a_fork_that_reuses_what_came_before(visit: Visit, server: Child) -> None:
    visit.open()
    visit.ask(JAPAN)
    visit.ask(ITALY)
    old = visit.said()
    visit.act(visit.questions.last, "Edit and ask again")
    visit.page.get_by_label("Your question").fill(SPAIN)
    with visit.answered():
        visit.page.get_by_role("button", name="Send", exact=True).first.click()
    new = visit.said()
    assert new[:3] == [*old[:2], SPAIN]
    assert new[3] != old[3]
    assert visit.last_stats()["cached"] > 40, "the first turn was not computed again"
    first, second = visit.current()["sessions"]
    assert visit.watched.bodies("/fork") == [{"at_turn": 2}]
    assert visit.watched.bodies("/generate")[-1]["input"] == SPAIN
    assert num_turns(server, first) == num_turns(server, second) == 4


@pytest.mark.req("R41")
def test_arrows_switch_between_branches_which_go_on_where_they_were(visit: Visit) -> None:
    visit.open()
    visit.ask(JAPAN)
    visit.ask(ITALY)
    old = visit.said()
    visit.act(visit.questions.first, "Edit and ask again")
    visit.page.get_by_label("Your question").fill("What is the capital of Peru?")
    with visit.answered():
        visit.page.keyboard.press("Control+Enter")
    expect(visit.messages).to_have_count(2)
    expect(visit.questions.first.locator(".branches")).to_contain_text("2/2")
    visit.act(visit.questions.first, "Previous branch")
    expect(visit.messages).to_have_count(4)
    assert visit.said() == old
    sessions = len(visit.current()["sessions"])
    visit.ask(SPAIN)
    assert len(visit.current()["sessions"]) == sessions, "the branch has a session of its own already"
    assert visit.last_stats()["cached"] > 60
    visit.act(visit.questions.first, "Next branch")
    expect(visit.messages).to_have_count(2)
    visit.page.reload()
    expect(visit.messages).to_have_count(2)


@pytest.mark.req("R41", "G6")
def test_another_answer_stands_beside_the_first(visit: Visit) -> None:
    visit.open(temperature=1.5, max_tokens=12)
    visit.ask("Say something surprising.")
    first = visit.said()[-1]
    with visit.answered():
        visit.act(visit.answers.last, "Another answer")
    expect(visit.answers.last.locator(".branches")).to_contain_text("2/2")
    second = visit.said()[-1]
    assert second != first
    stats = visit.last_stats()
    assert stats["cached"] == stats["prompt"] - 1, "the question was not computed again"
    assert "input" not in visit.watched.bodies("/generate")[-1]
    visit.act(visit.answers.last, "Previous branch")
    expect(visit.answers.last.locator(".branches")).to_contain_text("1/2")
    assert visit.said()[-1] == first
    visit.ask("Why?")
    assert visit.said()[1] == first
    assert visit.last_stats()["cached"] >= stats["prompt"]


def test_an_edited_answer_is_what_the_model_is_told(visit: Visit) -> None:
    visit.open()
    visit.ask(JAPAN)
    visit.act(visit.answers.last, "Edit the answer")
    visit.page.get_by_label("The answer").fill("The capital of Japan is Kyoto.")
    visit.page.get_by_role("button", name="Save", exact=True).click()
    expect(visit.answers.last).to_contain_text("Kyoto")
    visit.ask("Which city did you name?")
    told = visit.watched.bodies("/v1/sessions")[-1]["messages"]
    assert told == [
        {"role": "user", "content": JAPAN},
        {"role": "assistant", "content": "The capital of Japan is Kyoto."},
    ]


def num_context(server: Child, *messages: str) -> int:
    """Tokens of a conversation, as the server counts them."""
    said = [{"role": role, "content": text} for role, text in zip(cycle(("user", "assistant")), messages, strict=False)]
    body = {"model": "smollm2-135m", "messages": said, "add_generation_prompt": False}
    return int(request(server.port, "POST", "/tokenize", body).json()["count"])


def test_21_10_the_context_meter_follows_the_branch_that_is_shown(visit: Visit, server: Child) -> None:
    visit.open()
    gauge = visit.page.locator(".gauge")
    visit.ask(JAPAN)
    whole = visit.last_stats()["total"]
    expect(gauge).to_have_text(f"{whole} of 2,048 tokens of context")
    visit.act(visit.answers.last, "Edit the answer")
    visit.page.get_by_label("The answer").fill("Kyoto, " * 100)
    visit.page.get_by_role("button", name="Save", exact=True).click()
    expect(visit.answers.last).to_contain_text("Edited by you.")
    edited = num_context(server, JAPAN, "Kyoto, " * 100)
    assert edited > 200
    expect(gauge).to_have_text(f"{edited} of 2,048 tokens of context")
    expect(gauge.get_by_label("Context used")).to_have_js_property("value", edited)
    visit.page.reload()
    expect(gauge).to_have_text(f"{edited} of 2,048 tokens of context")
    visit.act(visit.answers.last, "Previous branch")
    first = num_context(server, *visit.said())
    assert abs(first - whole) <= 2, "but for the end of the answer, and what begins the next one"
    expect(gauge).to_have_text(f"{first} of 2,048 tokens of context")
    visit.page.get_by_label("Settings").click()
    visit.page.get_by_label("System prompt").fill("You are a parrot. " * 20)
    visit.page.get_by_role("button", name="Save").click()
    expect(gauge).not_to_have_text(f"{first} of 2,048 tokens of context")
    told = [{"role": "system", "content": "You are a parrot. " * 20}]
    told += [{"role": role, "content": text} for role, text in visit.stored_path()]
    body = {"messages": told, "add_generation_prompt": False}
    count = request(server.port, "POST", "/tokenize", body).json()["count"]
    expect(gauge).to_have_text(f"{count} of 2,048 tokens of context")


@pytest.mark.req("R41")
def test_a_fork_is_a_conversation_of_its_own(visit: Visit, server: Child) -> None:
    visit.open()
    visit.ask(JAPAN)
    visit.ask(ITALY)
    before = visit.said()
    (source,) = visit.current()["sessions"]
    visit.act(visit.answers.first, "Fork to a new conversation")
    expect(visit.conversations).to_have_count(2)
    expect(visit.messages).to_have_count(2)
    visit.ask(SPAIN)
    assert visit.said()[:2] == before[:2]
    assert visit.last_stats()["cached"] > 40
    (copy,) = visit.current()["sessions"]
    assert copy != source
    assert num_turns(server, source) == num_turns(server, copy) == 4


def same_as_server(visit: Visit, server: Child) -> None:
    """What the page thinks that its sessions have taken in is what they have."""
    conversation = visit.current()
    for session, record in conversation["sessions"].items():
        turns = request(server.port, "GET", f"/v1/sessions/{session}/turns").json()["data"]
        there = [[one["content"] for one in turn["messages"] if one["role"] != "system"] for turn in turns]
        assert there == [[conversation["messages"][name]["content"] for name in turn] for turn in record["turns"]]


@pytest.mark.req("R41", "G6")
def test_a_lost_session_does_not_lead_astray(visit: Visit, server: Child) -> None:
    """Another answer, more questions and edits after the server has lost everything."""
    visit.open(max_tokens=8)
    visit.ask(JAPAN)
    for session in visit.current()["sessions"]:
        request(server.port, "DELETE", f"/v1/sessions/{session}")
    with visit.answered():
        visit.act(visit.answers.last, "Another answer")
    expect(visit.answers.last.locator(".branches")).to_contain_text("2/2")
    same_as_server(visit, server)
    visit.ask(ITALY)
    visit.act(visit.questions.last, "Edit and ask again")
    visit.page.get_by_label("Your question").fill(SPAIN)
    with visit.answered():
        visit.page.keyboard.press("Control+Enter")
    with visit.answered():
        visit.act(visit.answers.last, "Another answer")
    expect(visit.answers.last.locator(".branches")).to_contain_text("2/2")
    same_as_server(visit, server)
    assert len(visit.said()) == 4


def test_an_answer_goes_on_only_where_that_makes_sense(visit: Visit, server: Child) -> None:
    visit.open(max_tokens=4)
    visit.ask(JAPAN)
    more = visit.page.get_by_role("button", name="Continue", exact=True)
    expect(more).to_have_count(1)
    before = visit.said()[-1]
    more.click()
    until(lambda: visit.said()[-1] != before)
    visit.wait_for_answer()
    assert visit.said()[-1].startswith(before)
    same_as_server(visit, server)
    visit.ask(ITALY)
    expect(visit.answers.first.get_by_role("button", name="Continue", exact=True)).to_have_count(0)  # it was built upon
    (session,) = visit.current()["sessions"]
    request(server.port, "DELETE", f"/v1/sessions/{session}")
    before = visit.said()[-1]
    more.click()
    expect(visit.page.get_by_role("alert")).to_contain_text("does not have this answer any more")
    assert visit.said()[-1] == before
    expect(more).to_have_count(0)


def test_settings_that_are_changed_meanwhile_leave_the_answer_alone(visit: Visit, server: Child) -> None:
    visit.open(max_tokens=400)
    visit.send(LONG)
    visit.wait_for_words(4)
    visit.page.get_by_label("Settings").click()
    visit.page.get_by_label("System prompt").fill("Be brief.")
    visit.page.get_by_role("button", name="Save").click()
    visit.wait_for_answer()
    assert visit.last_stats()["completion"] == 400
    visit.ask(JAPAN)
    made = visit.watched.bodies("/v1/sessions")[-1]
    assert made["system"] == "Be brief."
    assert [one["role"] for one in made["messages"]] == ["user", "assistant"]
    same_as_server(visit, server)


def test_typed_text_survives_the_end_of_an_answer(visit: Visit) -> None:
    visit.open(max_tokens=400)
    visit.send(LONG)
    visit.wait_for_words()
    visit.page.get_by_label("Settings").click()
    system = visit.page.get_by_label("System prompt")
    system.fill("Be brief.")
    visit.wait_for_answer()
    expect(system).to_have_value("Be brief.")
    visit.page.get_by_label("For new conversations, too").check()
    expect(system).to_have_value("Be brief.")
    visit.page.get_by_role("button", name="Save").click()
    visit.act(visit.questions.first, "Edit and ask again")
    question = visit.page.get_by_label("Your question")
    question.fill(SPAIN)
    visit.ask(JAPAN)
    expect(question).to_have_value(SPAIN)


HAS_FOCUS_AT_ONCE = """() => {
    window.hadFocus = null;
    new MutationObserver(() => {
        const field = document.querySelector("[aria-label='Your question']");
        if (field) window.hadFocus ??= field === document.activeElement;
    }).observe(document.body, { childList: true, subtree: true });
}"""


def test_an_editor_is_focused_as_soon_as_it_is_there(visit: Visit) -> None:
    """What moved the caret later would tear apart what was typed meanwhile."""
    visit.open(max_tokens=1)
    visit.ask(JAPAN)
    visit.page.evaluate(HAS_FOCUS_AT_ONCE)
    visit.act(visit.questions.last, "Edit and ask again")
    expect(visit.page.get_by_label("Your question")).to_be_focused()
    assert visit.page.evaluate("window.hadFocus") is True


def test_two_tabs_that_answer_at_once_lose_nothing(visit: Visit) -> None:
    visit.open(max_tokens=1000)  # stopped when the other tab has asked
    visit.ask("hi")
    other = Visit(visit.context, visit.watched)
    other.page.goto(visit.page.url)
    expect(other.messages).to_have_count(2)
    visit.page.bring_to_front()
    visit.send(LONG)
    visit.wait_for_words(4)
    other.page.bring_to_front()
    other.send("What is this?")
    expect(other.page.get_by_role("alert")).to_contain_text("Another tab is at work")
    visit.page.bring_to_front()
    visit.page.keyboard.press("Escape")
    visit.wait_for_answer()
    texts = {message["content"] for message in visit.current()["messages"].values()}
    assert {"hi", LONG, "What is this?"} <= texts
