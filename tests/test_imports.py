"""Imports inside the package go one way, and `import hf_dlion` is cheap (design 9)."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import hf_dlion

PACKAGE = Path(hf_dlion.__file__).parent

# From the mathematics up to the integrations. A module imports from the rows above its own, a
# folder also from itself; a new module gets its place here first.
LAYERS = (
    {"selection", "naming"},
    {"options", "lion", "layout", "fingerprint", "presence", "durable", "warn_once", "background"},
    {"join", "verdict", "abstention", "momentum_origin", "momentum_file", "optim_args", "state"},
    {"attachment", "ballot", "codec", "group_entry", "whole_checkpoint", "routes"},
    {"exchange", "agreed_checkpoint", "loading"},
    {"header", "momentum_sync", "selective_sync", "comm_hook", "shards"},
    {"group_counts", "saved_momentum", "divergence", "full_precision"},
    {"node"},
    {"messages", "groups", "node_gradients", "sync_schedule"},
    {"step_plan", "node_messages", "replicas", "ranks", "momenta"},
    {"node_plan"},
    {"flight", "scale_probes"},
    {"overlap", "move"},
    {"own_header"},
    {"optimizer"},
    {"checkpoint"},
    {"saving"},
    {"accelerate"},
    {"trainer"},
    {"launch"},
    {"bench"},
    {"plan"},
    {"study"},
    {"cli"},
)
LAYER_OF = {name: number for number, names in enumerate(LAYERS) for name in names}

# Who may import what is not needed for training with torch alone.
OPTIONAL = {
    "transformers": {
        "trainer",
        "bench/model.py",
        "plan/model.py",
        "study/text.py",
        "study/vision.py",
    },
    "accelerate": {"accelerate", "trainer"},
    "triton": {"codec/triton.py"},
    "rich": {"bench/report.py"},
    "matplotlib": {"plan/plot.py", "study/plot.py"},
    "datasets": {"study/vision.py"},
    "peft": {"study/text.py"},
    "sklearn": {"study/vision.py"},
    "trl": set(),
}

SOURCES = [path for path in sorted(PACKAGE.rglob("*.py")) if path != PACKAGE / "__init__.py"]


def part_of(path: Path) -> str:
    """The module or folder of the package that a file belongs to."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


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


def test_every_module_has_its_layer():
    assert {part_of(path) for path in SOURCES} == set(LAYER_OF)


@pytest.mark.parametrize("path", SOURCES, ids=identity)
def test_a_module_imports_only_what_lies_below_it(path):
    own = part_of(path)
    for name in imported(path):
        root, *rest = name.split(".")
        if root == "hf_dlion":
            other = rest[0]
            assert other == own or LAYER_OF[other] < LAYER_OF[own], f"{own} imports {name}"


@pytest.mark.parametrize("path", SOURCES, ids=identity)
def test_only_the_integrations_import_optional_packages(path):
    for name in imported(path):
        allowed = OPTIONAL.get(name.split(".")[0])
        assert allowed is None or allowed & {part_of(path), identity(path)}, name


def test_importing_the_package_loads_no_optional_package():
    # torch itself may load triton.
    program = (
        "import sys, torch, torch.distributed, torch.nn.parallel\n"
        "before = set(sys.modules)\n"
        "import hf_dlion\n"
        "print(*{name.split('.')[0] for name in set(sys.modules) - before})"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120
    )
    assert "hf_dlion" in done.stdout.split()
    assert not set(done.stdout.split()) & set(OPTIONAL)
