"""A plugin for axolotl that makes `optimizer: dlion` valid in its YAML file.

plugins: [hf_dlion.trainer.axolotl.DistributedLionPlugin]
optimizer: dlion
"""

from __future__ import annotations

from typing import Any

from axolotl.integrations.base import BasePlugin

from hf_dlion.trainer.registration import register


class DistributedLionPlugin(BasePlugin):  # type: ignore[misc, unused-ignore] # axolotl is optional
    """Registers `optim="dlion"` in every process."""

    def register(self, cfg: Any) -> None:
        """Calls `hf_dlion.register()`; ignores axolotl's configuration `cfg`."""
        register()
