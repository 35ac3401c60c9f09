"""Other questions and other answers: branches of a conversation, forks of a session."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from tests.server.serving import Child, request
from tests.web.browsing import Visit

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
    visit.page.get_by_role("button", name="Send", exact=True).first.click()
    visit.wait_for_answer()
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
    visit.page.keyboard.press("Control+Enter")
    visit.wait_for_answer()
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
    visit.act(visit.answers.last, "Another answer")
    expect(visit.answers.last.locator(".branches")).to_contain_text("2/2")
    visit.wait_for_answer()
    second = visit.said()[-1]
    assert second != first
    stats = visit.last_stats()
    assert stats["cached"] == stats["prompt"] - 1, "the question was not computed again"
    assert "input" not in visit.watched.bodies("/generate")[-1]
    visit.act(visit.answers.last, "Previous branch")
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
