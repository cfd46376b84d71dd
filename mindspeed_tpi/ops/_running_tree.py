"""A balanced tree over nodes that arrive one after the other."""

from __future__ import annotations

from torch import Tensor

from mindspeed_tpi.ops import schemas


class RunningTree:
    """The f32 tree over a power of two of equally deep nodes, in order of arrival: a binary counter of partial sums, of which
    at most log2(nodes) + 1 exist."""

    def __init__(self) -> None:
        self._nodes: list[tuple[int, Tensor]] = []

    def add(self, node: Tensor) -> None:
        """Take the next node; it belongs to the tree from then on."""
        depth = 0
        while self._nodes and self._nodes[-1][0] == depth:
            node = schemas.residual_add(self._nodes.pop()[1], node)  # tree_sum of two, without a copy of both
            depth += 1
        self._nodes.append((depth, node))

    def root(self) -> Tensor:
        """The sum, after a power of two of nodes."""
        ((_, node),) = self._nodes
        return node
