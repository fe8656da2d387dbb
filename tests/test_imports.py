"""`import hf_dlion` is cheap, its files are readable, and tests mirror the package."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import hf_dlion

PACKAGE = Path(hf_dlion.__file__).parent

# What isn't needed for training with torch alone. lint-imports checks who imports which, and the
# order of imports.
OPTIONAL = {"accelerate", "datasets", "peft", "rich", "transformers", "triton", "trl"}

TESTS = Path(__file__).parent
AT_THE_DOOR = {PACKAGE / "__init__.py", PACKAGE / "__main__.py"}
SOURCES = [path for path in sorted(PACKAGE.rglob("*.py")) if path not in AT_THE_DOOR]


def identity(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


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
    assert not set(done.stdout.split()) & OPTIONAL


def test_no_test_module_imports_another():
    modules = sorted(TESTS.rglob("*.py"))
    assert len(modules) > 15
    for path in modules:
        assert not re.findall(
            r"^\s*(?:from|import) tests\.(?:\w+\.)?test_.*", path.read_text(), re.M
        ), path


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
        *("attach", "check_replicas", "common_weights", "detach", "exchange_now"),
        *("node_group", "steps", "synchronize_momentum"),
    }


def test_the_arithmetic_does_not_communicate():
    """lint-imports, which knows no parts of torch, keeps it from the package's own collectives."""
    texts = {identity(path): path.read_text() for path in SOURCES}
    talking = {name for name in texts if "torch.distributed" in texts[name]}
    assert {"ranks/wire.py", "peers.py"} < talking
    assert not [name for name in talking if name.startswith(("core/", "gpu/"))]


def test_only_peers_tell_failures_to_other_ranks():
    texts = {identity(path): path.read_text() for path in SOURCES}
    assert [name for name in texts if "except BaseException" in texts[name]] == ["peers.py"]


def test_no_module_writes_private_attributes_of_other_objects():
    # Those of Trainer's models, callbacks, enums, and arguments, which have no public ones.
    theirs = {"_is_accelerate_prepared", "_enable_checkpoint", "__post_init__"}
    theirs |= {"_name_", "_value_", "_sort_order_"}
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
                assert own or not node.attr.startswith("_") or node.attr in theirs, (
                    path,
                    node.attr,
                )
