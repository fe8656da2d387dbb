"""The same optimizer on the other ranks: what all do together, and agree on.

all ranks                      agree by                        if one fails
step, exchange, save, load     a header (`Meetings.agree`)     all raise, and the step isn't taken
take a local step              nothing; a node by a gather     it raises, the others at a header
form nodes or replicas         a meeting in `Topology.form`    all raise

What may fail on one rank alone is in a `with peers.all_or_none(report):` block. Its failure waits
for `peers.agree(report)`, which raises on all ranks. `peers.together(kind)` is both.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import fields

import torch.distributed as dist

import hf_dlion.fsdp as fsdp
from hf_dlion.core.layout import Layout
from hf_dlion.options import Options, hyperparameters
from hf_dlion.params import Params
from hf_dlion.ranks import lost_ranks
from hf_dlion.ranks.agreement import FROZEN, HISTORY, Agreed, Meetings, Report, agree_on_gradients
from hf_dlion.ranks.header import Disagreement, Kind
from hf_dlion.ranks.stats import WireStats
from hf_dlion.ranks.topology import Topology
from hf_dlion.ranks.wire import LostRank
from hf_dlion.steps.local import LocalSteps

# Attribute of an error that a header raised on all ranks: the time at which it did, and the ranks.
_RAISED = "_hf_dlion_raised"
# Counts blocks and such errors of all optimizers, because a block may meet in another's step.
_time = itertools.count()


class Peers:
    """An optimizer's process group, and what its ranks do together.

    Attributes:
        stats: Counts of the bytes that this rank sent.
        ranks: The groups of ranks; None before the first header, and for one rank alone.
    """

    def __init__(
        self,
        params: Params,
        local: LocalSteps,
        options: Options,
        process_group: dist.ProcessGroup | None,
        replicate: dist.ProcessGroup | None,
    ) -> None:
        """Doesn't communicate."""
        if process_group is not None and dist.get_rank(process_group) < 0:
            raise ValueError(
                "this rank isn't in process_group: create and step the optimizer on its ranks only"
            )
        if options.local_group is not None and replicate is not None:
            raise ValueError(
                "local_group can't be combined with replicate: with FSDP2, the ranks of a replica "
                "already vote as one"
            )
        lost_ranks.note_world()
        self._params = params
        self._local = local
        self._options = options
        self.stats = WireStats()
        self.process_group, self.replicate = process_group, replicate
        self.ranks: Topology | None = None
        self._meetings: Meetings | None = None
        self._attaches = 0
        # Since the ranks last agreed, so loads can be repeated until all ranks have had one.
        self._has_loaded = False
        # A function has another text in every process.
        self._option_texts = {
            field.name: str(value)
            for field in fields(options)
            if not callable(value := getattr(options, field.name))
        }

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        if not (dist.is_available() and dist.is_initialized()):
            return 1
        return dist.get_world_size(self.process_group)

    @property
    def voter(self) -> int:
        """Number of this rank's voter; 0 before the first header, and for one rank alone."""
        return 0 if self.ranks is None else self.ranks.voter

    @property
    def voter_count(self) -> int:
        """Number of voters; 1 before the first header, and for one rank alone."""
        return 1 if self.ranks is None else self.ranks.voters.world_size

    @property
    def comparisons(self) -> int:
        """Number of headers in which the ranks compared their parameters."""
        return 0 if self._meetings is None else self._meetings.comparisons

    def topology(self) -> Topology:
        """Returns the groups of ranks. With `replicate`, the first call is a collective."""
        if self.ranks is None:
            lost_ranks.note_world()
            ranks = Topology(
                self.process_group,
                self._options.local_group,
                self.stats,
                replicate=self.replicate,
                device=next((p.device for _, p in self._params.named()), None),
            )
            if self.replicate is not None:
                ranks.form()  # A collective.
            self._meetings = Meetings(ranks.everyone, ranks.same_parts)
            self.ranks = ranks
        return self.ranks

    @contextlib.contextmanager
    def all_or_none(self, report: Report, *, can_meet: bool = True) -> Iterator[None]:
        """Runs a `with` block on all ranks; a failure waits in the report for the next header.

        If the block meets the other ranks itself, as Trainer's save does in `save_momentum`, an
        error of that meeting was raised on all ranks, so it leaves the block at once.

        Args:
            report: This rank's report, which the block completes.
            can_meet: Whether the other ranks reach the next header if this one fails. If not, only
                this rank raises.
        """
        if self.ranks is None and self.world_size > 1:
            self.topology()  # With `replicate` a collective, so it can't fail on one rank alone.
        began = next(_time)
        try:
            yield
        except BaseException as error:
            if self.ranks is None or not can_meet or self._raised_by_all(error, began):
                raise
            report.failure = error
            fsdp.reshard(self._params.fsdp_models)  # As on the other ranks, for the next forward.

    @contextlib.contextmanager
    def together(self, kind: Kind, *, can_meet: bool = True) -> Iterator[None]:
        """Runs a `with` block on all ranks, which ends with a header.

        Every rank must enter it. What fails in it on one rank is raised on all of them. If not
        `can_meet`, see `all_or_none`.

        Raises:
            Disagreement: On every rank, if the ranks differ, or something failed on another rank.
            BaseException: What the block raised.
            LostRank: If another rank ended or stalled.
        """
        report = Report(kind)
        with self.all_or_none(report, can_meet=can_meet):
            yield
        self.agree(report)

    def agree(self, report: Report, layout: Layout | None = None) -> Agreed:
        """Returns what all ranks have, or raises on all of them; every rank must call this.

        In a local step, it returns what this rank has, and only the ranks of a node communicate.
        With local steps, it drops gradients on which they abstain (`agree_on_gradients`), and in an
        exchange the report's presence becomes that of the period. `layout` has the tensors of a
        step or an exchange. Bytes: see `Meetings.agree`, and with local steps `agree_in_node`.

        Raises:
            Disagreement: On every rank, if the ranks differ, or something failed on another rank.
            BaseException: The report's failure.
            LostRank: If another rank ended or stalled.
        """
        if self.ranks is None:
            hyperparameters(self._params.groups)  # Raises what a schedule must not set.
            return Agreed([report.finite], [report.present])
        try:
            if self._options.vote_every > 1:
                agree_on_gradients(report, layout, self.ranks.node)
            if report.has_header:
                return self._header(report, layout, self.ranks)
            if report.failure is not None:
                raise report.failure
            return Agreed([report.finite], [report.present])
        except BaseException as error:
            own, raised = report.failure, error
            if own not in (None, error) and isinstance(error, (Disagreement, LostRank)):
                own.add_note(f"The other ranks weren't told: {error}")
                raised = own  # The cause comes first, as if they had met.
            if report.has_header:  # Otherwise, the other ranks don't raise.
                setattr(raised, _RAISED, (next(_time), self._global_ranks()))
            if raised is not error:
                raise raised from (raised.__cause__ or error)
            raise

    def _raised_by_all(self, error: BaseException, began: int) -> bool:
        """Returns whether a header raised an error on all of these ranks since a block began."""
        # An earlier header may have raised it, or one of another optimizer with fewer ranks.
        time, ranks = getattr(error, _RAISED, (-1, frozenset[int]()))
        return time > began and ranks >= self._global_ranks()

    def _global_ranks(self) -> frozenset[int]:
        assert self.ranks is not None
        return frozenset(self.ranks.everyone.global_ranks)

    def _header(self, report: Report, layout: Layout | None, ranks: Topology) -> Agreed:
        known, values, steps = Layout(), dict[str, object](), 0
        try:
            steps = self._params.steps
            # A save or a load doesn't know the layout; all ranks must reshard.
            known = layout or self._params.fresh_layout()
            values = self._equal_values(report, known)
            if report.kind is Kind.EXCHANGE:
                report.present = [slot.moved_in_period for slot in known.slots]
        except Exception as error:  # The other ranks wait for a header.
            report.failure = report.failure or error
        if layout is None:
            known.release()
        assert self._meetings is not None
        agreed = self._meetings.agree(
            report, steps, values, known.signatures, self._params.common_parts
        )
        self._has_loaded = False
        if not ranks.is_formed:
            ranks.form()  # A collective, which needs the options that were compared.
        if report.kind is Kind.STEP and ranks.voters is not ranks.everyone:
            agreed = agreed.by_voter(ranks.voter_of_rank)
        return agreed

    def _equal_values(self, report: Report, layout: Layout) -> dict[str, object]:
        """Returns what must be equal on all ranks, by name."""
        local = self._local
        # If only some ranks loaded, all raise here, before they would compare momenta.
        equal: dict[str, object] = {
            **self._option_texts,
            "calls of load_state_dict": int(self._has_loaded),
            "calls of attach and detach": self._attaches,
        }
        if self._options.vote_every > 1:
            # An exchange ends the period with the step that begins.
            period = report.period if report.kind is Kind.EXCHANGE else local.period
            equal["exchanges"] = local.exchanges
            equal["steps since the last exchange"] = period.steps
            equal[FROZEN] = sorted(n for n, p in self._params.named() if not p.requires_grad)
        equal |= hyperparameters(self._params.groups)
        if self._options.vote_every > 1:  # Last: an error names the first difference.
            equal[HISTORY] = [(state.path, state.decay) for state in local.states.values()]
        if callable(self._options.momentum_sync):
            equal["choices of momentum_sync"] = [slot.synced for slot in layout.slots]
        return equal

    def note_attach(self) -> None:
        """Counts an attach or detach, so the next header compares the ranks and their weights."""
        self._attaches += 1
        if self._meetings is not None:
            self._meetings.compare_again()

    def note_load(self) -> None:
        """Counts a load of the optimizer's state, so the next header compares the weights.

        The model may have been loaded on some ranks only, or hold this rank's own weights.
        """
        self._has_loaded = True
        if self._meetings is not None:
            self._meetings.compare_again()
