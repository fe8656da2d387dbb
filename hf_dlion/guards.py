"""What all ranks check so that no weight goes wrong without a word.

A step without `attach`, ranks that abstain for long (`ranks.abstentions`), nodes whose ranks have
different gradients, gradients that DDP still averages, momenta of one rank on all ranks, a save of
an attached model within a period of local steps, and replicas that differ.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import hf_dlion.ddp as ddp
import hf_dlion.fsdp as fsdp
from hf_dlion.core.fingerprint import fingerprints
from hf_dlion.core.layout import Layout
from hf_dlion.options import Options
from hf_dlion.params import Params
from hf_dlion.ranks.abstentions import Abstentions
from hf_dlion.ranks.agreement import Report
from hf_dlion.ranks.compare import (
    AVERAGED_GRADIENTS,
    CHANGED_PARAMETERS,
    COPIED_MOMENTA,
    all_ranks_have,
    compare_parameters,
)
from hf_dlion.ranks.stats import WireStats
from hf_dlion.ranks.topology import SAME_IN_NODE, Topology
from hf_dlion.ranks.wire import digest
from hf_dlion.steps.local import LocalSteps
from hf_dlion.user_warning import defer_warning, warn_user

# Gradients are compared again at each power of two from this step on.
COMPARED_FROM = 64


class _SaveWatch:
    """A hook of `state_dict` that warns within a period; a copied model's hook does nothing."""

    def __init__(self, local: LocalSteps) -> None:
        self._local = weakref.ref(local)

    def __call__(self, *_: object) -> None:
        if (local := self._local()) is not None and local.states and not local.shows_anchors():
            warn_user(
                "state_dict() between two exchanges of local steps has this rank's own weights, "
                "without the other ranks' last steps: call optimizer.exchange_now() on every rank "
                "before you save"
            )

    def __reduce__(self) -> Any:
        # A copy is `"".format`, which takes any arguments and does nothing, so a saved model loads
        # without hf_dlion.
        return getattr, ("", "format")


class Guards:
    """Checks of an optimizer's steps, and what they remember.

    Attributes:
        abstentions: How often ranks abstained.
        momenta_equal: Whether momenta of averaged gradients are known to be equal on all
            voters. It changes on all of them together, unlike a layout.
        lacks_momenta: Whether a state without momenta was loaded, which the next step refuses.
    """

    def __init__(
        self, owner: ddp.Owner, params: Params, options: Options, stats: WireStats
    ) -> None:
        """`owner` is the optimizer, which owns the parameters of DDP wrappers."""
        self._owner: ddp.Owner = weakref.proxy(owner)  # Not a cycle.
        self._params, self._options = params, options
        self.abstentions = Abstentions(options, stats)
        self._hook_calls: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
        self.momenta_equal = self._compared_gradients = self._loaded = False
        self.lacks_momenta = False
        self._comparisons = 0
        self._watched: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()
        # The layout and the number of wrappers for which `attach` was called as needed.
        self._attached: tuple[Layout, int] | None = None

    # What is noted.

    def note_comparisons(self, number: int) -> None:
        """Notes how often the ranks have compared parameters, as they do at a new layout."""
        if number != self._comparisons:
            self._comparisons = number
            self.momenta_equal = self._compared_gradients = False

    def note_step(self) -> None:
        """Notes which gradients the step takes; one that failed may be taken again."""
        for wrapper, state in ddp.hook_states(self._owner).items():
            self._hook_calls[wrapper] = state.calls

    def note_load(self, *, own_momenta: bool = False, lacks_momenta: bool = False) -> None:
        """Notes a load; momenta of `load_momentum` are each rank's own, so they aren't compared."""
        self.abstentions.forget()
        self.momenta_equal, self._loaded = False, not own_momenta
        self.lacks_momenta = lacks_momenta

    # Checks before a header.

    def check(self, layout: Layout, report: Report, ranks: Topology | None) -> None:
        """Refuses a step that would be wrong without `attach`, or after too many abstentions.

        Raises:
            RuntimeError: If parameters are sharded, or nodes vote, and no model was attached; if no
                hook averages a parameter's gradient in the node, or did since the last step; if a
                state was loaded without momenta; or as `Abstentions.check`.
        """
        if self.lacks_momenta:
            raise RuntimeError(
                "the optimizer's state was saved without momenta, which are in the files "
                "dlion_momentum_*: after load_state_dict(), call hf_dlion.load_momentum(optimizer, "
                "folder) on every rank, or with Accelerate hf_dlion.accelerate.attach() before "
                "load_state(). Without these files, start with a new optimizer"
            )
        now = layout, len(ddp.hook_states(self._owner))  # A wrapper may have been dropped.
        if self._attached != now:
            self._check_models()
            if self._options.local_group not in (None, 1) and ranks is not None:
                self._check_hooks(ranks)
            # In its first backward, a hook notes which gradients it averages.
            self._attached = now if any(report.present) else None
        if ranks is not None and ranks.node is not None:
            self._check_averages(layout)
        if report.has_header:  # Otherwise, the other ranks wouldn't raise.
            self.abstentions.check(ranks)

    def check_wrapper(self, wrapper: DistributedDataParallel | None) -> None:
        """Refuses a wrapper that was made within a period of local steps.

        Raises:
            RuntimeError: If it isn't the attached one, since DDP copied rank 0's own weights.
        """
        if wrapper is not None and wrapper not in ddp.hook_states(self._owner):
            raise RuntimeError(
                "attach() got another DDP wrapper between two exchanges of local steps. If it was "
                "made since the last one, it holds rank 0's own weights on every rank. Call "
                "optimizer.exchange_now() before you wrap the model, or optimizer.detach() now to "
                "go on with the weights of the last exchange"
            )

    def warn_about_waits(
        self, wrapper: DistributedDataParallel | None, ranks: Topology | None
    ) -> None:
        """Warns on rank 0 if DDP lets nodes wait for one another in every local step."""
        every = self._options.vote_every
        if ranks is None or ranks.node is None or ranks.everyone.rank or wrapper is None:
            return
        if ranks.voters.world_size > 1 and every > 1 and ddp.asks_who_uses_parameters(wrapper):
            warn_user(
                f"vote_every={every}, but DDP asks all nodes in every backward which parameters "
                f"are used, so they wait for one another in every step. To avoid that, set "
                f"find_unused_parameters=False, in Trainer ddp_find_unused_parameters=False"
            )

    def watch_saves(self, model: nn.Module, local: LocalSteps) -> None:
        """Makes `model.state_dict()` warn within a period of local steps."""
        model = getattr(model, "_orig_mod", model)  # Of a compiled one, which asks it.
        if self._options.vote_every > 1 and model not in self._watched:
            hook: Any = model.register_state_dict_pre_hook
            self._watched[model] = hook(_SaveWatch(local))

    def forget_saves(self) -> None:
        """Ends what `watch_saves` began."""
        for handle in self._watched.values():
            handle.remove()
        self._watched.clear()

    def _check_models(self) -> None:
        attached = {p for model in self._params.fsdp_models for p in model.parameters()}
        for name, param in self._params.named():
            if param.requires_grad and fsdp.is_sharded(param) and param not in attached:
                raise RuntimeError(
                    f"{name!r} belongs to no attached model: call optimizer.attach(model) with "
                    f"each model that fully_shard was called on, because step() must free its "
                    f"gathered parameters before it writes"
                )

    def _check_hooks(self, ranks: Topology) -> None:
        local_group = self._options.local_group
        if not ddp.hook_states(self._owner):
            raise RuntimeError(
                f"local_group={local_group!r} needs optimizer.attach(ddp_model), "
                f"whose hook averages gradients inside each node"
            )
        if ranks.node is None:  # Every node has one rank.
            return
        states = ddp.hook_states(self._owner).values()
        averaged = set[Tensor]().union(*[state.averaged for state in states])
        for name, param in self._params.named():
            if param.requires_grad and param not in averaged:
                raise RuntimeError(
                    f"DDP doesn't average the gradient of {name!r} inside a node, as "
                    f"local_group={local_group!r} needs: it was unfrozen after the "
                    f"model was wrapped, or is outside of the wrapper. Call optimizer.detach(), "
                    f"wrap the model in DistributedDataParallel again, and call attach(ddp_model)"
                )

    def _check_averages(self, layout: Layout) -> None:
        present = {slot.param for slot in layout.slots if slot.grad is not None}
        for wrapper, state in ddp.hook_states(self._owner).items():
            before = self._hook_calls.get(wrapper, 0)
            if state.calls == before and not present.isdisjoint(state.averaged):
                named = self._params.named()
                without = [n for n, p in named if p in state.averaged and p not in present]
                remedy = (
                    "call the DDP wrapper, not the model in it, and leave no_sync() before the "
                    "last backward of a step"
                )
                if without:  # For which DDP waits.
                    remedy = f"{without[0]!r} has none: find_unused_parameters=True, or {remedy}"
                raise RuntimeError(
                    f"DDP averaged no gradients inside the node since the last step, as "
                    f"local_group={self._options.local_group!r} needs: {remedy}"
                )

    # After a header.

    def compare_after_changes(self, layout: Layout, ranks: Topology) -> None:
        """Compares gradients, and momenta after a load; rank 0 warns.

        Gradients are compared at a new layout and at powers of two from `COMPARED_FROM` on: the
        user may have wrapped the model again, and `attach` belongs to the old wrapper. Every rank
        must call this in the same step. Bytes per rank: 32 (N - 1) for gradients, 8 (N - 1) more
        with nodes; 16 (N - 1) after a load.
        """
        warnings: list[str] = []
        step = self._params.steps + 1
        if not self._compared_gradients or (step >= COMPARED_FROM and step.bit_count() == 1):
            self._compared_gradients = True
            # DDP may still average one of two models, so each side is compared by itself.
            models = ddp.hook_states(self._owner)
            wrapped = {p for model in models for p in model.parameters()}
            sides: dict[bool, list[Tensor]] = {True: [], False: []}
            for slot in layout.slots:
                if slot.grad is not None:
                    sides[slot.param in wrapped].append(slot.grad)
            what = "hashes of gradients"
            if any([all_ranks_have(grads, ranks.voters, what) for grads in sides.values()]):
                warnings.append(AVERAGED_GRADIENTS)
            if ranks.node is not None:
                hashes = fingerprints([grad for grads in sides.values() for grad in grads])
                table = ranks.everyone.gather_words([digest(hashes)], what)
                if node := ranks.unequal_node(table.view(-1).tolist()):
                    warnings.append(
                        f"{ranks.everyone.named(node)} vote as one node, but their gradients "
                        f"differ: something changed those of one rank after DDP averaged them, or "
                        f"the last backward of a step was in no_sync(). {SAME_IN_NODE}"
                    )
        if self._loaded:
            self._loaded = False
            trained, state = [slot.param for slot in layout.slots], self._params.state
            momenta = [
                self._params.flat_momentum(p) for p in trained if "exp_avg" in state.get(p, {})
            ]
            if all_ranks_have(momenta, ranks.voters, "hashes of momenta"):
                warnings.append(COPIED_MOMENTA)
        for text in warnings if ranks.everyone.rank == 0 else []:
            defer_warning(text)

    def compare_replicas(self, ranks: Topology) -> None:
        """Verifies that parameters are equal on all ranks, which must all call this."""
        compare_parameters(
            self._params.common_parts, ranks.everyone, ranks.same_parts,
            CHANGED_PARAMETERS, when=f" after step {self._params.steps}",
        )  # fmt: skip
