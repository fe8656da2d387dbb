"""What the README and the pages beside it say about options, files and commands is so."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path

import pytest
import torch

from hf_dlion import DistributedLion, Options

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]


def anchors(page: Path) -> set[str]:
    """What GitHub calls the headings of a page in links."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_option_is_in_the_table_with_its_default():
    table = README.split("| option |")[1].split("\n\n")[0]
    rows = re.findall(r"^\| `(\w+)` \|[^|]*\| `([^|]*)` \|", table, re.MULTILINE)
    parameters = inspect.signature(DistributedLion).parameters
    declared = {name: p.default for name, p in parameters.items() if name != "params"}
    assert {name: eval(default, {"torch": torch}) for name, default in rows} == declared
    fields = {field.name for field in dataclasses.fields(Options)}
    assert {name for name, _ in rows} == fields | {"lr", "betas", "weight_decay", "process_group"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_linked_file_and_heading_exists(page: Path) -> None:
    links = [link for link in re.findall(r"\]\(([^)]+)\)", page.read_text()) if "://" not in link]
    assert links
    for link in links:
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_the_map_of_the_code_names_every_module():
    table = README.split("## The code")[1].split("\n## ")[0]
    named = set(re.findall(r"\(hf_dlion/([\w./]+)\)", table))
    package = ROOT / "hf_dlion"
    modules = {path.name for path in package.glob("*.py")} - {"__init__.py"}
    folders = {path.parent.name for path in package.glob("*/__init__.py")}
    assert (modules | folders) - named == set()
    contributing = (ROOT / "CONTRIBUTING.md").read_text().split("## The map")[1].split("\n## ")[0]
    assert (modules | folders) - set(re.findall(r"`([\w.]+)`", contributing)) == set()


def test_continuous_integration_installs_and_tests_as_the_readme_does():
    script = (ROOT / ".ci" / "run").read_text()
    install = re.search(r'pip install (-c requirements\.txt -e "\.\[)test\]" && \S+pytest', README)
    assert install is not None
    assert install[1] in script
    assert re.search(r"^\"\$venv/bin/pytest\"$", script, re.MULTILINE)
