"""Where the momenta live: in torch's state, whole or as this rank's share of its node's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from hf_dlion.exchange import Wire
from hf_dlion.exchange.mean import average_over_ranks
from hf_dlion.momentum.part_states import PartStates
from hf_dlion.momentum.shares import Range, Shares
from hf_dlion.options.groups import Groups, flat_params, names_of
from hf_dlion.options.params import holds_numbers
from hf_dlion.ranks.agreement import Disagreement, raise_together
from hf_dlion.ranks.fingerprint import digest


@dataclass(frozen=True)
class MomentumStore:
    """The momenta of an optimizer: a view, made anew when needed, since torch replaces its state.

    Attributes:
        state: The optimizer's; `state[p]["exp_avg"]` is what this rank holds of p's momentum.
        groups: The parameter groups, with this rank's parts of sharded parameters.
        shares: Which stretch that is.
        dtype: Of the momenta, None for each parameter's own.
    """

    state: PartStates
    groups: Groups
    shares: Shares
    dtype: torch.dtype | None

    def of(self, param: Tensor, index: int, owned: Mapping[int, Range]) -> Tensor:
        """Returns the parameter's momentum, or this rank's share of it, made at its first use.

        Args:
            param: The parameter.
            index: Of the parameter.
            owned: The stretch of each parameter that this rank owns; none where it has all.
        """
        state = self.state[param]
        if "exp_avg" not in state:
            shape = self.shares.begin(index, param, owned)
            dtype = self.dtype or param.dtype
            state["exp_avg"] = torch.zeros(shape, dtype=dtype, device=param.device)
        return cast(Tensor, state["exp_avg"])

    def fit(self, params: Sequence[tuple[int, Tensor]]) -> None:
        """Makes momenta fit their parameters: in device, dtype and contiguous memory.

        torch's state is open to everybody, and `param.data = ...` leaves it behind. Codecs read
        as many elements as the parameter has from where a momentum begins, so this comes first.

        Args:
            params: Pairs of parameter index and parameter.

        Raises:
            RuntimeError: If a momentum is of another shape.
            TypeError: If one is no dense floating tensor.
        """
        for index, param in params:
            state = self.state.get(param)
            if "exp_avg" not in state:
                continue
            momentum, dtype = state["exp_avg"], self.dtype or param.dtype
            if not holds_numbers(momentum):
                raise TypeError(self._told(index, f"no dense floating tensor: {_kind(momentum)}"))
            if misfit := self.shares.misfit(index, param, momentum):
                raise RuntimeError(self._told(index, misfit))
            if momentum.dtype != dtype:
                limit = min(torch.finfo(momentum.dtype).max, torch.finfo(dtype).max)
                momentum = momentum.clamp(-limit, limit).to(dtype)
            if momentum.device != param.device or not momentum.is_contiguous():
                momentum = momentum.to(param.device).contiguous()
            state["exp_avg"] = momentum

    def _told(self, index: int, problem: str) -> str:
        return (
            f"the momentum of {names_of(self.groups)[index]!r} is {problem}; after a change of "
            f"param.data or of the state, `del optimizer.state[param]` on every rank, or a new "
            f"optimizer, starts it anew"
        )

    def held(self) -> dict[int, Tensor]:
        """Returns what this rank holds of each momentum, by parameter index."""
        return {
            index: cast(Tensor, self.state[param]["exp_avg"])
            for index, param in enumerate(flat_params(self.groups))
            if "exp_avg" in self.state.get(param)
        }

    def hold(self, momenta: Mapping[int, Tensor]) -> None:
        """Keeps momenta, by parameter index."""
        params = flat_params(self.groups)
        for index, momentum in momenta.items():
            self.state[params[index]]["exp_avg"] = momentum

    def fill_up(self) -> None:
        """Makes momenta whole, with zeros for what other ranks held; nothing is sent."""
        if self.shares.held:
            self.hold(self.shares.filled_up(self.held(), flat_params(self.groups)))

    def displaced(self, owned: Mapping[int, Range]) -> bool:
        """Returns whether this rank lacks a part of what it must own."""
        return self.shares.displaced(self.held(), owned)

    def share_out(
        self,
        owners: Sequence[Mapping[int, Range]],
        local: Wire,
        members: tuple[tuple[int, ...], ...],
        displaced: bool,
    ) -> None:
        """Gives every rank of the node the momentum that it owns.

        Args:
            owners: The stretches that each rank of the node must own.
            local: The node's ranks; all of them must call this.
            members: The ranks of each node.
            displaced: Whether any of them lacks a part; otherwise nothing is sent.
        """
        momenta, shares = self.held(), self.shares
        if displaced:
            params = flat_params(self.groups)
            momenta = shares.shared_out(momenta, owners, params, self.dtype, local)
        self.hold(shares.cut(momenta, owners[local.rank]))
        shares.members = members

    def check_alike(self, wire: Wire, alike: Sequence[Sequence[int]], what: str) -> None:
        """Checks that the ranks hold fitting momenta of the same parameters; all must call this.

        Args:
            wire: All ranks.
            alike: Groups of ranks that must hold the same stretches: the ranks of a node hold
                different ones, those with one place on all nodes the same.
            what: The name of what they do.

        Raises:
            Disagreement: On every rank, if they do not; one whose momentum does not fit its
                parameter raises what `fit` does.
        """
        failure: Exception | None = None
        try:
            self.fit(list(enumerate(flat_params(self.groups))))
        except Exception as error:  # Whatever it is, the other ranks wait below.
            failure = error
        raise_together(failure, wire, what)
        held = self.held()
        told = wire.gather_objects((list(held), digest(self.shares.ranges(held))))
        if len({repr(indices) for indices, _ in told}) > 1 or any(
            len({told[rank][1] for rank in ranks}) > 1 for ranks in alike
        ):
            raise Disagreement(
                "ranks hold momenta of different parameters: load the same checkpoint on every rank"
            )

    def average(self, wire: Wire) -> None:
        """Replaces what this rank holds by the mean over ranks that hold the same stretches."""
        average_over_ranks(list(self.held().values()), wire)

    def make_whole(self, local: Wire) -> None:
        """Gives every rank of a node the whole momenta; the node's ranks all call this."""
        params = flat_params(self.groups)
        self.hold(self.shares.made_whole(self.held(), params, self.dtype, local))


def _kind(value: object) -> str:
    """Returns what a value is, without calling anything of its own."""
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"{value.dtype}, {value.layout}, on {value.device}"
