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
        assert layout.ranks == 1


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
    "item", ["tp=2", "sp=1", "ep=2", "etp=2", "cp=2", "pp=2", "vpp=2", "dp=2", "cp_type=a2a", "dispatcher=allgather"]
)
def test_what_is_not_supported_yet_is_refused_by_name(item: str) -> None:
    with pytest.raises(LayoutError, match=f"{item} is not supported yet; {item.partition('=')[0]} can be"):
        Layout.parse(item, "train")
