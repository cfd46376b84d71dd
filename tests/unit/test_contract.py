"""The contract: cuts, canonical form, fingerprint, overrides, refusals."""

from __future__ import annotations

import importlib
import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindspeed_tpi import contract
from mindspeed_tpi.contract import Leaves, NumericsContract, Role
from mindspeed_tpi.errors import BackendError, ContractError, LayoutError


@given(st.integers(1, 200_000), st.sampled_from([("whole", 1), ("tensor", 8), ("expert", 4)]))
def test_leaves_cover_the_reduction_exactly(length: int, role: tuple[Role, int]) -> None:
    cut = NumericsContract(max_etp=4).leaves(length, role[0])
    assert cut.size * cut.count == length and cut.count & (cut.count - 1) == 0
    if length % (2 * cut.count) == 0:  # not limited by the factors of two: as short and as many as asked
        assert cut.size <= 128 and cut.count >= role[1]
        assert cut.count == role[1] or cut.size * 2 > 128


@pytest.mark.parametrize(
    ("length", "role", "size", "count"),
    [
        (2048, "whole", 128, 16),
        (768, "tensor", 96, 8),
        (768, "expert", 96, 8),
        (768, "whole", 96, 8),
        (64, "whole", 64, 1),
        (29_568, "tensor", 231, 128),
        (500, "tensor", 125, 4),
        (500, "whole", 125, 4),
        (576, "tensor", 72, 8),
        (7, "tensor", 7, 1),
    ],
)
def test_leaves_of_known_sizes(length: int, role: Role, size: int, count: int) -> None:
    assert NumericsContract().leaves(length, role) == Leaves(size, count)


@given(st.integers(1, 300_000), st.sampled_from([1, 2, 4, 8]))
def test_the_chunks_of_context_parallel_ranks_are_whole_segments(length: int, ranks: int) -> None:
    cut = NumericsContract().query_segments(length)
    assert cut.size * cut.count == length
    if length % (2 * ranks) == 0:
        assert cut.count % (2 * ranks) == 0


def test_query_segments_of_known_rows() -> None:
    found = [NumericsContract().query_segments(n) for n in (40, 2048, 65_536, 131_072, 98_304, 517)]
    wanted = [(5, 8), (128, 16), (2048, 32), (2048, 64), (1536, 64), (517, 1)]
    assert found == [Leaves(*pair) for pair in wanted]


@given(st.integers(1, 300_000))
def test_vocabulary_leaves(vocab: int) -> None:
    c = NumericsContract()
    cut = c.vocab_leaves(vocab)
    assert cut.size * cut.count >= vocab and cut.count >= c.max_tp
    assert c.padded_vocab(vocab) == cut.size * cut.count
    if vocab >= c.vocab_align_from:
        assert cut.size % c.vocab_align == 0


def test_vocabulary_leaves_of_the_reference_model() -> None:
    assert NumericsContract().vocab_leaves(151_936) == Leaves(1200, 128)
    assert NumericsContract().head_leaves(151_936) == Leaves(19_200, 8)


def test_a_shard_is_a_subtree_or_refused() -> None:
    assert Leaves(125, 4).shard(2) == Leaves(125, 2)
    for ranks in (3, 8):
        with pytest.raises(LayoutError, match="sizes that work: 1, 2, 4"):
            Leaves(125, 4).shard(ranks)


def test_json_round_trip_and_fingerprint() -> None:
    c = NumericsContract(leaf=256, rope_table="ab")
    assert NumericsContract.from_json(c.to_json()) == c
    assert list(json.loads(c.to_json())) == sorted(json.loads(c.to_json()))
    assert c.fingerprint != NumericsContract().fingerprint
    assert c.fingerprint == replace(NumericsContract(), leaf=256, rope_table="ab").fingerprint


def test_the_published_fingerprint_changes_only_with_the_numerics() -> None:
    """A change here is a change of bits for users: bump the version and say so in CHANGELOG under Numerics."""
    assert NumericsContract().fingerprint == "9ee5d3aadf117250ebd270fd51564ef1a2380a0c99a70f8b468d55edffc71aba"


def test_mismatch_names_fields_and_values() -> None:
    with pytest.raises(ContractError, match=r"leaf \(here 128, there 256\).*MINDSPEED_TPI_CONTRACT"):
        NumericsContract().check_same(NumericsContract(leaf=256), "rollout x")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"nope": 1}, "unknown contract field nope"),
        ({"lanes": 48}, "lanes=48 must be a power of two"),
        ({"leaf": 0}, "leaf=0 must be a positive integer"),
        ({"p_dtype": "int8"}, "p_dtype='int8' is not one of float32, input"),
        ({"version": 9}, "version 9 is not known"),
    ],
)
def test_malformed_contracts_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ContractError, match=message):
        NumericsContract().overridden(changes)


def test_environment_overrides(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setattr(contract, "_current", None)
    monkeypatch.setenv("MINDSPEED_TPI_CONTRACT", '{"leaf": 64}')
    assert contract.current().leaf == 64
    path = tmp_path / "contract.json"
    path.write_text('{"leaf": 32}')
    monkeypatch.setattr(contract, "_current", None)
    monkeypatch.setenv("MINDSPEED_TPI_CONTRACT", str(path))
    assert contract.current().leaf == 32
    monkeypatch.setattr(contract, "_current", None)
    monkeypatch.setenv("MINDSPEED_TPI_CONTRACT", "no-such-file")
    with pytest.raises(ContractError, match="neither JSON nor a file"):
        contract.current()


@pytest.mark.parametrize(
    ("backend", "field", "value"),
    [
        ("cpu", "isa", "aarch64" if contract.default().isa == "x86-64" else "x86-64"),
        ("cpu", "attention_gradient", "chain"),
        ("cpu", "leaf_order", "cube"),
    ],
)
def test_a_backend_refuses_an_order_it_does_not_follow(backend: str, field: str, value: str) -> None:
    module = importlib.import_module(f"mindspeed_tpi.ops.backends.{backend}")
    with pytest.raises(BackendError, match=f"{field}="):
        module.check(contract.default().overridden({field: value}))
