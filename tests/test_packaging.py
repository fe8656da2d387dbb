"""What is built from the repository installs and runs, and what it says of itself is so."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import pytest
import yaml

import hf_dlion

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CITATION = yaml.safe_load((ROOT / "CITATION.cff").read_text())


def test_the_version_is_the_same_everywhere():
    assert PROJECT["version"] == CITATION["version"] == hf_dlion.__version__


def test_the_page_of_versions_names_the_oldest_of_each_package() -> None:
    page = (ROOT / "docs" / "install.md").read_text().split("\n## Versions\n")[1]
    table = re.findall(r"^\| .*", page, re.M)
    for bound in (*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["examples"]):
        assert any(bound.replace(">=", " ") in row for row in table), bound
    assert f"Python {PROJECT['requires-python'].removeprefix('>=')}," in table[2]


def test_the_citation_has_what_its_format_demands_and_the_papers_of_the_pages():
    assert CITATION["cff-version"] == "1.2.0"
    for cited in (CITATION, *CITATION["references"]):
        assert {"title", "authors"} <= cited.keys()
    cited = {reference["url"] for reference in CITATION["references"]}
    assert cited == set(re.findall(r"https://arxiv\S+\d", (ROOT / "docs" / "index.md").read_text()))


def test_the_command_that_fills_in_the_addresses_finds_all_of_them():
    home, files = re.search(
        r'sed -i "s\|(\S+)\|\$home\|" (.*?) &&', (ROOT / "CONTRIBUTING.md").read_text()
    ).groups()
    found = [(ROOT / file).read_text().count(home) for file in files.split()]
    assert found == [len(PROJECT["urls"]), 1, 1]
    for address in (*PROJECT["urls"].values(), CITATION["repository-code"]):
        assert address.startswith(home)


def test_no_message_tells_to_install_the_package_by_a_name_that_no_index_has():
    for path in sorted((ROOT / "hf_dlion").rglob("*.py")):
        assert not re.findall(r"pip install [^\n]*hf.dlion.*", path.read_text()), path


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A folder with the sdist, and the wheel that was built from it."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=240)
    return folder


@pytest.mark.full
@pytest.mark.slow
def test_the_sdist_has_the_sources_tests_pages_and_examples(built):
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "CITATION.cff", "requirements.txt"} <= names
    for folder in ("hf_dlion", "benchmarks", "tests", "docs", "examples"):
        files = {
            path.relative_to(ROOT).as_posix()
            for path in (ROOT / folder).rglob("*")
            if path.suffix in (".py", ".typed", ".md", ".png", ".sh", ".ipynb")
        }
        assert files
        assert files <= names, files - names


@pytest.mark.full
@pytest.mark.slow
def test_the_wheel_installs_and_its_command_runs(built, tmp_path):
    site = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    wheel = next(built.glob("*.whl"))
    subprocess.run([*pip, "--target", str(site), str(wheel)], check=True, timeout=120)
    # Before the repository's own copy, if that is installed.
    env = {**os.environ, "PYTHONPATH": str(site)}

    def said(*command: str | Path) -> str:
        done = subprocess.run(
            command, cwd=tmp_path, env=env, capture_output=True, text=True, check=True, timeout=120
        )
        return done.stdout

    where = said(sys.executable, "-c", "import hf_dlion; print(hf_dlion.__file__)")
    assert where.strip() == str(site / "hf_dlion" / "__init__.py")
    assert said(site / "bin" / "hf-dlion", "--help").startswith("usage: hf-dlion ")
    shipped = {path.relative_to(site).as_posix() for path in (site / "hf_dlion").rglob("*.*")}
    sources = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "hf_dlion").rglob("*")
        if path.suffix in (".py", ".typed")
    }
    assert sources <= shipped
    assert not any(name.startswith(("benchmarks", "tests", "docs")) for name in os.listdir(site))
