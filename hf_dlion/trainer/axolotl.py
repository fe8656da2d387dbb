"""A plugin of axolotl, named in its YAML, so `optimizer: dlion` is known before it is looked up.

plugins: [hf_dlion.trainer.axolotl.DistributedLionPlugin]
optimizer: dlion
"""

from __future__ import annotations

from typing import Any

from axolotl.integrations.base import BasePlugin

from hf_dlion.trainer.arguments import register


class DistributedLionPlugin(BasePlugin):  # type: ignore[misc, unused-ignore] # axolotl is optional
    """Registers `optim="dlion"` when axolotl reads its configuration, in every process."""

    def register(self, cfg: Any) -> None:
        """Registers; `cfg` is axolotl's configuration, of which nothing is read."""
        register()
