"""Imports go one way, `import hf_dlion` is cheap, and tests mirror the package."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import hf_dlion

PACKAGE = Path(hf_dlion.__file__).parent

# From what a user chooses to the commands. A module imports from its own row's name and from the
# rows above it.
ROWS = (
    {"options"},
    {"ddp"},
    {"fsdp"},
    {"exchange"},
    {"ranks"},
    {"vote"},
    {"peers"},
    {"optimizer"},
    {"checkpoint"},
    {"accelerate"},
    {"trainer", "launch"},
    {"cli"},
)
ROW_OF = {name: number for number, names in enumerate(ROWS) for name in names}
# Who may import what is not needed for training with torch alone.
OPTIONAL = {
    "transformers": {"trainer", "cli"},
    "accelerate": {"accelerate", "trainer"},
    "rich": {"cli"},
    "triton": {"vote/kernels.py", "exchange/count_kernels.py"},
    **{name: set() for name in ("datasets", "peft", "trl")},
    # These are not installed with the package.
    **{name: set() for name in ("benchmarks", "examples", "tests")},
}

TESTS = Path(__file__).parent
AT_THE_DOOR = {PACKAGE / "__init__.py", PACKAGE / "__main__.py"}
SOURCES = [path for path in sorted(PACKAGE.rglob("*.py")) if path not in AT_THE_DOOR]


def part_of(name: str) -> str:
    """The name that a module of the package has in ROWS: its own, or its folder's."""
    return name.removeprefix("hf_dlion.").split(".")[0]


def module_of(path: Path) -> str:
    """The full name of a file's module."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


def imported(path: Path) -> list[str]:
    """The full names of all modules that a file imports, inside functions too."""
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            assert node.module is not None
            # "from hf_dlion import checkpoint" names the module last.
            whole = node.module == "hf_dlion"
            names += [f"{node.module}.{a.name}" for a in node.names] if whole else [node.module]
    return names


def identity(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def test_every_module_has_its_row():
    assert {part_of(module_of(path)) for path in SOURCES} <= set(ROW_OF)


def test_the_root_shows_at_most_sixteen_names():
    names = [path.name for path in PACKAGE.iterdir() if path.name != "__pycache__"]
    assert len(names) <= 16, sorted(names)


@pytest.mark.parametrize("path", SOURCES, ids=identity)
def test_a_module_imports_only_what_lies_below_it(path):
    own = part_of(module_of(path))
    for name in imported(path):
        if name.startswith("hf_dlion.") and name != "hf_dlion.__version__":
            other = part_of(name)
            assert other == own or ROW_OF[other] < ROW_OF[own], f"{own} imports {name}"


@pytest.mark.parametrize("path", SOURCES, ids=identity)
def test_only_the_integrations_import_optional_packages(path):
    for name in imported(path):
        allowed = OPTIONAL.get(name.split(".")[0])
        assert allowed is None or allowed & {
            path.relative_to(PACKAGE).parts[0].removesuffix(".py"),
            identity(path),
        }, name


def test_importing_the_package_loads_no_optional_package_and_adds_no_hook_to_optimizers():
    # torch itself may load triton.
    program = (
        "import sys, torch, torch.distributed, torch.nn.parallel\n"
        "before = set(sys.modules)\n"
        "import hf_dlion\n"
        "print(*{name.split('.')[0] for name in set(sys.modules) - before})\n"
        "import hf_dlion.ddp\n"
        "from torch.optim.optimizer import _global_optimizer_pre_hooks as hooks\n"
        "assert not hooks"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120
    )
    assert "hf_dlion" in done.stdout.split()
    assert not set(done.stdout.split()) & set(OPTIONAL)


def test_no_test_module_imports_another():
    modules = [path for path in sorted(TESTS.rglob("*.py")) if path.parent.name != "support"]
    assert len(modules) > 15
    for path in modules:
        for name in imported(path):
            assert not name.startswith("tests.") or name.startswith("tests.support"), (path, name)
    for path in sorted((TESTS / "support").glob("*.py")):
        assert not [n for n in imported(path) if n.startswith("tests.") and ".test_" in n], path


def test_the_folders_of_tests_are_those_of_the_package():
    folders = {path.parent.name for path in TESTS.glob("*/__init__.py")}
    assert folders - {"benchmarks", "support"} == {
        path.parent.name for path in PACKAGE.glob("*/__init__.py")
    }


def test_the_optimizer_shows_what_torch_or_a_user_calls_and_nothing_else():
    from torch.optim import Optimizer

    theirs = {*dir(Optimizer), "grad_scale", "found_inf"}
    ours = {name for name in dir(hf_dlion.DistributedLion) if not name.startswith("_")} - theirs
    assert ours == {
        *("attach", "common_weights", "detach", "eval", "exchange_now", "momentum_divergence"),
        *("node_group", "steps", "synchronize_momentum", "train"),
    }


def test_files_are_short_enough_to_be_read():
    lines = {identity(path): len(path.read_text().splitlines()) for path in SOURCES}
    assert max(lines.values()) <= 650
    assert len([name for name, count in lines.items() if count > 450]) <= 3, lines


def test_a_step_is_told_in_fifteen_lines():
    """Of `step`, and the schedule decides whether a step is local, not the optimizer."""
    source = (PACKAGE / "optimizer.py").read_text()
    steps = [node for node in ast.walk(ast.parse(source)) if getattr(node, "name", "") == "step"]
    documented = steps[-1].body
    assert documented[-1].end_lineno - documented[1].lineno < 15
    names = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)]
    assert not {"vote_every", "has_own_weights"} & {node.attr for node in names}


def test_only_peers_tell_failures_to_other_ranks():
    texts = {identity(path): path.read_text() for path in SOURCES}
    assert [name for name in texts if "except BaseException" in texts[name]] == ["peers.py"]


def test_no_module_writes_private_attributes_of_other_objects():
    # Those of Trainer's models, callbacks, and enums, which have no public ones.
    theirs = {"_is_accelerate_prepared", "_enable_checkpoint", "_name_", "_value_", "_sort_order_"}
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
                assert own or not node.attr.startswith("_") or node.attr in theirs, (
                    path,
                    node.attr,
                )
