"""Which momenta are synchronised in which step."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from hf_dlion.codec.rule import TensorRule
from hf_dlion.exchange import Wire
from hf_dlion.momentum.divergence import choose, measure
from hf_dlion.momentum.slices import Held, slice_wire_bytes, synchronize_slice
from hf_dlion.options import Options

# With "auto" divergences are measured again after so many steps, or at the next period's beginning.
MEASURE_EVERY = 50
# What is synchronised counts at a measurement as so much of what it was, if that is more than is
# measured: otherwise it would be dropped as soon as synchronising helps, and chosen again after.
KEPT = 0.9


class MomentumSync:
    """Averages momenta slice by slice, and with "auto" chooses them by how far they differ.

    Attributes:
        divergence: By parameter index, as last measured; the same on all ranks, and saved.
        measurements: How often it was measured by this object.
        needed: How often each parameter was chosen, by index.
    """

    def __init__(self, divergence: Mapping[int, float] | None = None) -> None:
        """Begins with what a state dict holds."""
        self.divergence = dict(divergence or {})
        self.measurements = 0
        self.needed: Counter[int] = Counter()

    @classmethod
    def loaded(cls, entry: Sequence[float] | None) -> MomentumSync:
        """Returns one that goes on from a state dict's entry, checked, or from nothing."""
        return cls({index: value for index, value in enumerate(entry or ()) if value >= 0.0})

    def entry(self, count: int) -> list[float]:
        """Returns the divergences as a state dict holds them: -1 where there is none.

        Args:
            count: Number of parameters.
        """
        return [self.divergence.get(index, -1.0) for index in range(count)]

    def agreed(self) -> list[dict[str, Any]]:
        """Returns what ranks must have in common, as an entry beside their parameter groups."""
        return [{"momentum divergence": self.divergence}] if self.divergence else []

    def after_step(
        self,
        momenta: Sequence[Held],
        rules: Mapping[int, TensorRule],
        step: int,
        options: Options,
        wire: Wire,
    ) -> None:
        """Averages the slice that is due; every rank must call this after the same step.

        Bytes per rank: those of `synchronize_slice`, and in steps that measure of `measure`.

        Args:
            momenta: All that may be synchronised, in one order on all ranks.
            rules: The step's constants of each, by parameter index.
            step: Number of the step that was taken.
            options: What to do.
            wire: Several ranks.
        """
        begin = time.perf_counter()
        every = options.momentum_sync_every
        if options.momentum_sync == "auto" and momenta:
            period = -(-MEASURE_EVERY // every) * every
            if not self.divergence or (step - 1) % period == 0:
                # What was measured first was the noise of one gradient.
                before = self.divergence if step > 1 + period else {}
                self._note(measure(momenta, wire), before, self._chosen(momenta, options, wire))
                self.needed.update(held.index for held in self._chosen(momenta, options, wire))
            momenta = self._chosen(momenta, options, wire)
        dtype = options.momentum_sync_dtype
        synchronize_slice(momenta, step % every, every, rules, dtype, wire)
        wire.stats.exchange_s += time.perf_counter() - begin

    def _note(
        self, measured: Mapping[int, float], before: Mapping[int, float], synced: Sequence[Held]
    ) -> None:
        """Takes a measurement: momenta that were synchronised until now differ less for it."""
        held = {piece.index: KEPT * before.get(piece.index, 0.0) for piece in synced}
        self.divergence = {
            index: max(value, held.get(index, 0.0)) for index, value in measured.items()
        }
        self.measurements += 1

    def _chosen(self, momenta: Sequence[Held], options: Options, wire: Wire) -> list[Held]:
        every, dtype = options.momentum_sync_every, options.momentum_sync_dtype
        by_index = {held.index: held for held in momenta}
        budget = options.momentum_sync_budget
        if budget is None:
            budget = sum(held.exp_avg.numel() for held in momenta) // 8
        devices = len({held.exp_avg.device for held in momenta})

        def fits(numel: int) -> bool:
            # A batch for each device is filled up by itself.
            filling = (devices - 1) * slice_wire_bytes(1, 1, wire.world_size, dtype)
            sent = slice_wire_bytes(numel, every, wire.world_size, dtype) + filling
            return sent <= budget

        numels = {index: held.exp_avg.numel() for index, held in by_index.items()}
        return [by_index[index] for index in choose(self.divergence, numels, fits)]

    def report(self, names: Sequence[str]) -> str:
        """Returns a table of the momenta that differ most, and how often each was synchronised.

        Args:
            names: Of all parameters.
        """
        if not self.divergence:
            return "no divergence was measured: it takes momentum_sync='auto' and several ranks"
        rows = sorted(self.divergence.items(), key=lambda pair: (-pair[1], pair[0]))
        lines = ["divergence  chosen  parameter"]
        for index, value in rows:
            chosen = f"{self.needed[index]}/{self.measurements}"
            lines.append(f"{value:10.3f}  {chosen:>6}  {names[index]}")
        return "\n".join(lines)
