"""Layout strings: what parses, what is refused and by which words."""

from __future__ import annotations

from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindspeed_tpi.errors import InputError, LayoutError
from mindspeed_tpi.parallel.layout import Layout

DEFAULTS = {f.name: f.default for f in fields(Layout)}
ROLLOUT_KEYS = ("tp", "ep", "dp")


@given(st.lists(st.sampled_from(sorted(DEFAULTS)), unique=True))
def test_default_values_parse_in_any_order(keys: list[str]) -> None:
    text = " , ".join(f"{key} = {DEFAULTS[key]}" for key in keys)
    assert Layout.parse(text, "train") == Layout()
    assert str(Layout.parse(text, "train")) == "tp=1"


@given(st.fixed_dictionaries({key: st.integers(1, 8) for key in ("tp", "cp", "pp", "dp", "ep", "etp")}))
def test_ranks_and_canonical_string(sizes: dict[str, int]) -> None:
    layout = Layout(**sizes)
    assert layout.ranks == sizes["tp"] * sizes["cp"] * sizes["pp"] * sizes["dp"]
    named = dict(item.split("=") for item in str(layout).split(","))
    assert named.keys() >= {"tp"} and all(int(value) == sizes[key] for key, value in named.items())


@given(st.text(max_size=20), st.sampled_from(["train", "rollout"]))
def test_any_text_parses_or_is_refused(text: str, side: str) -> None:
    try:
        layout = Layout.parse(text, side)  # type: ignore[arg-type]
    except (InputError, LayoutError) as error:
        assert side in str(error) and "\n" not in str(error).replace(text, "")
    else:
        assert layout.ranks >= 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tp", "'tp' is not key=value; write for example tp=1"),
        ("tensor=2", "unknown key 'tensor'; keys are tp, sp, ep, etp, cp, pp, vpp, dp, cp_type, dispatcher"),
        ("tp=1,tp=1", "tp is given twice; keep one"),
        ("tp=0", "tp=0 must be a positive integer"),
        ("tp=two", "tp=two must be a positive integer"),
        ("tp=\u00b2", "must be a positive integer"),
        ("sp=2", "sp=2 must be 0 or 1"),
        ("cp_type=ring", "cp_type=ring is not one of p2p, allgather, a2a"),
        ("dispatcher=flex", "dispatcher=flex is not one of alltoall, allgather"),
    ],
)
def test_bad_strings_say_how_to_write_them(text: str, message: str) -> None:
    with pytest.raises(InputError, match="train layout") as caught:
        Layout.parse(text, "train")
    assert message in str(caught.value)


@pytest.mark.parametrize("key", [key for key in DEFAULTS if key not in ROLLOUT_KEYS])
def test_the_rollout_refuses_keys_it_cannot_have(key: str) -> None:
    with pytest.raises(LayoutError, match=f"the rollout engine has no {key}; leave it out"):
        Layout.parse(f"{key}={DEFAULTS[key]}", "rollout")


@pytest.mark.parametrize(
    ("text", "ranks"),
    [
        ("tp=8,sp=1", 8),
        ("tp=2,sp=1,ep=2,etp=1,dispatcher=allgather", 2),
        ("dp=4,ep=2,etp=2", 4),
        ("cp=2,cp_type=a2a,ep=2", 2),
        ("pp=3,vpp=5", 3),
        ("tp=2,cp=2,pp=2,dp=2", 16),
    ],
)
def test_training_layouts(text: str, ranks: int) -> None:
    layout = Layout.parse(text, "train")
    assert layout.ranks == ranks
    assert Layout.parse(str(layout), "train") == layout


@pytest.mark.parametrize(("text", "ranks"), [("tp=2", 2), ("tp=2,ep=2", 2), ("tp=2,dp=2,ep=4", 4), ("dp=2", 2)])
def test_rollout_layouts(text: str, ranks: int) -> None:
    assert Layout.parse(text, "rollout").ranks == ranks


@pytest.mark.parametrize(
    ("text", "side", "said"),
    [
        ("tp=3", "train", "tp=3 is no power of two, so sums over ranks are no balanced tree; use tp=2 or tp=4"),
        ("dp=6", "train", "use dp=4 or dp=8"),
        ("tp=16", "train", "tp=16: the numerics contract promises equal bits up to 8; use 8 or less"),
        ("etp=16,dp=16", "train", "promises equal bits up to 8"),
        ("sp=1", "train", "sp=1 shards sequences over tensor-parallel ranks; use tp=2 or more, or sp=0"),
        ("vpp=2", "train", "vpp=2 needs pipeline stages; use pp=2 or more, or vpp=1"),
        (
            "ep=4,tp=2",
            "train",
            "ep*etp=4 must divide the tp*cp*dp=2 ranks of a pipeline stage; with etp=1, sizes of ep that work: 1, 2",
        ),
        ("etp=4,tp=2,pp=2", "train", "with etp=4, sizes of ep that work: none"),
        ("ep=2,tp=4", "rollout", "ep=2, but vLLM spreads experts over all tp*dp=4 ranks or none; use ep=1 or ep=4"),
        ("tp=6", "rollout", "use tp=4 or tp=8"),
    ],
)
def test_sizes_that_do_not_go_together(text: str, side: str, said: str) -> None:
    with pytest.raises(LayoutError, match=f"{side} layout") as caught:
        Layout.parse(text, side)  # type: ignore[arg-type]
    assert said in str(caught.value)


def test_rows_are_whole_spans_of_every_part() -> None:
    assert Layout().row_multiple == 8
    assert Layout(cp=2).row_multiple == 32
