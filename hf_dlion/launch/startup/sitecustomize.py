"""Makes `optim="dlion"` valid in a Python process that was started under `hf-dlion run`.

Python imports the first module of this name in its path when it starts. This one waits until the
process imports torch or transformers, and then imports the next module of this name, if there is
one. Before that, it imports nothing. It may run in an environment without hf_dlion.
"""

import os
import sys

TYPE_CHECKING = False  # Importing it would take a process without torch some milliseconds.
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from types import ModuleType

# What to call after a module was loaded. Trainer's module loads that of the arguments halfway, so
# the name is added first, and Trainer is wrapped when it is complete.
_CALLS = {
    "torch.distributed": "set_interface",
    "transformers.training_args": "accept_name",
    "transformers.trainer": "register",
}


class _Finder:
    """Lets the other finders find a module, and adds a call to the end of its loading."""

    @classmethod
    def find_spec(
        cls, name: str, path: object = None, target: object = None
    ) -> "ModuleSpec | None":
        if name not in _CALLS:
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = None
            if finder is not cls and find is not None:
                spec = find(name, path, target)
            if spec is not None:
                _call_after_loading(spec)
                return spec
        return None


def _call_after_loading(spec: "ModuleSpec") -> None:
    loader = spec.loader
    load = getattr(loader, "exec_module", None)
    if load is None:
        return

    def exec_module(module: "ModuleType") -> None:
        load(module)
        if function := _CALLS.pop(spec.name, ""):
            _call(function)

    loader.exec_module = exec_module  # type: ignore[union-attr, method-assign]


def _call(function: str) -> None:
    """Calls a function of hf_dlion. Prints a failure, because this process may not need it."""
    try:
        module = __import__("hf_dlion.launch.after_imports", fromlist=[function])
        getattr(module, function)()
    except Exception as error:
        missing = isinstance(error, ImportError) and error.name == "hf_dlion"
        why = "hf_dlion isn't installed there" if missing else str(error)
        what = f"optim='dlion' isn't available with {sys.executable}"
        if function == "set_interface" and not missing:
            what = "cannot choose the network interface"
        else:
            _CALLS.clear()
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"hf-dlion run: {what}: {why}", file=sys.stderr)


def _import_next() -> None:
    """Imports the module that this one hides, and takes this folder off the path."""
    folder = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if entry != folder]
    own = sys.modules.pop(__name__)
    try:
        __import__(__name__)
    except ImportError as error:
        if error.name != __name__:
            raise
    finally:
        sys.modules.setdefault(__name__, own)


sys.meta_path.insert(0, _Finder)
_import_next()
