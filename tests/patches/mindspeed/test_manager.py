"""A manager like MindSpeed's writes its functions onto upstream's names, twice: ours are on top afterwards, options are refused
by name. The real one: `tests/patches/mindspeed/real.py`."""

from __future__ import annotations

import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from mindspeed_tpi.errors import ParityError
from mindspeed_tpi.patches.mindspeed.features_manager.features_manager import check
from tests.parity.conftest import ROOT

MANAGER = """
class MindSpeedPatchesManager:
    @staticmethod
    def apply_patches():
        from megatron.core.tensor_parallel.layers import RowParallelLinear
        RowParallelLinear.forward = theirs
def theirs(self, input_):
    return None
"""
FEATURE_BASE = """
class MindSpeedFeature:
    def __init__(self, feature_name, optimization_level=2):
        self.feature_name, self.optimization_level = feature_name, optimization_level
    def is_need_apply(self, args):
        return self.optimization_level == 0 or getattr(args, self.feature_name, None)
"""
FEATURES = """
class MindSpeedFeaturesManager:
    FEATURES_LIST = []
    @classmethod
    def set_features_list(cls, features_list):
        cls.FEATURES_LIST[:] = features_list
"""
SCRIPT = """
import mindspeed_tpi
from mindspeed_tpi.patches.mindspeed.features_manager.features_manager import FEATURE
from mindspeed.features_manager.features_manager import MindSpeedFeaturesManager as Features
from mindspeed.patch_utils import MindSpeedPatchesManager as Patches, theirs
from megatron.core.tensor_parallel.layers import RowParallelLinear
ours = RowParallelLinear.forward
assert ours.__module__.startswith("mindspeed_tpi.")
for _ in range(2):
    Features.set_features_list(["another"])
    assert [type(f).__name__ for f in Features.FEATURES_LIST] == ["str", FEATURE]
    Patches.apply_patches()
    assert RowParallelLinear.forward is not theirs and RowParallelLinear.forward.__module__ == ours.__module__
assert all(s.state != "overwritten" for s in mindspeed_tpi.patch_status())
print("on top")
"""


def test_ours_are_on_top_after_every_round(tmp_path: Path) -> None:
    package = tmp_path / "mindspeed"
    (package / "features_manager").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "features_manager" / "__init__.py").touch()
    (package / "patch_utils.py").write_text(MANAGER)
    (package / "features_manager" / "feature.py").write_text(FEATURE_BASE)
    (package / "features_manager" / "features_manager.py").write_text(FEATURES)
    facts = tmp_path / "mindspeed-0.16.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: mindspeed\nVersion: 0.16.0\n")
    environment = {**os.environ, "MINDSPEED_TPI": "strict", "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stdout.strip() == "on top", done.stderr


class MC2Feature:
    feature_name = "use_ascend_mc2"

    def is_need_apply(self, args: Namespace) -> bool:
        return bool(getattr(args, self.feature_name, False))


class SomebodysFeature(MC2Feature):
    feature_name = "somebodys"


def test_features_in_use_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINDSPEED_TPI", "strict")
    check([MC2Feature(), SomebodysFeature()], Namespace())
    with pytest.raises(
        ParityError, match="MC2Feature .drop --use-ascend-mc2.*; SomebodysFeature .somebodys., which this"
    ):
        check([MC2Feature(), SomebodysFeature()], Namespace(use_ascend_mc2=True, somebodys=True))
