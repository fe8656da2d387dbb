"""The plugin of axolotl, loaded as axolotl 0.19 loads it."""

from __future__ import annotations

import importlib
import sys
import types

import pytest

from hf_dlion.trainer import register
from tests.support.tiny import tiny_args


class BasePlugin:
    """A stand-in for axolotl's: hooks that do nothing."""

    def register(self, cfg):
        raise AssertionError("the plugin has none of its own")


@pytest.fixture
def plugin(monkeypatch):
    """An instance of the plugin, by the name that stands in a YAML."""
    for name in ("axolotl", "axolotl.integrations", "axolotl.integrations.base"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules["axolotl.integrations.base"].BasePlugin = BasePlugin
    module, _, name = "hf_dlion.trainer.axolotl.DistributedLionPlugin".rpartition(".")
    yield getattr(importlib.import_module(module), name)()
    del sys.modules[module]


def test_axolotls_plugin_registers_before_arguments_are_made(plugin, monkeypatch, tmp_path):
    assert isinstance(plugin, BasePlugin)
    registered = []
    # Another test may have registered in this process.
    monkeypatch.setattr("hf_dlion.trainer.axolotl.register", lambda: registered.append(register()))
    plugin.register({"optimizer": "dlion"})
    assert len(registered) == 1
    # axolotl makes such a text of the mapping `optim_args`.
    options = {"aggregation": "average", "stochastic_rounding": False}
    text = ",".join(f"{name}={value}" for name, value in options.items())
    assert tiny_args(tmp_path, optim="dlion", optim_args=text).optim == "dlion"
