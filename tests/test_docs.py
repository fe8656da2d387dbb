"""The rule is cited by the numbers that docs/rule.md gives its sections."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
SECTIONS = re.findall(r"^## S(\d+) ", (ROOT / "docs" / "rule.md").read_text(), re.MULTILINE)
SOURCES = {
    path.relative_to(ROOT).as_posix(): path.read_text()
    for folder in ("hf_dlion", "tests")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in (".py", ".c")
}


def test_the_rule_has_twelve_sections_in_order():
    assert SECTIONS == [str(number) for number in range(1, 13)]


def test_every_cited_section_of_the_rule_exists():
    for name, text in SOURCES.items():
        for citation in re.findall(r"\brule (S\d+(?:(?:, | to | and )S\d+)*)", text):
            assert set(re.findall(r"S(\d+)", citation)) <= set(SECTIONS), f"{name}: {citation}"


def test_nothing_cites_a_page_that_is_not_in_the_repository():
    cited = re.compile(r"\bdesign(?: section|,)?[ ]S?\d")
    assert [name for name, text in SOURCES.items() if cited.search(text)] == []
