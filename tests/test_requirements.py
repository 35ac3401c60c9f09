import re

from tests.requirements import OPEN, ROOT, check_rows, checks, delivered, known, problems


def test_the_table_is_read_from_the_docs() -> None:
    requirements = known()
    assert len(requirements) == 81
    assert requirements["R14"].startswith("a token budget per tick")
    assert set(delivered()) <= set(requirements)


def test_a_delivered_requirement_without_a_test_is_a_problem() -> None:
    proof = {"R1": ["tests/a.py::test_a"]}
    texts = {"R1": "one", "R2": "**open**: two"}
    assert problems(texts, ["R1"], proof) == []
    assert problems({"R1": "one", "R2": "two"}, ["R1", "R2"], proof) == ["R2 is delivered, but no test proves it"]
    assert problems(texts, ["R1", "R3"], proof) == [
        "R3 is in delivered.txt, but is no requirement",
        "R3 is delivered, but no test proves it",
    ]
    assert problems(texts, ["R1"], {**proof, "G9": ["tests/a.py::test_a"]}) == [
        "G9 is marked in tests/a.py::test_a, but is no requirement"
    ]


def test_a_row_says_whether_its_requirement_is_open() -> None:
    proof = {"R1": ["tests/a.py::test_a"]}
    assert problems({"R1": "**open**: one"}, ["R1"], proof) == ["R1 is delivered, but its row says otherwise"]
    assert problems({"R1": "one"}, [], proof) == ["R1 is open, but its row says otherwise"]
    for name, text in known().items():
        assert text.startswith(OPEN) != (name in delivered()), name


def test_the_tests_named_in_the_docs_exist() -> None:
    for page in (ROOT / "docs").glob("*.md"):
        for path, name in re.findall(r"\b(tests/[\w/]+(?:\.py|/))(?:::(\w+))?", page.read_text()):
            assert (ROOT / path).exists(), f"{page.name} names {path}"
            assert not name or f"def {name}(" in (ROOT / path).read_text(), f"{page.name} names {path}::{name}"


def test_every_check_has_one_row_and_a_test() -> None:
    """Which tests, `make docs` writes and test_docs.py compares."""
    rows = check_rows()
    assert len(rows) == len(set(rows))
    assert set(rows) == set(checks())
    for path in (ROOT / "tests" / "server").glob("*.py"):
        assert set(re.findall(r"\b[CEFILMNOPST]\d\d\b", path.read_text())) <= set(rows), path.name


def test_every_regression_that_a_test_cites_is_in_the_table() -> None:
    page = (ROOT / "docs" / "serving-checks.md").read_text()
    cited = {
        number
        for path in (ROOT / "tests").rglob("test_*.py")
        for number in re.findall(r"^(?:async )?def test_21_(\d+)_", path.read_text(), flags=re.MULTILINE)
    }
    assert cited <= set(re.findall(r"^\| (\d+) \|", page, flags=re.MULTILINE))
