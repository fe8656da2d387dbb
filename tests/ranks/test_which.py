"""Which optimizer a rank steps, as far as one process can see: what it remembers of meetings."""

from __future__ import annotations

from hf_dlion.ranks import which
from hf_dlion.ranks.which import Which


class _Group:
    """Stands for a process group, which is held weakly."""


def test_a_layout_that_changes_in_every_step_adds_nothing_to_what_is_remembered() -> None:
    group, optimizer = _Group(), Which(which.new_number())
    numbers = [optimizer.number, optimizer.number + 3]
    assert optimizer.meet(numbers, "layout 0", group)
    met, remembered = optimizer.met, len(which._meetings[group])
    for step in range(1, 5):
        assert optimizer.meet(numbers, f"layout {step}", group)
    assert (optimizer.met, len(which._meetings[group])) == (met, remembered)


def test_optimizers_met_in_another_order_are_told_apart() -> None:
    group = _Group()
    first, second = Which(1), Which(2)
    assert first.meet([1, 2], "layout", group)
    assert not second.meet([2, 1], "layout", group)
    assert second.met == 0
    assert second.meet([2, 3], "layout", group)
    assert first.marked(7) != second.marked(7)
