"""Linear operators: the contract's bits, whatever the rows, ranks, spans and threads."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mindspeed_tpi import contract
from mindspeed_tpi.errors import BackendError
from mindspeed_tpi.ops._running_tree import RunningTree
from mindspeed_tpi.ops.backends import cpu, reference
from tests.ops import cases
from tests.ops.bits import assert_same_bits
from tests.ops.equality import check_drawn

OPERATORS = (
    "linear", "linear_dx", "linear_dw", "linear_db", "grouped_linear", "grouped_linear_dx", "tree_sum",
)  # fmt: skip


@pytest.mark.parametrize("operator", OPERATORS)
@given(st.data())
def test_cpu_equals_reference(operator: str, data: st.DataObject) -> None:
    check_drawn(operator, data)


@given(st.data())
def test_ranks_that_split_k_give_the_same_bits(data: st.DataObject) -> None:
    s = cases.Drawn(data)
    dtype, ranks = s.choice(cases.DTYPES), s.choice((1, 2, 4, 8))
    cut = contract.current().leaves(k := ranks * s.integer(1, 40) * s.choice((1, 8)), "tensor")
    x, weight = cases.operand(s, (s.integer(1, 4), k), dtype), cases.operand(s, (s.integer(1, 9), k), dtype)
    bias = s.choice((None, cases.values(s, weight.shape[:1], dtype)))
    whole = cpu.linear(x, weight, bias, cut.size, cut.count, None)
    if cut.count < ranks:
        return
    own, part = cut.shard(ranks), k // ranks
    roots = [
        cpu.linear(x[:, i : i + part], weight[:, i : i + part], None, own.size, own.count, torch.float32)
        for i in range(0, k, part)
    ]
    assert_same_bits(cpu.tree_sum(torch.stack(roots), bias, dtype), whole)


@given(st.data())
def test_ranks_that_split_n_give_the_same_dx(data: st.DataObject) -> None:
    s = cases.Drawn(data)
    dtype, ranks = s.choice(cases.DTYPES), s.choice((1, 2, 4, 8))
    cut = contract.current().leaves(n := ranks * s.integer(1, 40) * s.choice((1, 8)), "tensor")
    dy, weight = cases.operand(s, (s.integer(1, 4), n), dtype), cases.operand(s, (n, s.integer(1, 9)), dtype)
    whole = cpu.linear_dx(dy, weight, cut.size, cut.count, None, False)
    if cut.count < ranks:
        return
    own, part = cut.shard(ranks), n // ranks
    roots = [
        cpu.linear_dx(dy[:, i : i + part], weight[i : i + part], own.size, own.count, torch.float32, False)
        for i in range(0, n, part)
    ]
    assert_same_bits(cpu.tree_sum(torch.stack(roots), None, dtype), whole)


@given(st.data())
def test_ranks_that_split_gate_and_up_give_the_same_dx(data: st.DataObject) -> None:
    s = cases.Drawn(data)
    dtype, ranks = s.choice(cases.DTYPES), s.choice((1, 2, 4, 8))
    f = ranks * s.integer(1, 40) * s.choice((1, 8))
    dy, weight = cases.operand(s, (s.integer(1, 4), 2 * f), dtype), cases.operand(s, (2 * f, s.integer(1, 9)), dtype)
    cut = contract.current().leaves(f, "tensor")
    whole = cpu.linear_dx(dy, weight, cut.size, cut.count, None, True)
    if cut.count < ranks:
        return
    own = cut.shard(ranks)
    shards = [torch.cat((half, f + half)) for half in torch.arange(f).chunk(ranks)]  # each rank's [gate; up]
    roots = [cpu.linear_dx(dy[:, i], weight[i], own.size, own.count, torch.float32, True) for i in shards]
    assert_same_bits(cpu.tree_sum(torch.stack(roots), None, dtype), whole)


def test_a_leaf_of_a_pair_is_one_chain() -> None:
    g = torch.Generator().manual_seed(3)
    dy, weight = torch.randn(5, 1536, generator=g), torch.randn(1536, 33, generator=g)
    of_pairs = torch.arange(1536).view(2, 8, 96).transpose(0, 1).flatten()  # gate 0, up 0, gate 1, ...
    expected = cpu.linear_dx(dy[:, of_pairs], weight[of_pairs], 192, 8, None, False)
    assert_same_bits(cpu.linear_dx(dy, weight, 96, 8, None, True), expected)
    assert not torch.equal(cpu.linear_dx(dy, weight, 192, 8, None, False), expected)


@given(st.data())
def test_ranks_that_split_a_row_cut_the_same_spans(data: st.DataObject) -> None:
    """Every length that the ranks can share, also one that is no multiple of max_tp (20 tokens over 2 ranks)."""
    s = cases.Drawn(data)
    ranks = s.choice((1, 2, 4, 8))
    tokens = ranks * s.integer(1, 24)
    dy, x = cases.operand(s, (tokens, 5), torch.float32), cases.operand(s, (tokens, 3), torch.float32)
    whole, roots = (torch.zeros(5, 3), torch.zeros(5)), []
    cpu.linear_dw(dy, x, whole[0], 1, None, 8, False)
    cpu.linear_db(dy, whole[1], 1, None, 8)
    for part in torch.arange(tokens).chunk(ranks):
        root = torch.zeros(5, 3), torch.zeros(5)
        cpu.linear_dw(dy[part], x[part], root[0], 1, None, 8 // ranks, False)
        cpu.linear_db(dy[part], root[1], 1, None, 8 // ranks)
        roots.append(root)
    for one, several in zip(whole, zip(*roots, strict=True), strict=True):
        assert torch.equal(cpu.tree_sum(torch.stack(several), None, torch.float32).nan_to_num(7.0), one.nan_to_num(7.0))


@given(st.data())
def test_a_row_and_a_column_do_not_depend_on_the_others(data: st.DataObject) -> None:
    s = cases.Drawn(data)
    x, weight, bias, *rest = cases.linear(s).args
    x = x.reshape(-1, x.shape[-1])
    whole = cpu.linear(x, weight, bias, *rest)
    for m in range(len(x)):
        assert_same_bits(cpu.linear(x[m : m + 1], weight, bias, *rest)[0], whole[m])
    half = len(weight) // 2
    assert_same_bits(cpu.linear(x, weight[half:], None if bias is None else bias[half:], *rest), whole[:, half:])


@given(st.data())
def test_experts_are_linears(data: st.DataObject) -> None:
    x, weight, offsets, *rest = cases.grouped_linear(cases.Drawn(data)).args
    y = cpu.grouped_linear(x, weight, offsets, *rest)
    for e, (first, last) in enumerate(zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)):
        assert_same_bits(y[first:last], cpu.linear(x[first:last], weight[e], None, *rest))


@given(st.data())
def test_weight_gradients_of_a_batch_are_those_of_its_rows(data: st.DataObject) -> None:
    s = cases.Drawn(data)
    dtype, batch, length, spans = s.choice(cases.DTYPES), s.integer(1, 4), s.integer(1, 8), cases.spans(s)
    dy = cases.operand(s, (length * batch, s.integer(1, 9)), dtype)
    x = cases.operand(s, (length * batch, s.integer(1, 9)), dtype)
    start = cases.values(s, (dy.shape[1], x.shape[1]), torch.float32)
    whole, by_row, packed = start.clone(), start.clone(), start.clone()
    cpu.linear_dw(dy, x, whole, batch, None, spans, False)
    for b in range(batch):
        cpu.linear_dw(dy[b::batch], x[b::batch], by_row, 1, None, spans, False)
    assert_same_bits(by_row, whole, "row by row")
    order = torch.arange(length * batch).view(length, batch).T.reshape(-1)
    offsets = torch.arange(batch + 1) * length
    cpu.linear_dw(dy[order], x[order], packed, 1, offsets, spans, False)
    assert_same_bits(packed, whole, "packed")


@given(st.data())
def test_ranks_that_own_spans_give_the_same_bias_gradient(data: st.DataObject) -> None:
    s = cases.Drawn(data)
    ranks, spans = s.choice((1, 2, 4, 8)), 8
    dy = cases.operand(s, (spans * s.integer(1, 3), s.integer(1, 9)), s.choice(cases.DTYPES))
    whole = torch.zeros(dy.shape[1])
    cpu.linear_db(dy, whole, 1, None, spans)
    roots = [torch.zeros(dy.shape[1]) for _ in range(ranks)]
    for root, part in zip(roots, dy.chunk(ranks), strict=True):
        cpu.linear_db(part, root, 1, None, spans // ranks)
    assert_same_bits(cpu.tree_sum(torch.stack(roots), None, torch.float32), whole)


@given(st.data())
def test_a_tree_over_ranks_may_be_taken_in_two_steps(data: st.DataObject) -> None:
    """Expert-tensor-parallel ranks inside tensor-parallel ones: aligned groups are subtrees."""
    s = cases.Drawn(data)
    parts, bias, dtype = cases.tree_sum(s).args
    groups = parts.split(1 << s.integer(0, len(parts).bit_length() - 1))
    roots = torch.stack([cpu.tree_sum(group, None, torch.float32) for group in groups])
    assert_same_bits(cpu.tree_sum(roots, bias, dtype), cpu.tree_sum(parts, bias, dtype))


@given(st.data())
def test_a_running_tree_is_the_tree(data: st.DataObject) -> None:
    parts, _, _ = cases.tree_sum(cases.Drawn(data)).args
    running = RunningTree()
    for part in parts:
        running.add(part)
    assert_same_bits(running.root(), cpu.tree_sum(parts, None, torch.float32))


@given(st.data())
def test_a_row_continues_over_parts_of_its_spans(data: st.DataObject) -> None:
    s = cases.Drawn(data)
    dtype, parts, spans = s.choice(cases.DTYPES), s.choice((2, 4, 8)), 8
    tokens = spans * s.integer(1, 4)
    dy, x = cases.operand(s, (tokens, s.integer(1, 9)), dtype), cases.operand(s, (tokens, s.integer(1, 9)), dtype)
    whole = torch.zeros(dy.shape[1], x.shape[1])
    cpu.linear_dw(dy, x, whole, 1, None, spans, False)
    roots = [torch.zeros_like(whole) for _ in range(parts)]
    for root, g, a in zip(roots, dy.chunk(parts), x.chunk(parts), strict=True):
        cpu.linear_dw(g, a, root, 1, None, spans // parts, False)
    assert_same_bits(cpu.tree_sum(torch.stack(roots), None, torch.float32), whole)


@pytest.mark.parametrize("backend", [cpu, reference])
def test_errors(backend: object) -> None:
    x, weight = torch.zeros(2, 8), torch.zeros(3, 8)
    for call in (
        lambda b: b.linear(x, torch.zeros(3, 7), None, 8, 1, None),
        lambda b: b.linear(x, weight.bfloat16(), None, 8, 1, None),
        lambda b: b.linear(x, weight, None, 2, 2, None),
        lambda b: b.linear(x, weight, None, 3, 3, None),
        lambda b: b.linear(x.double(), weight.double(), None, 8, 1, None),
        lambda b: b.linear_dx(x, weight, 8, 1, None, False),
        lambda b: b.linear_dx(torch.zeros(2, 6), torch.zeros(6, 4), 4, 1, None, True),
        lambda b: b.linear_dw(x, x, torch.zeros(8, 8), 3, None, 1, False),
        lambda b: b.linear_dw(x, x, torch.zeros(8, 8), 1, None, 3, False),
        lambda b: b.linear_db(x, torch.zeros(8, dtype=torch.bfloat16), 1, None, 1),
        lambda b: b.grouped_linear(x, weight[None], torch.tensor([0, 3]), 8, 1, None),
        lambda b: b.tree_sum(torch.zeros(3, 4), None, torch.float32),
    ):
        with pytest.raises(BackendError):
            call(backend)
