"""Holds predictions to a run of `benchmarks/step_time.py`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from hf_dlion.tools.models import made
from hf_dlion.tools.names import DLION, NONE, name_of
from hf_dlion.tools.plan.cost import Cluster, Link
from hf_dlion.tools.plan.machine import Machine
from hf_dlion.tools.plan.methods import NODE_VOTES, OVERLAPPED, Case, no_communication, predict
from hf_dlion.tools.plan.model import Workload

COLUMNS = {
    "name": "method",
    "bytes_per_step": "bytes measured",
    "predicted_bytes": "predicted",
    "measured_ms": "ms measured",
    "predicted_ms": "predicted",
    "error_percent": "error %",
}


def emulated_rate(result: Mapping[str, Any]) -> str:
    """Returns the rate of a run's emulated network, as users write it.

    Raises:
        ValueError: If the run had none.
    """
    text = result["config"].get("emulate")
    if text is None:
        raise ValueError(
            "this run of benchmarks/step_time.py emulated no network, so its link is unknown: give "
            "--link RATE, or the JSON of benchmarks/exchange.py on the same ranks"
        )
    return str(text).partition("x")[2]


def case_of(result: Mapping[str, Any], machine: Machine, link: Link) -> Case:
    """Returns the case of a run: its model and ranks, and compute from "no communication".

    Args:
        result: The JSON of `benchmarks/step_time.py`.
        machine: Its ranks' own work.
        link: Between its ranks.

    Raises:
        ValueError: If the run lacks the row.
    """
    config = result["config"]
    free = [row["median_ms"] for row in result["rows"] if row["name"] == NONE]
    if not free:
        raise ValueError("the run has no row without communication: run it with --methods none ...")
    with torch.device("meta"):
        model = made(config["parameters"], config.get("model"))
    shapes = tuple(tuple(param.shape) for param in model.parameters())
    work = Workload(name="model of the benchmark", parameters=config["parameters"], shapes=shapes)
    cluster = Cluster(ranks=config["ranks"], ranks_per_node=config.get("local_ranks", 1))
    empty = Case(work=work, cluster=cluster, link=link, machine=machine, compute_s=0.0)
    return replace(empty, compute_s=1e-3 * free[0] - no_communication(empty).step_s)


def rows(result: Mapping[str, Any], case: Case) -> list[dict[str, Any]]:
    """Returns measured and predicted for every method that the cost model knows.

    The row without communication is the input, and so has no error.

    Args:
        result: The JSON of `benchmarks/step_time.py`.
        case: From `case_of`, with the bits of the votes to compare.

    Raises:
        ValueError: If the run voted, but with other bits only.
    """
    seen = {row["bits"] for row in result["rows"] if "bits" in row}
    if seen and case.bits not in seen:
        raise ValueError(f"the run's votes have bits={sorted(seen)}, not {case.bits}: give --bits")
    predictions = predict(case)
    # The tables name DistributedLion with its bits and options, the cost model does not.
    ours = {
        name_of(case.bits): DLION,
        name_of(case.bits, overlap=True): OVERLAPPED,
        name_of(case.bits, local_group="node"): NODE_VOTES,
    }
    found = []
    for row in result["rows"]:
        name = row["name"]
        name = ours.get(name) if name.startswith(DLION) else name
        if name not in predictions:
            continue
        predicted_ms = None if name == NONE else 1e3 * predictions[name].step_s
        error = None if predicted_ms is None else 100 * (predicted_ms / row["median_ms"] - 1)
        found.append(
            {
                "name": row["name"],
                "bytes_per_step": row["bytes_per_step"],
                "predicted_bytes": predictions[name].wire_bytes,
                "measured_ms": row["median_ms"],
                "predicted_ms": predicted_ms,
                "error_percent": error,
            }
        )
    return found
