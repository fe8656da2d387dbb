"""All ranks' packed votes in, the verdict on them out; and the mean of numbers over the ranks.

`exchange` is the protocol, the table of strategies and the choice among them; a strategy is a file
(`gather`, `two_phase`), and `node` lets one of them carry the votes of whole nodes. `mean` averages
gradients and momenta, in `batches`. `wire` is the only place that calls a collective and counts
bytes; what it hands out is `pending`, where a lost rank becomes an error that names it. Votes are
counted by the codec of the device on which they are received.
"""

from hf_dlion.exchange.exchange import (
    STRATEGIES,
    Exchange,
    choose_exchange,
    make_exchange,
    message_wire_bytes,
)
from hf_dlion.exchange.pending import LostRank, Pending
from hf_dlion.exchange.wire import Agreed, Wire, WireStats

__all__ = [
    "STRATEGIES",
    "Agreed",
    "Exchange",
    "LostRank",
    "Pending",
    "Wire",
    "WireStats",
    "choose_exchange",
    "make_exchange",
    "message_wire_bytes",
]
