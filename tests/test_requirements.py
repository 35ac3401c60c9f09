from tests.requirements import delivered, known, problems


def test_the_table_is_read_from_the_docs() -> None:
    requirements = known()
    assert len(requirements) == 80
    assert requirements["R14"].startswith("a token budget per tick")
    assert set(delivered()) <= set(requirements)


def test_a_delivered_requirement_without_a_test_is_a_problem() -> None:
    texts = {"R1": "one", "R2": "two"}
    assert problems(texts, ["R1"], {"R1": ["tests/a.py::test_a"]}) == []
    assert problems(texts, ["R1", "R2"], {"R1": ["tests/a.py::test_a"]}) == ["R2 is delivered, but no test proves it"]
    assert problems(texts, ["R3"], {}) == [
        "R3 is in delivered.txt, but is no requirement",
        "R3 is delivered, but no test proves it",
    ]
    assert problems(texts, [], {"G9": ["tests/a.py::test_a"]}) == [
        "G9 is marked in tests/a.py::test_a, but is no requirement"
    ]
