"""How a model's parameters are cut into messages, and the messages of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from torch import Tensor

from hf_dlion.codec import codec_for
from hf_dlion.codec.layout import MessageLayout
from hf_dlion.exchange import Wire, choose_exchange, make_exchange
from hf_dlion.momentum.shares import Range
from hf_dlion.options import Options
from hf_dlion.options.params import check_trainable
from hf_dlion.options.routes import Routes
from hf_dlion.ranks.header import digest
from hf_dlion.step.full_precision import Batch, split_alike
from hf_dlion.step.message import Message

# A step has about so many messages: enough of them that one travels while the next is encoded, and
# few enough that calls and latency do not count ...
MESSAGES = 32
# ... none of fewer elements than that, and than so many for each rank. At 100 Mbit/s messages of
# 2**20 elements reached 1.03 of the bound, of 2**22 1.11 (29.5 million parameters, two hosts).
FEWEST_NUMEL, FEWEST_NUMEL_PER_RANK = 1 << 20, 1 << 17
VOTES_ONLY = Routes()
# Elements per message whatever the model: for benchmarks and tests.
MESSAGE_NUMEL: int | None = None


def message_numel(params: Sequence[tuple[int, Tensor]], world_size: int) -> int:
    """Returns how many elements a message should have at most.

    Args:
        params: Pairs of parameter index and parameter.
        world_size: Number of ranks that exchange votes.
    """
    if MESSAGE_NUMEL is not None:
        return MESSAGE_NUMEL
    total = sum(param.numel() for _, param in params)
    return max(FEWEST_NUMEL, FEWEST_NUMEL_PER_RANK * world_size, -(-total // MESSAGES))


def split_into_messages(
    params: Sequence[tuple[int, Tensor]], world_size: int
) -> list[list[tuple[int, Tensor]]]:
    """Returns runs of parameters of one device with at most `message_numel` elements each.

    A larger parameter is a message of its own; a parameter without elements is left out.

    Args:
        params: Pairs of parameter index and parameter.
        world_size: Number of ranks that exchange votes.
    """
    return _runs(params, message_numel(params, world_size))


def _runs(params: Sequence[tuple[int, Tensor]], limit: int) -> list[list[tuple[int, Tensor]]]:
    messages: list[list[tuple[int, Tensor]]] = []
    room, device = 0, None
    for index, param in params:
        if param.numel() == 0:
            continue
        if not messages or param.numel() > room or param.device != device:
            messages.append([])
            room, device = limit, param.device
        messages[-1].append((index, param))
        room -= param.numel()
    return messages


@dataclass(frozen=True)
class ReadyOrder:
    """How gradients become ready in backward, on all ranks alike.

    Attributes:
        indices: Of parameters, the first one ready first.
        late: Of parameters that some rank's backward often does not deliver: they come last, and
            share no message with others.
        wires: A process group of their own for votes that leave during backward, and one for the
            verdicts on them: so that neither needs an order among the other's collectives.
        inside: Where a node votes as one, a process group of its ranks for what they tell one
            another before a vote leaves.
    """

    indices: Sequence[int]
    late: Sequence[int]
    wires: tuple[Wire, Wire]
    inside: Wire | None = None


def split_in_order(
    params: Sequence[tuple[int, Tensor]], order: ReadyOrder, world_size: int
) -> list[list[tuple[int, Tensor]]]:
    """Returns messages as `split_into_messages`, in the order in which gradients become ready.

    Args:
        params: Pairs of parameter index and parameter.
        order: That of the gradients.
        world_size: Number of ranks that exchange votes.
    """
    place = {index: number for number, index in enumerate(order.indices)}
    # Where autograd was not seen, the last parameter's gradient is taken to be first.
    sequence = sorted(params, key=lambda pair: (place.get(pair[0], len(place)), -pair[0]))
    late = set(order.late)
    in_time = [pair for pair in sequence if pair[0] not in late]
    rest = [pair for pair in sequence if pair[0] in late]
    limit = message_numel(params, world_size)
    return [*_runs(in_time, limit), *_runs(rest, limit)]


class Plan:
    """The messages of a set of trainable parameters, kept until that set changes.

    Attributes:
        messages: With buffers for one step; none for one rank.
        full: Parameters that have no place in a message: their gradients are averaged.
        routes: What is exchanged of each parameter besides votes.
        bits: Of the votes that its messages have room for.
        layout: Hash of everything that decides which collectives of what size a step makes.
        ordered: Whether the messages follow an order in which gradients become ready.
        owners: For each rank of this rank's node, the stretch of every parameter whose momentum it
            keeps; empty where every rank keeps all of it.
        owned: The same of this rank.
    """

    owners: Sequence[Mapping[int, Range]] = ()
    owned: Mapping[int, Range] = MappingProxyType({})
    full: Sequence[Batch] = ()
    bits: int = 1

    def __init__(
        self,
        params: Sequence[tuple[int, Tensor]],
        wire: Wire | None,
        options: Options,
        order: ReadyOrder | None = None,
        routes: Routes = VOTES_ONLY,
    ) -> None:
        """Checks the parameters and makes the messages.

        Args:
            params: Pairs of parameter index and parameter, those with requires_grad.
            wire: The process group, or None for one rank.
            options: Give the exchange and what it carries.
            order: How the messages of an exchange during backward are cut, and where they travel.
            routes: What is exchanged of each parameter besides votes.

        Raises:
            NotImplementedError: If a parameter is sharded.
            TypeError: If one is not dense or not floating.
        """
        self._take_params(params, wire, routes)
        self.ordered, self.bits = order is not None, options.bits
        world_size = 1 if wire is None else wire.world_size
        voted = [pair for pair in params if pair[0] not in routes.full]
        groups = split_into_messages(voted, world_size)
        up, down = wire, wire
        if order is not None:
            up, down = order.wires
            groups = split_in_order(voted, order, world_size)
        layouts = [MessageLayout.of([(i, p.shape) for i, p in group]) for group in groups]
        name = choose_exchange(layouts, world_size, options)
        split = [[index for index, _ in group] for group in groups]
        kinds = [(index, tuple(p.shape), str(p.dtype)) for index, p in params]
        self.layout = digest((kinds, split, name, routes.plain()))
        self.messages: list[Message] = []
        if up is None or world_size == 1:
            return
        averaged = [pair for pair in params if pair[0] in routes.full]
        self.full = split_alike(averaged, message_numel(params, world_size))
        for group, layout in zip(groups, layouts, strict=True):
            device = group[0][1].device
            exchange = make_exchange(name, layout, up, device, options, down)
            self.messages.append(Message(group, layout, exchange, codec_for(device), options.bits))

    def _take_params(
        self, params: Sequence[tuple[int, Tensor]], wire: Wire | None, routes: Routes
    ) -> None:
        for _, param in params:
            check_trainable(param)
        self.routes = routes
        self._wire, self._key = wire, _key_of(params)

    def fits(self, params: Sequence[tuple[int, Tensor]], wire: Wire | None, routes: Routes) -> bool:
        """Returns whether these are the parameters, the wire and the routes of the plan."""
        return self._wire is wire and self.routes == routes and self._key == _key_of(params)


def _key_of(params: Sequence[tuple[int, Tensor]]) -> list[tuple[object, ...]]:
    return [(index, id(p), p.shape, p.dtype, p.device) for index, p in params]
