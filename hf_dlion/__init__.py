"""Distributed Lion for Hugging Face and torch: ranks exchange signs instead of gradients.

Words used throughout: *direction* u; *sign* s of it; *packed* (64 signs in a word); *vote* (what
a rank sends); *verdict* (what every rank applies); *exchange* (votes in, verdict out); *abstain*
(cast no vote on a row); *tie*; *wire bytes* (what a rank hands to a collective and another host
must receive).
"""

from hf_dlion.exchange import WireStats
from hf_dlion.header import Disagreement
from hf_dlion.optimizer import DistributedLion
from hf_dlion.options import Options

__version__ = "0.1.0"
__all__ = ["Disagreement", "DistributedLion", "Options", "WireStats", "__version__", "register"]


def register() -> None:
    """Makes `TrainingArguments(optim="dlion")` known to transformers; call it before the parser.

    Idempotent. See `hf_dlion.trainer.register`.

    Raises:
        RuntimeError: If this transformers has no place for another optimizer.
    """
    # Imported here: plain torch users of this package need no transformers.
    from hf_dlion.trainer import register as register_with_trainer

    register_with_trainer()
