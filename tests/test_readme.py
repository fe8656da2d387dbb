"""What the README says about options, files and commands is so."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path

import torch

from hf_dlion import DistributedLion, Options

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_every_option_is_in_the_table_with_its_default():
    table = README.split("| option |")[1].split("\n\n")[0]
    rows = re.findall(r"^\| `(\w+)` \|[^|]*\| `([^|]*)` \|", table, re.MULTILINE)
    parameters = inspect.signature(DistributedLion).parameters
    declared = {name: p.default for name, p in parameters.items() if name != "params"}
    assert {name: eval(default, {"torch": torch}) for name, default in rows} == declared
    fields = {field.name for field in dataclasses.fields(Options)}
    assert {name for name, _ in rows} == fields | {"lr", "betas", "weight_decay", "process_group"}


def test_every_linked_file_exists():
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", README) if "://" not in link]
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_the_map_of_the_code_names_every_module():
    table = README.split("## The code")[1].split("\n## ")[0]
    named = set(re.findall(r"\(hf_dlion/([\w./]+)\)", table))
    package = ROOT / "hf_dlion"
    modules = {path.name for path in package.glob("*.py")} - {"__init__.py", "warn_once.py"}
    folders = {path.parent.name for path in package.glob("*/__init__.py")}
    assert (modules | folders) - named == set()


def test_every_linked_heading_exists():
    headings = re.findall(r"^#+ (.*)$", README, re.MULTILINE)
    anchors = {heading.lower().replace(" ", "-") for heading in headings}
    assert set(re.findall(r"\]\(#([^)]+)\)", README)) <= anchors


def test_continuous_integration_installs_and_tests_as_the_readme_does():
    script = (ROOT / ".ci" / "run").read_text()
    install = re.search(r'pip install (-c requirements\.txt -e "\.\[)test\]" && \S+pytest', README)
    assert install is not None
    assert install[1] in script
    assert re.search(r"^\"\$venv/bin/pytest\"$", script, re.MULTILINE)
