"""What the README and the pages say about options, files, commands and code is so."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainingArguments

import hf_dlion
from benchmarks import step_time
from benchmarks.convergence import cli as study
from benchmarks.methods import method_of
from hf_dlion import DistributedLion
from tests.support.spawn import on_ranks, run_script
from tests.support.tiny import WORDS, tiny_llama, tiny_tokenizer
from tests.support.training import is_equal_everywhere

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


@pytest.mark.oldest
@pytest.mark.multiproc
def test_the_quick_start_trains_as_it_stands(tmp_path: Path) -> None:
    """A folder with a small model stands for the one of the hub."""
    code = blocks(ROOT / "README.md", "python")[0]
    name = re.search(r'name = "([^"]+)"', code)
    assert name is not None
    tiny_tokenizer().save_pretrained(tmp_path / name[1])
    tiny_llama().save_pretrained(tmp_path / name[1])
    (tmp_path / "train.py").write_text(code)
    lines = [" ".join(f"w{(7 * row + k) % WORDS}" for k in range(9)) for row in range(80)]
    (tmp_path / "train.txt").write_text("\n".join(lines))
    done = run_script(2, [tmp_path / "train.py"], cwd=tmp_path, env={"HF_HUB_OFFLINE": "1"})
    assert "dlion/wire_mb_per_step" in done.stdout + done.stderr
    assert (tmp_path / "out").is_dir()


def test_pages_and_readme_show_the_same_script_and_commands() -> None:
    assert blocks(DOCS / "quickstart.md", "python")[0] == blocks(ROOT / "README.md", "python")[0]
    shown = blocks(ROOT / "README.md", "bash")
    for command in ("bash examples/finetune_llm.sh", ".venv/bin/pytest"):
        (block,) = [block for block in shown if command in block]
        assert block in blocks(DOCS / "install.md", "bash")


def test_every_option_is_in_the_table_with_its_default():
    table = (DOCS / "options.md").read_text().split("| option |")[1].split("\n\n")[0]
    rows = re.findall(r"^\| `(\w+)` \|[^|]*\| `([^|]*)` \|", table, re.MULTILINE)
    assert {name: eval(default) for name, default in rows} == DEFAULTS


def test_the_optimizer_describes_every_argument():
    told = inspect.getdoc(DistributedLion).split("\nArgs:\n")[1].split("\n\n")[0]
    assert re.findall(r"^    (\w+): ", told, re.MULTILINE) == list(PARAMETERS)


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
# Lets bash expand variables, loops, and quotes. It finds no program, so it prints each command.
PRINTS = """
exec 3>&1
PATH=/nowhere
cd() { :; }
command_not_found_handle() { printf '%s\\x1f' "$@" >&3; printf '\\n' >&3; }
"""


def commands(block: str, folder: Path) -> list[list[str]]:
    """The words of the commands of a code block, in the order in which bash would run them."""
    bash = ["/bin/bash", "-c", PRINTS + block]
    printed = subprocess.run(bash, cwd=folder, capture_output=True, text=True, timeout=60).stdout
    return [line.split("\x1f")[:-1] for line in printed.splitlines()]


@pytest.mark.parametrize("page", PAGES, ids=identity)
def test_the_commands_of_a_page_are_those_that_the_tools_take(page: Path, tmp_path: Path) -> None:
    for words in (words for block in blocks(page, "bash") for words in commands(block, tmp_path)):
        for start, module in COMMANDS.items():
            if f"{' '.join(words)} ".startswith(f"{start} "):
                tool = importlib.import_module(module)
                args = tool._parser().parse_args(words[len(start.split()) :])
                if tool is study:
                    assert study._trials(args)
                elif tool is step_time:
                    assert all(map(method_of, args.methods or ()))


@pytest.mark.parametrize("module", COMMANDS.values())
def test_a_tool_shows_its_help(module: str) -> None:
    # argparse formats it now, and raises on a percent sign that isn't doubled.
    assert importlib.import_module(module)._parser().format_help()


def test_bash_expands_the_commands_of_a_block_without_running_them(tmp_path: Path) -> None:
    block = 'p=\'a -x\'  # Comment.\np="$p b"\nfor k in 1 2; do\n  $p "*k"=$k \\\n  -y > f\ndone\n'
    assert commands(block, tmp_path) == [["a", "-x", "b", f"*k={k}", "-y"] for k in "12"]


@pytest.mark.parametrize("every", [1, 3])
@on_ranks(2)
def test_the_page_of_checkpoints_saves_and_goes_on(rank: int, tmp_path: Path, every: int) -> None:
    """Calls the functions of the page as a training would."""
    (code,) = blocks(DOCS / "guides" / "checkpoints.md", "python")
    names: dict[str, Any] = {}
    exec(code, names)
    found = []
    for steps, call in ((2, "save"), (0, "load")):
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 2)
        optimizer = DistributedLion(model.named_parameters(), lr=0.1, vote_every=every)
        for step in range(steps):
            model(torch.full((1, 3), (1.0 + step) * (1 - 3 * rank))).sum().backward()
            optimizer.step()
        names[call](model, optimizer, tmp_path / "new" / "folder")
        momentum = optimizer.state[model.weight]["exp_avg"]
        found.append((optimizer.steps, model.weight.tolist(), momentum.tolist()))
    assert found[0] == found[1]
    assert is_equal_everywhere(model.weight)  # The save has ended a period.
    assert not is_equal_everywhere(momentum)  # Each rank has a momentum of its own.


@pytest.mark.multiproc
@pytest.mark.slow
@pytest.mark.parametrize(
    ("guide", "said"),
    [("ddp", "step 80: loss"), ("trainer", "train_loss"), ("local_steps", "step 100")],
)
def test_the_first_script_of_a_guide_trains_as_it_is(guide: str, said: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(blocks(DOCS / "guides" / f"{guide}.md", "python")[0])
    done = run_script(2, [str(script)], timeout=120, cwd=tmp_path)
    assert said in done.stdout
    assert "Warning: DDP" not in done.stderr
