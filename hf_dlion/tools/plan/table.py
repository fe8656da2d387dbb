"""Step times from 2 to 1024 nodes over links from 0.1 to 100 Gbit/s, as a table and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hf_dlion.tools.names import NONE
from hf_dlion.tools.pictures import figure, logarithmic, look, save
from hf_dlion.tools.plan.cost import Cluster
from hf_dlion.tools.plan.methods import PUBLIC, Case, predict
from hf_dlion.tools.plan.report import Predictions, best_all_reduce, names_of_ours, pays, rate

NODES = tuple(2**power for power in range(1, 11))
RATES = (0.1e9, 1e9, 10e9, 25e9, 100e9)


@dataclass(frozen=True, kw_only=True)
class Point:
    """The predictions for one number of nodes and one link.

    Attributes:
        nodes: How many.
        link: For people.
        predictions: Of all methods.
    """

    nodes: int
    link: str
    predictions: Predictions

    def ratio(self, name: str) -> float:
        """Returns a method's step time relative to no communication."""
        return self.predictions[name].step_s / self.predictions[NONE].step_s


def points(case: Case, nodes: Sequence[int] = NODES, rates: Sequence[float] = RATES) -> list[Point]:
    """Returns the predictions for every number of nodes and every link.

    Args:
        case: Gives all the rest, the link's latency and efficiency too.
        nodes: Numbers of nodes.
        rates: Nominal, in bits per second.
    """
    found = []
    per_node = case.cluster.ranks_per_node
    for count in nodes:
        cluster = Cluster(ranks=count * per_node, ranks_per_node=per_node)
        for bits_per_s in rates:
            # Latency and the machine's constants stay: only nodes and rate are varied.
            link = replace(case.link, bits_per_s=bits_per_s)
            here = replace(case, cluster=cluster, link=link)
            found.append(Point(nodes=count, link=rate(link), predictions=predict(here)))
    return found


def rows(found: Sequence[Point]) -> list[dict[str, object]]:
    """Returns a row per number of nodes with a cell per link.

    A cell holds the best all-reduce / the rows of DistributedLion, each relative to no
    communication, and a star where the exchange of votes does not pay.
    """
    table: dict[int, dict[str, object]] = {}
    for point in found:
        row = table.setdefault(point.nodes, {"nodes": point.nodes})
        rival = point.ratio(best_all_reduce(point.predictions).name)
        ratios = (rival, *map(point.ratio, names_of_ours(point.predictions)))
        star = "" if pays(point.predictions) else " *"
        row[point.link] = " / ".join(_short(ratio) for ratio in ratios) + star
    return list(table.values())


def _short(ratio: float) -> str:
    return f"{ratio:.2f}" if ratio < 9.995 else f"{ratio:.1f}" if ratio < 99.95 else f"{ratio:,.0f}"


def draw(found: Sequence[Point], title: str, path: Path) -> None:
    """Writes a picture of step times over the number of nodes, a panel per link.

    The ending of `path` decides on the format.
    """
    links = list(dict.fromkeys(point.link for point in found))
    drawn, panels = figure(len(links))
    for panel, link in zip(panels, links, strict=True):
        here = [point for point in found if point.link == link]
        nodes = [point.nodes for point in here]
        for name in here[0].predictions:
            if name != PUBLIC:
                own = look(name)
                ratios = [point.ratio(name) for point in here]
                panel.plot(nodes, ratios, own.dash, color=own.color, label=own.label)
        panel.set(title=link, xlabel="nodes")
        panel.set_xscale("log", base=2)
        shown = nodes if len(links) == 1 else nodes[::2]
        panel.set_xticks(shown, [f"{count:,}" for count in shown], minor=False)
    logarithmic(panels[0], "y")
    panels[0].set_ylabel("step time / no communication")
    save(drawn, panels, title, path)
