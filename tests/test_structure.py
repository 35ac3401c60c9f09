"""Few deep modules: the package's files do not multiply again, and one noun has one meaning."""

from __future__ import annotations

import pytest

from tests.structure import Structure, structure

MOST_FILES = 213
MOST_SMALL = 30


@pytest.fixture(scope="module")
def found() -> Structure:
    return structure()


def test_the_package_has_few_files(found: Structure) -> None:
    assert len(found.files) <= MOST_FILES, "merge what has one importer into it"


def test_few_modules_are_small(found: Structure) -> None:
    assert len(found.small) <= MOST_SMALL, f"merge some of {found.small}"


def test_a_class_name_is_taken_once(found: Structure) -> None:
    assert found.classes == {}


def test_a_module_name_is_taken_once(found: Structure) -> None:
    assert found.basenames == {}
