"""The patching core on stub modules: apply, late apply, refuse, undo."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from mindspeed_tpi.errors import PatchError
from mindspeed_tpi.patching import Patch, Registry

SOURCE = """
def double(x): return 2 * x
class Base:
    def inherited(self): return "base"
class Layer(Base):
    def forward(self, x): return x
    @staticmethod
    def helper(a, b): return a + b
    @classmethod
    def make(cls, n): return n
"""


@pytest.fixture
def upstream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A package `stub_up` with a module and a user of it; nothing of it is imported yet."""
    package = tmp_path / "stub_up"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "core.py").write_text(SOURCE)
    (package / "user.py").write_text("from stub_up.core import double\ndef twice(x): return double(x)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    before = list(sys.meta_path)
    yield "stub_up"
    for name in [n for n in sys.modules if n.startswith("stub_up")]:
        del sys.modules[name]
    sys.meta_path[:] = before


def patch(target: str, parameters: tuple[str, ...] | None = ("x",), **options: Any) -> Patch:
    def factory(original: Any) -> Any:
        return options.pop("replacement", lambda *args: "patched")

    replacement = options.pop("replacement", None)
    if replacement is not None:
        factory = lambda original: replacement  # noqa: E731
    defaults: dict[str, Any] = {"reason": "test", "versions": "packaging>=1", "until": "never"}
    return Patch(target, factory, parameters=parameters, **{**defaults, **options})


def test_applies_on_import_before_others_bind_the_name(upstream: str) -> None:
    registry = Registry([patch("stub_up.core:double")], strict=True)
    registry.apply()
    assert [s.state for s in registry.status()] == ["pending"]
    user = importlib.import_module("stub_up.user")
    assert user.twice(1) == "patched"
    assert [s.state for s in registry.status()] == ["applied"]


def test_undo_restores_the_very_objects(upstream: str) -> None:
    core = importlib.import_module("stub_up.core")
    user = importlib.import_module("stub_up.user")
    originals = {n: vars(core.Layer).get(n) for n in ("forward", "helper", "make", "inherited")}
    double = core.double
    registry = Registry(
        [
            patch("stub_up.core:double"),
            patch("stub_up.core:Layer.forward", ("self", "x")),
            patch("stub_up.core:Layer.helper", ("a", "b"), replacement=staticmethod(lambda a, b: "patched")),
            patch("stub_up.core:Layer.make", ("cls", "n"), replacement=classmethod(lambda cls, n: "patched")),
            patch("stub_up.core:Layer.added", None, kind="add", replacement=1),
        ]
    )
    registry.apply()
    registry.apply()  # a no-op
    assert user.twice(1) == "patched" and core.Layer().forward(1) == "patched"
    assert core.Layer.helper(1, 2) == "patched" and core.Layer.make(1) == "patched" and core.Layer.added == 1
    registry.revert()
    assert core.double is double and user.double is double
    assert {n: vars(core.Layer).get(n) for n in originals} == originals
    assert not hasattr(core.Layer, "added")
    registry.apply()
    registry.revert()
    assert core.double is double


def test_refuses_to_revert_what_is_not_ours(upstream: str) -> None:
    core = importlib.import_module("stub_up.core")
    registry = Registry([patch("stub_up.core:double")])
    registry.apply()
    core.double = "somebody else's"
    with pytest.raises(PatchError, match="cannot revert stub_up.core:double: somebody replaced it"):
        registry.revert()
    assert core.double == "somebody else's"


def test_every_name_of_a_function_is_found(upstream: str) -> None:
    """Names bound before a patch are re-bound with it; one bound elsewhere, or made later, is reported."""
    core, user = importlib.import_module("stub_up.core"), importlib.import_module("stub_up.user")
    original = core.double
    registry = Registry([patch("stub_up.core:double")])
    registry.apply()
    assert user.double is core.double is not original and not registry.stray_aliases()
    user.other = original
    assert registry.stray_aliases() == ["stub_up.user:other is the original of stub_up.core:double"]
    registry.revert()
    assert user.double is core.double is original


def test_what_another_package_had_put_there_is_its_own(upstream: str) -> None:
    """MindSpeed's replacements live in its own modules under their own names, beneath ours."""
    core, user = importlib.import_module("stub_up.core"), importlib.import_module("stub_up.user")

    def theirs(x: int) -> int:
        return 2 * x

    core.double, user.theirs = theirs, theirs
    registry = Registry([patch("stub_up.core:double")])
    registry.apply()
    user.again = theirs
    assert core.double is not theirs and registry.stray_aliases() == []
    registry.revert()


def test_state_is_read_from_the_target(upstream: str) -> None:
    """A method, a whole class or another name that somebody replaced afterwards; `apply` goes on top and can be undone."""
    core, user = importlib.import_module("stub_up.core"), importlib.import_module("stub_up.user")
    registry = Registry([patch("stub_up.core:double"), patch("stub_up.core:Layer.forward", ("self", "x"))])
    registry.apply()
    assert registry.intact() and not registry.disturbed()

    def theirs(*args: Any) -> str:
        return "theirs"

    class Other(core.Layer):
        forward = theirs

    for owner, name, value in ((core.Layer, "forward", theirs), (core, "Layer", Other), (user, "double", theirs)):
        setattr(owner, name, value)
        assert not registry.intact() and "theirs" in registry.disturbed()[0] and __name__ in registry.disturbed()[0]
        assert [s.state for s in registry.status()].count("overwritten") == 1
        registry.apply()
        assert registry.intact() and [s.state for s in registry.status()] == ["applied"] * 2
        assert core.Layer().forward(1) == core.double(1) == user.twice(1) == "patched"
    registry.revert()
    assert core.Layer is Other and core.Layer().forward(1) == "theirs" and user.twice(1) == core.double(1) == 2


def test_a_subclass_in_the_place_of_a_class_may_inherit_our_replacement(upstream: str) -> None:
    core = importlib.import_module("stub_up.core")
    registry = Registry([patch("stub_up.core:Layer.forward", ("self", "x"))])
    registry.apply()
    core.Layer = type("Sub", (core.Layer,), {})
    assert registry.intact() and [s.state for s in registry.status()] == ["applied"]


@pytest.mark.parametrize("before", [False, True])
def test_kept_code_is_upstreams_own(upstream: str, before: bool) -> None:
    """What is kept counts as upstream's only where upstream's file wrote it, and is watched like a replacement."""
    target = "stub_up.core:Layer.forward"
    if before:
        importlib.import_module("stub_up.core").Layer.forward = lambda self, x: x + 1
    registry = Registry([], kept=(target, "stub_up.core:Layer.gone"))
    registry.apply()
    core = importlib.import_module("stub_up.core")
    assert registry.kept_functions() == ({} if before else {target: core.Layer.forward})
    core.Layer.forward = lambda self, x: x + 1
    assert registry.intact() == before
    registry.revert()


def test_too_late_is_an_error_in_strict_mode_and_applies_otherwise(upstream: str, caplog: Any) -> None:
    core = importlib.import_module("stub_up.core")
    with pytest.raises(PatchError, match="imported too late: stub_up.core came before mindspeed_tpi"):
        Registry([patch("stub_up.core:double")], strict=True).apply()
    registry = Registry([patch("stub_up.core:double")])
    registry.apply()
    assert core.double(1) == "patched" and "applies late to stub_up.core" in caplog.text
    registry.revert()


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (patch("stub_up.core:gone"), "the target does not exist"),
        (patch("stub_up.core:Gone.forward"), "'Gone' does not exist"),
        (patch("stub_up.core:double", ("x", "y")), r"written for parameters \(x, y\), upstream has \(x\)"),
        (patch("stub_up.core:double", versions="packaging<1"), "needs packaging<1, found packaging"),
        (patch("stub_up.core:double", versions="no-such-dist>=1"), "no-such-dist not installed"),
        (patch("stub_up.core:double", None, kind="add"), "upstream defines it already"),
    ],
)
def test_refusals(upstream: str, bad: Patch, message: str, caplog: Any) -> None:
    strict = Registry([bad], strict=True)
    strict.apply()
    with pytest.raises(PatchError, match=message):
        importlib.import_module("stub_up.core")
    strict.revert()
    for name in ("stub_up.core", "stub_up"):
        sys.modules.pop(name, None)
    relaxed = Registry([bad])
    relaxed.apply()
    core = importlib.import_module("stub_up.core")
    assert core.double(2) == 4 and [s.state for s in relaxed.status()] == ["refused"]
    assert "runs as upstream wrote it" in caplog.text
    relaxed.revert()


def test_one_target_cannot_be_patched_twice() -> None:
    with pytest.raises(PatchError, match="patched twice: a:b"):
        Registry([patch("a:b"), patch("a:b")])


def test_not_needed_says_why(upstream: str) -> None:
    registry = Registry([patch("stub_up.core:double", applies=lambda: "an accelerator is present")], strict=True)
    importlib.import_module("stub_up.core")
    registry.apply()
    (status,) = registry.status()
    assert (status.state, status.why) == ("not needed", "an accelerator is present")


@pytest.mark.parametrize("late", [False, True])
def test_an_optional_target_may_be_absent(upstream: str, late: bool) -> None:
    registry = Registry([patch("stub_up.core:newer", optional=True)], strict=True)
    for step in (registry.apply, lambda: importlib.import_module("stub_up.core"))[:: -1 if late else 1]:
        step()
    (status,) = registry.status()
    assert (status.state, status.why) == ("not needed", "the installed upstream does not have it")
    registry.revert()
    with pytest.raises(PatchError, match="imported too late: stub_up.core"):
        Registry([patch("stub_up.core:double", optional=True)], strict=True).apply()
