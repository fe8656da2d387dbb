"""What the README and the pages say about options, files, commands and code is so."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainingArguments

import hf_dlion
from hf_dlion import DistributedLion
from tests.support.spawn import RankPools

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
DOCS = ROOT / "docs"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(DOCS.rglob("*.md"))]
PARAMETERS = inspect.signature(DistributedLion).parameters
DEFAULTS = {name: p.default for name, p in PARAMETERS.items() if name != "params"}


def identity(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path, language: str) -> list[str]:
    """The code blocks of a page."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """What GitHub calls the headings of a page in links."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_readme_is_short_enough_to_be_read_to_the_end():
    assert len(README.splitlines()) <= 250


def test_every_option_is_in_the_table_with_its_default():
    table = (DOCS / "options.md").read_text().split("| option |")[1].split("\n\n")[0]
    rows = re.findall(r"^\| `(\w+)` \|[^|]*\| `([^|]*)` \|", table, re.MULTILINE)
    assert {name: eval(default) for name, default in rows} == DEFAULTS


def test_the_optimizer_describes_every_argument():
    told = inspect.getdoc(DistributedLion).split("\nArgs:\n")[1].split("\n\n")[0]
    assert re.findall(r"^    (\w+): ", told, re.MULTILINE) == list(PARAMETERS)


def test_the_main_options_of_the_readme_have_their_defaults():
    table = README.split("| option |")[1].split("\n\n")[0]
    rows = re.findall(r"^\| `(\w+)` \| `([^|]*)` \|", table, re.MULTILINE)
    assert len(rows) == len(table.splitlines()) - 2  # the heading and the rule below it
    for name, default in rows:
        assert eval(default) == DEFAULTS[name], name


@pytest.mark.parametrize("page", PAGES, ids=identity)
def test_every_linked_file_and_heading_exists(page: Path) -> None:
    links = [link for link in re.findall(r"\]\(([^)]+)\)", page.read_text()) if "://" not in link]
    for link in links:
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_the_map_of_the_code_names_every_module():
    table = (DOCS / "how_it_is_built.md").read_text().split("## The map")[1].split("\n## ")[0]
    named = set(re.findall(r"\(\.\./hf_dlion/([\w./]+)\)", table))
    package = ROOT / "hf_dlion"
    modules = {path.name for path in package.glob("*.py") if not path.name.startswith("__")}
    folders = {path.parent.name for path in package.glob("*/__init__.py")}
    assert modules | folders <= named


def test_the_reference_describes_every_public_name():
    pages = "\n".join(page.read_text() for page in (DOCS / "api").glob("*.md"))
    described = set(re.findall(r"^::: hf_dlion\.(\w+)$", pages, re.MULTILINE))
    assert described == set(hf_dlion.__all__) - {"__version__"} | {"launch"}


def test_the_menu_leads_to_every_page():
    menu = (ROOT / "mkdocs.yml").read_text().split("\nnav:\n")[1].split("\n\n")[0]
    listed = re.findall(r": ([\w/]+\.md)$", menu, re.MULTILINE)
    assert sorted(listed) == sorted(
        page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")
    )


def test_continuous_integration_runs_the_test_command_of_the_readme():
    script = (ROOT / ".ci" / "run").read_text()
    pattern = re.search(r"test_command=\$\(grep -E '(.+)' README\.md\)", script)
    assert pattern is not None
    commands = [line for line in README.splitlines() if re.search(pattern[1], line)]
    assert len(commands) == 1
    assert commands[0].startswith("python3 -m venv .venv && ")
    assert 'bash -euo pipefail -c "$test_command"' in script


def test_continuous_integration_clones_into_the_default_folder_name():
    script = (ROOT / ".ci" / "run").read_text()
    assert re.search(r'^clone="\$work/[^"]* [^"]*/hf_dlion"$', script, re.MULTILINE)


def test_continuous_integration_counts_the_warnings_of_the_pages():
    script = (ROOT / ".ci" / "run").read_text()
    build = re.search(r"mkdocs build (.*)$", script, re.MULTILINE)
    assert build is not None
    assert "--strict" in build[1]
    assert "--quiet" not in build[1]


def called(node: ast.Call) -> str:
    """The last name of what is called: `c` of `a.b.c(...)`."""
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


@pytest.mark.parametrize("page", PAGES, ids=identity)
def test_python_on_a_page_compiles_and_names_options_that_exist(page: Path) -> None:
    for code in blocks(page, "python"):
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.Call) and called(node) == "DistributedLion":
                assert {keyword.arg for keyword in node.keywords} <= set(PARAMETERS)
        for text in re.findall(r'\boptim_args ?= ?"([^"]*)"', code):
            hf_dlion.register()
            TrainingArguments("unused", optim="dlion", optim_args=text, use_cpu=True)


# The first words of a command, and the module that has its options.
COMMANDS = {
    "hf-dlion": "hf_dlion.cli",
    "python -m benchmarks.convergence": "benchmarks.convergence.cli",
    **{
        f"python benchmarks/{name}.py": f"benchmarks.{name}"
        for name in ("codec", "plot", "step_time")
    },
}


@pytest.mark.parametrize("page", PAGES, ids=identity)
def test_the_commands_of_a_page_are_those_that_the_tools_take(page: Path) -> None:
    for line in "\n".join(blocks(page, "bash")).splitlines():
        for start, module in COMMANDS.items():
            if line.startswith(f"{start} "):
                words = shlex.split(line.removeprefix(start).partition("$")[0], comments=True)
                importlib.import_module(module)._parser().parse_args(words)


def save_and_load(rank: int, world_size: int, folder: str, every: int) -> tuple[Any, ...]:
    """Trains, and calls the functions of the page of checkpoints as a rank would."""
    code, end = blocks(DOCS / "guides" / "checkpoints.md", "python")
    names: dict[str, Any] = {}
    exec(code, names)

    def trained(steps: int) -> tuple[torch.nn.Linear, DistributedLion]:
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 2)
        optimizer = DistributedLion(model.named_parameters(), lr=0.1, vote_every=every)
        for step in range(steps):
            model(torch.full((1, 3), (1.0 + step) * (1 - 3 * rank))).sum().backward()
            optimizer.step()
        return model, optimizer

    found = []
    for steps, call in ((2, "save"), (0, "load")):
        model, optimizer = trained(steps)
        names[call](model, optimizer, folder)
        momentum = optimizer.state_dict()["state"][0]["exp_avg"]
        found.append((optimizer.steps, model.weight.tolist(), momentum.tolist()))
    exec(end, {"optimizer": optimizer})
    return *found, model.weight.tolist()


@pytest.mark.multiproc
@pytest.mark.parametrize("every", [1, 3])
def test_the_page_of_checkpoints_saves_and_goes_on(
    pools: RankPools, tmp_path: Path, every: int
) -> None:
    ranks = pools(2).run(save_and_load, str(tmp_path), every)
    (first, loaded, end), (second, again, other_end) = ranks
    assert (first, second, end) == (loaded, again, other_end)
    assert (first[1] == second[1]) == (every == 1)
    assert first[2] != second[2]  # Each rank has a momentum of its own.
