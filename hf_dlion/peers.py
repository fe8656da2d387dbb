"""The same optimizer on the other ranks: what all do together, agree on, and compare.

all ranks                      agree by                        if one fails
step, exchange, save, load     a header (`Meetings.meet`)      all raise before anything moves
take a local step              nothing; a node by a gather     it raises, the others at a header
form nodes or replicas         a meeting in `Topology.form`    all raise

All but the last are a `with peers.together(...)` block, whose end is the header.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor, nn

import hf_dlion.ddp as ddp
import hf_dlion.fsdp as fsdp
from hf_dlion.exchange.wire import WireStats, digest, named_ranks
from hf_dlion.options import Options, hyperparameters
from hf_dlion.ranks.agreement import FROZEN, Agreed, Meetings, Report
from hf_dlion.ranks.fingerprint import fingerprints
from hf_dlion.ranks.meeting import Kind
from hf_dlion.ranks.replicas import (
    AVERAGED_GRADIENTS,
    CHANGED_PARAMETERS,
    COPIED_MOMENTA,
    all_ranks_have,
    compare_parameters,
)
from hf_dlion.ranks.topology import SAME_IN_NODE, Topology
from hf_dlion.vote.layout import Layout
from hf_dlion.vote.step import Mine, Schedule
from hf_dlion.vote.warm_up import warm_up

# Numbers of the optimizers that this process creates.
_numbers = itertools.count(1)
# From this step on, gradients are compared again at each power of two, because a model may be
# wrapped again without `attach`.
COMPARED_FROM = 64
# Attribute of an exception that a meeting raised on all ranks: its number among entries of
# `together`. It may be raised again in a later one, where the other ranks don't have it.
_MET = "_hf_dlion_met"
_entries = itertools.count(1)


class Lion(ddp.Owner, Protocol):
    """What the ranks compare of an optimizer."""

    options: Options
    schedule: Schedule
    state: Any
    _layout: Layout

    @property
    def steps(self) -> int: ...  # noqa: D102
    def momentum_divergence(self) -> dict[str, float]: ...  # noqa: D102
    def _refreshed_layout(self) -> Layout: ...
    def _named(self) -> list[tuple[str, Tensor]]: ...
    def _flat_momentum(self, param: Tensor) -> Tensor: ...


class Peers:
    """An optimizer's process group, and what its ranks know of one another.

    Attributes:
        wire: Counts of the bytes that this rank sent.
        ranks: The groups of ranks; None before the first meeting, and for one rank alone.
        fsdp_models: The attached FSDP2 models.
        momenta_equal: Whether momenta of averaged gradients are known to be equal on all
            voters. It changes on all of them together, unlike a layout.
    """

    def __init__(
        self,
        lion: Lion,
        process_group: dist.ProcessGroup | None,
        replicate: dist.ProcessGroup | None,
    ) -> None:
        """Doesn't communicate."""
        if process_group is not None and dist.get_rank(process_group) < 0:
            raise ValueError(
                "this rank isn't in process_group: create and step the optimizer on its ranks only"
            )
        if lion.options.local_group is not None and replicate is not None:
            raise ValueError(
                "local_group can't be combined with replicate: with FSDP2, the ranks of a replica "
                "already vote as one"
            )
        self._lion: Lion = weakref.proxy(lion)  # Not a cycle, so an optimizer is freed at once.
        self.wire = WireStats()
        self.process_group, self.replicate = process_group, replicate
        self.ranks: Topology | None = None
        self.fsdp_models: list[nn.Module] = []
        self._hook_calls: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
        self.momenta_equal = self._compared_gradients = False
        self._created = next(_numbers)
        self._meetings: Meetings | None = None
        self._loads = self._compared_loads = self._attaches = 0
        self._abstained: list[int] = []  # consecutive steps in which each rank abstained
        # A function has another text in every process.
        self._option_texts = {
            field.name: str(value)
            for field in fields(lion.options)
            if not callable(value := getattr(lion.options, field.name))
        }

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        if not (dist.is_available() and dist.is_initialized()):
            return 1
        return dist.get_world_size(self.process_group)

    def topology(self) -> Topology:
        """Returns the groups of ranks. With `replicate`, the first call is a collective."""
        if self.ranks is None:
            ranks = Topology(
                self.process_group,
                self._lion.options.local_group,
                self.wire,
                replicate=self.replicate,
                device=next((p.device for _, p in self._lion._named()), None),
            )
            if self.replicate is not None:
                ranks.form()  # A collective.
            self._meetings = Meetings(ranks.everyone, self._created, ranks.same_parts)
            self.ranks, self._abstained = ranks, []  # Steps before had one rank.
        return self.ranks

    # Meetings.

    @contextlib.contextmanager
    def together(self, kind: Kind | None, *, can_meet: bool = True) -> Iterator[Mine]:
        """Runs a `with` block on all ranks; what fails in it on one rank is raised on all of them.

        Every rank must enter it. The block may complete what it is given. If it raises what an
        earlier meeting raised, all ranks have it, and don't meet again. Bytes: see `Meetings.meet`.

        Args:
            kind: What the ranks do; None to leave a failure to the next meeting, see `held`.
            can_meet: Whether the other ranks reach the end of the block if this one fails. If not,
                only this rank raises.

        Raises:
            Disagreement: On every rank, if the ranks differ, or something failed on another rank.
            BaseException: What the block raised.
            LostRank: If another rank ended or stalled.
        """
        if self.ranks is None and self.world_size > 1:
            self.topology()  # With `replicate` a collective, so it can't fail on one rank alone.
        mine, entry = Mine(kind or Kind.STEP), next(_entries)
        try:
            yield mine
            voters = 1 if self.ranks is None else self.ranks.voters.world_size
            if mine.layout.warm_for != voters:
                warm_up(mine.layout, self._lion.options, voters)
        except BaseException as error:
            if self.ranks is None or not can_meet or getattr(error, _MET, 0) > entry:
                raise
            mine.failure = error
            fsdp.reshard(self.fsdp_models)  # As on the other ranks, for the next forward.
        if kind is not None:
            try:
                self._agree(mine)
            except BaseException as error:
                setattr(error, _MET, next(_entries) if mine.kind is not Kind.LOCAL_STEP else 0)
                raise

    def held(self, *, can_meet: bool = True) -> contextlib.AbstractContextManager[Mine]:
        """Runs a `with` block whose failure waits in `failure` for the next meeting."""
        return self.together(None, can_meet=can_meet)

    def _agree(self, mine: Mine) -> None:
        """Completes `mine` with what all ranks have, or raises on all of them."""
        if (ranks := self.ranks) is None:
            hyperparameters(self._lion.param_groups)  # Raises what a schedule must not set.
            mine.agreed = Agreed([mine.finite], [mine.present])
            return
        lion = self._lion
        if lion.schedule.is_local:
            lion.schedule.settle(mine, ranks.node)
        if mine.kind is Kind.LOCAL_STEP:  # Which has no header.
            if mine.failure is not None:
                raise mine.failure
            return
        equal: dict[str, object] = {}
        lines: Sequence[tuple[object, ...]] = ()
        try:
            # A save or a load doesn't know the layout; all ranks must reshard.
            lines = (mine.layout if mine.layout.slots else lion._refreshed_layout()).lines
            equal = self._equal_values(mine.kind)
        except Exception as error:  # The other ranks wait for a header.
            mine.failure = mine.failure or error
        assert self._meetings is not None
        mine.agreed = self._meetings.meet(
            Report(
                kind=mine.kind,
                step=lion.steps,
                finite=mine.finite or mine.kind is not Kind.STEP,
                failure=mine.failure,
                equal=equal,
                layout=lines,
                present=lion.schedule.presence(mine),
                parameters=self._common_parts,
            )
        )
        if mine.agreed.compared:
            self.momenta_equal = self._compared_gradients = False
        if not ranks.is_formed:
            ranks.form()  # A collective, which needs the options that were compared.
        if mine.kind is Kind.STEP and ranks.voters is not ranks.everyone:
            mine.agreed = mine.agreed.by_voter(ranks.voter_of_rank)

    def _equal_values(self, kind: Kind) -> dict[str, object]:
        """Returns what must be equal on all ranks, by name."""
        lion = self._lion
        # If only some ranks loaded, all raise here, before they would compare momenta.
        equal: dict[str, object] = {
            **self._option_texts,
            "calls of load_state_dict": self._loads,
            "calls of attach and detach": self._attaches,
        }
        if lion.schedule.is_local:
            equal |= lion.schedule.equal_values(kind, lion.param_groups)
            equal[FROZEN] = sorted(n for n, p in lion._named() if not p.requires_grad)
        equal |= hyperparameters(lion.param_groups)
        if lion.schedule.is_local:  # Last, because an error names the first difference.
            equal |= lion.schedule.equal_history(kind, lion.param_groups)
        if callable(lion.options.momentum_sync):
            equal["choices of momentum_sync"] = [slot.synced for slot in lion._layout.slots]
        if lion.options.momentum_sync == "auto":
            equal["divergences of momenta"] = list(lion.momentum_divergence().values())
        return equal

    # What is counted and compared.

    def note_attach(self, layout: Layout) -> None:
        """Counts an attach or detach, so the next step compares the ranks and their weights."""
        self._attaches += 1
        layout.is_attached = layout.has_met = False
        if self._meetings is not None:
            self._meetings.compare_again()

    def note_load(self) -> None:
        """Counts a load of the optimizer's state."""
        self._loads += 1
        self._abstained, self.momenta_equal = [], False
        if self._meetings is not None and self._lion.schedule.is_local:
            # If the model wasn't loaded, it still holds this rank's weights of the period.
            self._meetings.compare_again()

    def note_own_momenta(self) -> None:
        """Notes that the momenta of the last load are each rank's own, so they aren't compared."""
        self._compared_loads, self.momenta_equal = self._loads, False

    def count_abstentions(self, mine: Mine, *, only_this_rank: bool) -> None:
        """Counts the ranks that abstain from a step, or have no gradient while others have.

        With local steps each rank counts only its own, because they don't communicate, and a later
        step checks the count.

        Raises:
            RuntimeError: If a rank abstained in as many consecutive steps as the limit.
        """
        ranks = self.ranks
        if ranks is not None and only_this_rank:
            everyone = range(ranks.everyone.world_size)
            votes = [mine.finite or rank != ranks.everyone.rank for rank in everyone]
        else:
            voter_of_rank = [0] if ranks is None else ranks.voter_of_rank
            votes = [mine.agreed.votes[voter] for voter in voter_of_rank]
        before, limit = self._abstained or [0] * len(votes), self._lion.options.max_abstained_steps
        # A count at the limit stays until it is checked.
        self._abstained = [
            n if n >= limit else 0 if ok else n + 1 for ok, n in zip(votes, before, strict=True)
        ]
        self.wire.abstentions += votes.count(False)
        if not self._lion.schedule.is_local:  # Whose counts may differ between ranks.
            self._check_abstentions()

    def _check_abstentions(self) -> None:
        longest, limit = max(self._abstained, default=0), self._lion.options.max_abstained_steps
        if longest >= limit:
            those = [rank for rank, count in enumerate(self._abstained) if count == longest]
            named = named_ranks(those) if self.ranks is None else self.ranks.everyone.named(those)
            self._abstained = []
            raise RuntimeError(
                f"gradients of {named} held a NaN or an Inf in {longest} steps in a row, or were "
                f"all missing: lower the learning rate, check that rank's data, or raise "
                f"max_abstained_steps ({limit})"
            )

    def check(self, mine: Mine) -> None:
        """Refuses a step that would be wrong without `attach`, or after too many abstentions.

        Raises:
            RuntimeError: If parameters are sharded, or nodes vote, and no model was attached; if no
                hook averages a parameter's gradient in the node, or did since the last step; or as
                `count_abstentions`.
        """
        if not mine.layout.is_attached:
            self._check_models()
            if self._lion.options.local_group not in (None, 1) and self.world_size > 1:
                self._check_hooks()
            # In its first backward, a hook notes which gradients it averages.
            mine.layout.is_attached = any(mine.present)
        if self.ranks is not None and self.ranks.node is not None:
            self._check_averages(mine.layout)
        if mine.kind is not Kind.LOCAL_STEP:  # In which the other ranks wouldn't raise.
            self._check_abstentions()

    def check_wrapper(self, model: nn.Module) -> None:
        """Refuses a wrapper that was made during local steps.

        Raises:
            RuntimeError: If it isn't the attached one, since DDP copied rank 0's own weights.
        """
        is_other = ddp.wrapper_in(model) not in ddp.attached_wrappers(self._lion)
        if self._lion.schedule.states and not self._lion.schedule.shown and is_other:
            raise RuntimeError(
                "attach() got another DDP wrapper between two exchanges of local steps. If it was "
                "made since the last one, it holds rank 0's own weights on every rank. Call "
                "optimizer.exchange_now() before you wrap the model, or optimizer.detach() now to "
                "go on with the weights of the last exchange"
            )

    def _check_models(self) -> None:
        attached = {p for model in self.fsdp_models for p in model.parameters()}
        for name, param in self._lion._named():
            if param.requires_grad and fsdp.is_sharded(param) and param not in attached:
                raise RuntimeError(
                    f"{name!r} belongs to no attached model: call optimizer.attach(model) with "
                    f"each model that fully_shard was called on, because step() must free its "
                    f"gathered parameters before it writes"
                )

    def _check_hooks(self) -> None:
        local_group = self._lion.options.local_group
        if not ddp.attached_wrappers(self._lion):
            raise RuntimeError(
                f"local_group={local_group!r} needs optimizer.attach(ddp_model), "
                f"whose hook averages gradients inside each node"
            )
        if self.ranks is None or self.ranks.node is None:  # Every node has one rank.
            return
        averaged = set[Tensor]().union(*ddp.averaged_parameters(self._lion).values())
        for name, param in self._lion._named():
            if param.requires_grad and param not in averaged:
                raise RuntimeError(
                    f"DDP doesn't average the gradient of {name!r} inside a node, as "
                    f"local_group={local_group!r} needs: it was unfrozen after the "
                    f"model was wrapped, or is outside of the wrapper. Wrap the model in "
                    f"DistributedDataParallel again, and call optimizer.attach(ddp_model)"
                )

    def _check_averages(self, layout: Layout) -> None:
        present = {slot.param for slot in layout.slots if slot.grad is not None}
        for wrapper, averaged in ddp.averaged_parameters(self._lion).items():
            before, calls = self._hook_calls.get(wrapper, 0), ddp.hook_calls(wrapper)
            self._hook_calls[wrapper] = calls
            if calls == before and not present.isdisjoint(averaged):
                named = self._lion._named()
                without = [n for n, p in named if p in averaged and p not in present]
                remedy = (
                    "call the DDP wrapper, not the model in it, and leave no_sync() before the "
                    "last backward of a step"
                )
                if without:  # For which DDP waits.
                    remedy = f"{without[0]!r} has none: find_unused_parameters=True, or {remedy}"
                raise RuntimeError(
                    f"DDP averaged no gradients inside the node since the last step, as "
                    f"local_group={self._lion.options.local_group!r} needs: {remedy}"
                )

    def compare_after_changes(self, layout: Layout) -> list[str]:
        """Compares gradients at a new layout, and momenta after a load; returns rank 0's warnings.

        After a change of what is trained the user may have wrapped the model again, and `attach`
        belongs to the old wrapper. Every rank must call this in the same step. Bytes per rank:
        32 (N - 1) after a comparison of parameters, 8 (N - 1) more with nodes; 16 (N - 1) after a
        load.
        """
        texts: list[str] = []
        if (ranks := self.ranks) is None:
            return texts
        step = self._lion.steps + 1
        if not self._compared_gradients or (step >= COMPARED_FROM and step.bit_count() == 1):
            self._compared_gradients = True
            # DDP may still average one of two models, so each side is compared by itself.
            models = ddp.attached_wrappers(self._lion)
            wrapped = {p for model in models for p in model.parameters()}
            sides: dict[bool, list[Tensor]] = {True: [], False: []}
            for slot in layout.slots:
                if slot.grad is not None:
                    sides[slot.param in wrapped].append(slot.grad)
            what = "hashes of gradients"
            if any([all_ranks_have(grads, ranks.voters, what) for grads in sides.values()]):
                texts.append(AVERAGED_GRADIENTS)
            if ranks.node is not None:
                own = fingerprints([grad for grads in sides.values() for grad in grads])
                table = ranks.everyone.gather_words([digest(own)], what)
                if node := ranks.unequal_node(table.view(-1).tolist()):
                    texts.append(
                        f"{ranks.everyone.named(node)} vote as one node, but their gradients "
                        f"differ: something changed those of one rank after DDP averaged them, or "
                        f"the last backward of a step was in no_sync(). {SAME_IN_NODE}"
                    )
        if self._loads != self._compared_loads:
            self._compared_loads = self._loads
            params, state = [slot.param for slot in layout.slots], self._lion.state
            momenta = [
                self._lion._flat_momentum(p) for p in params if "exp_avg" in state.get(p, {})
            ]
            if all_ranks_have(momenta, ranks.voters, "hashes of momenta"):
                texts.append(COPIED_MOMENTA)
        return texts if ranks.everyone.rank == 0 else []

    def _common_parts(self) -> list[tuple[str, Tensor]]:
        """Returns name and this rank's part of every parameter, with anchors for own weights.

        These are the weights that must be equal on all ranks.
        """
        found = []
        for name, param in self._lion._named():
            state = self._lion.schedule.states.get(param)
            part = fsdp.local_part(param.detach()) if state is None else state.anchor
            found.append((name, part))
        return found

    def compare_replicas(self) -> None:
        """Verifies that parameters are equal on all ranks, which must all call this."""
        if (ranks := self.ranks) is not None:
            compare_parameters(
                self._common_parts, ranks.everyone, ranks.same_parts, CHANGED_PARAMETERS,
                when=f" after step {self._lion.steps}",
            )  # fmt: skip
