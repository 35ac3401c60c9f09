"""The same page over llama.cpp: what it does with sessions does not depend on the backend."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.llamacpp import needs_llamacpp
from tests.server.serving import Child, child
from tests.web.test_branches import (
    test_an_edited_question_is_a_fork_that_reuses_what_came_before,
    test_another_answer_stands_beside_the_first,
)
from tests.web.test_chat import (
    test_a_new_turn_sends_only_what_is_new_and_says_what_was_reused,
    test_the_stop_button_ends_the_answer_at_the_engine,
)

__all__ = [
    "test_a_new_turn_sends_only_what_is_new_and_says_what_was_reused",
    "test_an_edited_question_is_a_fork_that_reuses_what_came_before",
    "test_another_answer_stands_beside_the_first",
    "test_the_stop_button_ends_the_answer_at_the_engine",
]
pytestmark = needs_llamacpp


@pytest.fixture(scope="module", params=["false", "true"], ids=["streams", "unified"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Child]:
    """`tokenmill serve --backend llamacpp`, with a memory for each conversation and with one for all."""
    options = ("--backend", "llamacpp", "--context", "1024", "--max-num-seqs", "8", "--threads", "1")
    options += ("--extra", f"kv_unified={request.param}")
    with child(tmp_path_factory.mktemp("web") / "log", "smollm2-135m", *options) as one:
        yield one
