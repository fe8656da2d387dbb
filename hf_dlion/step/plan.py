"""How a model's parameters are cut into messages, and who carries them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from hf_dlion.codec.layout import MessageLayout
from hf_dlion.exchange import Wire
from hf_dlion.exchange.batches import in_batches
from hf_dlion.momentum.shares import Range
from hf_dlion.options import Options
from hf_dlion.options.params import check_trainable
from hf_dlion.options.treatment import Treatment
from hf_dlion.ranks.fingerprint import digest
from hf_dlion.step.full_precision import Batch, split_alike
from hf_dlion.step.message import Message
from hf_dlion.step.voters import Voters

# A step has about so many messages: enough of them that one travels while the next is encoded, and
# few enough that calls and latency do not count. A GPU encodes them in so little time that few will
# do: `hf-dlion plan` predicts that 4, 8 and 16 hardly differ with 2 ranks, and that 8 save up to
# half of a step with 16 (docs/results/gpu.md) ...
MESSAGES, MESSAGES_OF_GPU = 32, 8
# ... none of fewer elements than that, and than so many for each rank. At 100 Mbit/s messages of
# 2**20 elements reached 1.03 of the bound, of 2**22 1.11 (29.5 million parameters, two hosts).
FEWEST_NUMEL, FEWEST_NUMEL_PER_RANK = 1 << 20, 1 << 17
VOTES_ONLY = Treatment()

Params = Sequence[tuple[int, Tensor]]


@dataclass(frozen=True)
class ReadyOrder:
    """How gradients become ready in backward, on all ranks alike.

    Attributes:
        indices: Of parameters, the first one ready first.
        late: Of parameters that some rank's backward often does not deliver: they come last, and
            share no message with others.
        wires: A process group of their own for votes that leave during backward, and one for the
            verdicts on them, so neither needs an order among the other's collectives.
    """

    indices: Sequence[int]
    late: Sequence[int]
    wires: tuple[Wire, Wire]


class Plan:
    """The messages of a set of trainable parameters, kept until that set changes.

    Attributes:
        messages: With buffers for one step; none where nobody else votes.
        delivery: Carries them in the step.
        averaged: Batches of the parameters without a place in a message: their gradients are
            averaged.
        treatment: What is exchanged of each parameter besides votes.
        bits: Of the votes that its messages have room for.
        level_scale: What their levels are relative to.
        layout: Hash of everything that decides which collectives of what size a step makes.
        ordered: Whether the messages follow an order in which gradients become ready.
        owners: For each rank that shares this rank's vote, the stretch of every parameter whose
            momentum it keeps; empty where every rank keeps all of it.
        owned: The same of this rank.
    """

    def __init__(
        self,
        params: Params,
        voters: Voters,
        options: Options,
        treatment: Treatment = VOTES_ONLY,
        *,
        message_numel: int | None = None,
        order: ReadyOrder | None = None,
    ) -> None:
        """Checks the parameters and makes the messages.

        Args:
            params: Pairs of parameter index and parameter, those with requires_grad.
            voters: Who votes as one, and how their messages are made.
            options: Give the exchange and what it carries.
            treatment: What is exchanged of each parameter besides votes.
            message_numel: Elements per message at most; None chooses by the size of the model and
                the number of ranks.
            order: How the messages of an exchange during backward are cut, and where they travel.

        Raises:
            NotImplementedError: If a parameter is sharded.
            TypeError: If one is not dense or not floating.
        """
        for _, param in params:
            check_trainable(param)
        self.voters, self.treatment, self._key = voters, treatment, _key_of(params)
        self.message_numel, self.ordered = message_numel, order is not None
        self.bits, self.level_scale = options.bits, options.level_scale
        voted = [pair for pair in params if pair[0] not in treatment.full]
        on_gpu = any(param.device.type != "cpu" for _, param in params)
        limit = message_numel or usual_numel(voted, voters.ranks, on_gpu)
        groups = _runs(voted, limit) if order is None else _runs_in_order(voted, limit, order)
        layouts = [MessageLayout.of([(i, p.shape) for i, p in group]) for group in groups]
        name = voters.choose_exchange(layouts, options)
        split = [[index for index, _ in group] for group in groups]
        kinds = [(index, tuple(p.shape), str(p.dtype)) for index, p in params]
        self.layout = digest((kinds, split, name, *voters.layout_key, treatment.plain()))
        self.averaged: Sequence[Batch] = ()
        if voters.ranks > 1:
            rest = [pair for pair in params if pair[0] in treatment.full]
            size = message_numel or usual_numel(params, voters.ranks, on_gpu)
            self.averaged = split_alike(rest, size)
        wires = None if order is None else order.wires
        built = voters.build(params, list(zip(groups, layouts, strict=True)), name, options, wires)
        self.messages: Sequence[Message] = built.messages
        self.delivery = built.delivery
        self.owners: Sequence[Mapping[int, Range]] = built.owners
        self.owned: Mapping[int, Range] = built.owned

    def fits(self, params: Params, voters: Voters, treatment: Treatment, options: Options) -> bool:
        """Returns whether these are what the plan was made for, and its messages' places hold."""
        return (
            self.voters is voters
            and self.treatment == treatment
            and self.level_scale == options.level_scale
            and self._key == _key_of(params)
        )


def usual_numel(params: Params, ranks: int, on_gpu: bool) -> int:
    """Returns how many elements a message should have at most.

    Args:
        params: Pairs of parameter index and parameter.
        ranks: Number of ranks that take part.
        on_gpu: Whether a GPU encodes.
    """
    total = sum(param.numel() for _, param in params)
    messages = MESSAGES_OF_GPU if on_gpu else MESSAGES
    return max(FEWEST_NUMEL, FEWEST_NUMEL_PER_RANK * ranks, -(-total // messages))


def split_into_messages(
    params: Params, ranks: int, on_gpu: bool = False
) -> list[list[tuple[int, Tensor]]]:
    """Returns the parameters of each message of a step; the arguments are as for `usual_numel`."""
    return _runs(params, usual_numel(params, ranks, on_gpu))


def _runs(params: Params, limit: int) -> list[list[tuple[int, Tensor]]]:
    """Returns runs of parameters of one device with at most `limit` elements each."""
    return in_batches(params, limit, lambda pair: pair[1])


def _runs_in_order(params: Params, limit: int, order: ReadyOrder) -> list[list[tuple[int, Tensor]]]:
    """Returns runs as `_runs`, in the order in which gradients become ready, the late ones last."""
    place = {index: number for number, index in enumerate(order.indices)}
    # Where autograd was not seen, the last parameter's gradient is taken to be first.
    sequence = sorted(params, key=lambda pair: (place.get(pair[0], len(place)), -pair[0]))
    late = set(order.late)
    in_time = [pair for pair in sequence if pair[0] not in late]
    rest = [pair for pair in sequence if pair[0] in late]
    return [*_runs(in_time, limit), *_runs(rest, limit)]


def _key_of(params: Params) -> list[tuple[object, ...]]:
    return [(index, id(p), p.shape, p.dtype, p.device) for index, p in params]
