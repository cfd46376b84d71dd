"""Replacements in MindSpeed, whose own manager writes functions onto Megatron-core's names: ours hold afterwards."""

from __future__ import annotations

from mindspeed_tpi.patches.mindspeed import patch_utils
from mindspeed_tpi.patches.mindspeed.features_manager import features_manager
from mindspeed_tpi.patching import Patch

PATCHES: tuple[Patch, ...] = (*patch_utils.PATCHES, *features_manager.PATCHES)
KEPT: tuple[str, ...] = ()
