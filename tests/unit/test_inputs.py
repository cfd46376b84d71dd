"""Inputs that users have: a checkpoint, prompt file or environment that does not fit ends with status 2 and one line, before
an engine starts; or it changes nothing."""

from __future__ import annotations

import json
import pwd
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mindspeed_tpi import weights
from mindspeed_tpi.cli import main
from mindspeed_tpi.errors import InputError, ParityError
from mindspeed_tpi.parity import driver, engine, launch
from mindspeed_tpi.parity.request import EngineOptions, Request
from mindspeed_tpi.profiles import Profile
from mindspeed_tpi.weights import update
from tests.models import MOE_FAMILIES, write_model
from tests.unit.engines import Engines, write_tiny

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
K = "model.layers.1.self_attn.k_proj.weight"
LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12\n"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def model(tiny: Path, tmp_path: Path) -> Path:
    """A copy to alter."""
    return shutil.copytree(tiny, tmp_path / "model")


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Engines:
    launcher = Engines()
    monkeypatch.setattr(driver, "EngineProcess", launcher)
    return launcher


def parity(model: Path, *options: str) -> int:
    return main(["parity", "--model", str(model), "--num-prompts", "3", "--max-new-tokens", "4", *options])


def configure(model: Path, **changes: Any) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, **changes}))


def tensors(**changes: Callable[[Tensor], Tensor] | None) -> Callable[[Path], None]:
    """Tensors (by a name with __ for dots) made of their old value, or dropped."""

    def alter(model: Path) -> None:
        held = load_file(model / SINGLE)
        for key, change in changes.items():
            name = key.replace("__", ".")
            old = held.pop(name, torch.zeros(4, 4))
            if change is not None:
                held[name] = change(old).contiguous()
        save_file(held, model / SINGLE)

    return alter


def shard(model: Path, **places: str) -> dict[str, str]:
    """Two shards with an index; `places` says otherwise for some tensors (names with __ for dots)."""
    held = load_file(model / SINGLE)
    index = {name: f"model-0000{1 + (name > K)}-of-00002.safetensors" for name in held}
    for file in set(index.values()):
        save_file({name: t for name, t in held.items() if index[name] == file}, model / file)
    (model / SINGLE).unlink()
    index |= {name.replace("__", "."): place for name, place in places.items()}
    (model / INDEX).write_text(json.dumps({"weight_map": {name: place for name, place in index.items() if place}}))
    return index


def truncated(model: Path) -> None:
    content = (model / SINGLE).read_bytes()
    (model / SINGLE).write_bytes(content[: len(content) // 2])


def only_pickles(model: Path) -> None:
    (model / SINGLE).rename(model / "pytorch_model.bin")


def shards_without_index(model: Path) -> None:
    shard(model)
    (model / INDEX).unlink()


def a_lost_shard(model: Path) -> None:
    shard(model)
    (model / "model-00002-of-00002.safetensors").unlink()


def twice(model: Path) -> None:
    shard(model)
    held = load_file(model / "model-00001-of-00002.safetensors")
    held["model.norm.weight"] = torch.ones(64)
    save_file(held, model / "model-00001-of-00002.safetensors")


def write(name: str, content: str) -> Callable[[Path], None]:
    return lambda model: (model / name).write_text(content) and None  # type: ignore[return-value,func-returns-value]


def config(**changes: Any) -> Callable[[Path], None]:
    return lambda model: configure(model, **changes)


def both(*steps: Callable[[Path], object]) -> Callable[[Path], None]:
    def alter(model: Path) -> None:
        for step in steps:
            step(model)

    return alter


def pad(rows: int) -> Callable[[Tensor], Tensor]:
    return lambda t: torch.cat([t, torch.ones(rows, t.shape[1], dtype=t.dtype)])


def tied_copy(change: Callable[[Tensor], Tensor]) -> Callable[[Path], None]:
    def alter(model: Path) -> None:
        held = load_file(model / SINGLE)
        save_file({**held, HEAD: change(held[EMBEDDING].clone())}, model / SINGLE)
        configure(model, tie_word_embeddings=True)

    return alter


def last_changed(t: Tensor) -> Tensor:
    t[-1, -1] += 1
    return t


BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    # lm_head (vllm#51665)
    "tied, another head": (tied_copy(last_changed), f"{HEAD} differs from {EMBEDDING}, but tie_word_embeddings is true"),
    "tied, a head of another dtype": (tied_copy(Tensor.float), f"{HEAD} differs from {EMBEDDING}"),
    "untied, no head": (tensors(lm_head__weight=None), f"lacks {HEAD} [50, 64]"),
    # tensors
    "missing": (tensors(model__layers__1__self_attn__k_proj__weight=None), f"lacks {K} [64, 64]"),
    "shape": (
        tensors(model__layers__1__self_attn__k_proj__weight=lambda t: t[:32]),
        f"{K} is [32, 64], expected [64, 64]",
    ),
    "rank": (tensors(model__norm__weight=lambda t: t[None]), "model.norm.weight is [1, 64], expected [64]"),
    "dtype": (tensors(model__norm__weight=lambda t: t.to(torch.int8)), "model.norm.weight is I8, expected F32, F16 or BF16"),
    "biases": (
        tensors(model__layers__0__self_attn__q_proj__bias=lambda t: t),
        "has unexpected model.layers.0.self_attn.q_proj.bias",
    ),
    "extra layers": (config(num_hidden_layers=3), "has unexpected model.layers.3.input_layernorm.weight [64], "),
    "missing layers": (config(num_hidden_layers=6), "lacks model.layers.4.input_layernorm.weight [64], "),
    "padding rows": (
        tensors(model__embed_tokens__weight=pad(14), lm_head__weight=pad(14)),
        f"{EMBEDDING} is [64, 64], expected [50, 64]: vLLM takes no padding rows; set vocab_size to 64",
    ),
    "vocabulary too large": (config(vocab_size=60), f"{EMBEDDING} is [50, 64], expected [60, 64]"),
    "another family": (config(architectures=["Qwen3ForCausalLM"]), "lacks model.layers.0.self_attn.q_norm.weight [16]"),
    # files
    "Git LFS": (write(SINGLE, LFS), "model.safetensors is a Git LFS pointer, not the file itself; run `git lfs pull`"),
    "Git LFS index": (write(INDEX, LFS), f"{INDEX} is a Git LFS pointer"),
    "empty": (write(SINGLE, ""), "is no safetensors file (0 bytes"),
    "noise": (write(SINGLE, "x" * 100), "is no safetensors file (100 bytes"),
    "header is no JSON": (lambda m: (m / SINGLE).write_bytes(b"\x04\0\0\0\0\0\0\0nope"), "its header cannot be read"),
    "truncated": (truncated, "is truncated: "),
    "truncated header": (lambda m: (m / SINGLE).write_bytes(b"\xff\0\0\0\0\0\0\0{"), "is truncated: 9 bytes, its header asks"),
    "pickles only": (only_pickles, "has pytorch_model.bin but no safetensors file; convert it"),
    "no weights": (lambda m: (m / SINGLE).unlink(), "has no safetensors file; expected model.safetensors, or shards"),
    "no index": (shards_without_index, f"has model-00001-of-00002.safetensors, model-00002-of-00002.safetensors but neither {INDEX}"),
    "consolidated, no index": (
        lambda m: shutil.copy(m / SINGLE, m / "consolidated.safetensors"),
        "has consolidated.safetensors beside model.safetensors and no",
    ),
    "lost shard": (a_lost_shard, "model-00002-of-00002.safetensors is missing"),
    "index is no JSON": (both(shard, write(INDEX, "{")), f"{INDEX}: JSONDecodeError"),
    "index is empty": (both(shard, write(INDEX, '{"weight_map": {}}')), "weight_map must map tensor names to file names"),
    "index points outside": (
        lambda m: shard(m, lm_head__weight="../other.safetensors"),
        "names '../other.safetensors', which is no safetensors file of its directory",
    ),
    "index names another file": (
        lambda m: shard(m, lm_head__weight="model-00002-of-00002.safetensors"),
        "names model-00002-of-00002.safetensors",
    ),
    "index lacks a tensor": (lambda m: shard(m, lm_head__weight=""), f"{INDEX} does not name it"),
    "index names too many": (
        lambda m: shard(m, other="model-00002-of-00002.safetensors"),
        "names model-00002-of-00002.safetensors for other, which is not there",
    ),
    "in two files": (twice, "model.norm.weight is in model-00001-of-00002.safetensors and in model-00002-of-00002.safetensors"),
    # configurations
    "no config": (lambda m: (m / "config.json").unlink(), "it has no config.json"),
    "config is no JSON": (write("config.json", LFS), "cannot read"),
    "sliding window": (config(sliding_window=8), "sliding_window=8 is not supported"),
    "Qwen2-MoE windows": (
        config(
            architectures=["Qwen2MoeForCausalLM"], use_sliding_window=True, max_window_layers=4, num_experts=8,
            num_experts_per_tok=2, moe_intermediate_size=8, shared_expert_intermediate_size=8,
        ),
        "mixes sliding-window and full-attention layers",
    ),
    "head_dim": (config(head_dim=12), "head_dim=12 is not supported"),
    "quantised": (config(quantization_config={"quant_method": "fp8"}), "quantization_config"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_checkpoints_are_2_before_an_engine_starts(
    model: Path, engines: Engines, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    alter, said = BAD[case]
    alter(model)
    assert parity(model) == 2
    text = capsys.readouterr().err
    assert text.count("\n") == 1 and text.startswith("error: ") and len(text) < 1000, text
    assert said in text
    assert not engines.commands


def stale(model: Path) -> None:
    shard(model)
    held = {name: t + 1 for name, t in load_file(model / "model-00001-of-00002.safetensors").items()}
    save_file(held, model / "model-00001-of-00003.safetensors")
    save_file({"anything": torch.ones(2)}, model / "consolidated.safetensors")


GOOD: dict[str, Callable[[Path], object]] = {
    "as it is": lambda model: None,
    "tied, an equal copy": tied_copy(lambda t: t),
    "shards": shard,
    "the index decides": stale,
    "f32": tensors(model__norm__weight=Tensor.float),
    "rotary buffers": tensors(model__layers__0__self_attn__rotary_emb__inv_freq=lambda t: t),
    "pickles beside": write("pytorch_model.bin", "x"),
}


@pytest.mark.parametrize("case", GOOD)
def test_good_checkpoints_pass(model: Path, engines: Engines, case: str) -> None:
    held = load_file(model / SINGLE)
    GOOD[case](model)
    assert parity(model) == 0
    read = dict(weights.Checkpoint(model))
    assert all(torch.equal(read[name].to(t.dtype), t) for name, t in held.items() if name != HEAD)


@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_checkpoints_with_experts_pass(tmp_path: Path, family: str) -> None:
    model = write_model(
        tmp_path, family, layers=2, hidden=96, heads=6, kv_heads=2, head_dim=16, ffn=96, vocab=50, experts=8, moe_ffn=32
    )
    weights.check(model, Profile.load(model))
    held = load_file(model / SINGLE)
    first = next(name for name in held if ".experts.3." in name)
    del held[first]
    save_file(held, model / SINGLE)
    with pytest.raises(InputError, match=f"lacks {first}"):
        weights.check(model, Profile.load(model))


def test_a_weight_update_is_checked_before_an_engine_starts(tiny: Path, model: Path, engines: Engines) -> None:
    tensors(model__layers__1__self_attn__k_proj__weight=None)(model)
    request = Request(str(tiny), ((1, 2),), weight_updates=(str(model),))
    with pytest.raises(InputError, match=f"lacks {K}"):
        driver.run(request, launch=engines)
    assert not engines.commands


@pytest.mark.parametrize("where", ["run", "run_matrix"])
def test_a_sequence_beyond_the_positions_is_refused_with_the_key(tiny: Path, engines: Engines, where: str) -> None:
    request = Request(str(tiny), ((1,) * 250,), max_new_tokens=8)
    with pytest.raises(InputError, match="exceed the model's 256 positions.*max_position_embeddings"):
        driver.run(request, launch=engines) if where == "run" else driver.run_matrix(
            request, ["tp=1"], ["tp=1"], launch=engines
        )
    too_long = replace(request, prompts=((1,),), engine=EngineOptions(max_model_len=512))
    with pytest.raises(
        InputError, match="max_model_len=512 exceeds the model's 256 positions.*max_position_embeddings"
    ):
        engine.Engine(too_long)


def test_line_separators_inside_a_string(model: Path, engines: Engines, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    lines = [json.dumps({"prompt_token_ids": [n], "note": "a\u2028b\u2029c\x85d"}, ensure_ascii=False) for n in (1, 2)]
    file.write_bytes(("\ufeff" + "\r\n".join(lines)).encode())
    assert parity(model, "--prompts", str(file)) == 0
    assert engines.seen[0][2].prompts == ((1,), (2,))


# The environment


SCHEDULER = {
    "WORLD_SIZE": "8",
    "RANK": "3",
    "LOCAL_RANK": "3",
    "LOCAL_WORLD_SIZE": "8",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "1",
    "TORCHELASTIC_RUN_ID": "x",
    "VLLM_DP_SIZE": "4",
}


def test_a_job_schedulers_variables_do_not_reach_our_processes(
    model: Path, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**SCHEDULER, "GLOO_SOCKET_IFNAME": "lo"}.items():
        monkeypatch.setenv(name, value)
    assert parity(model) == 0
    for _, environment, _ in engines.seen:
        assert not set(SCHEDULER) & set(environment) and environment["GLOO_SOCKET_IFNAME"] == "lo"


@pytest.mark.parametrize(
    ("value", "ranks", "wanted"), [("4,2", 1, "4"), ("4,2", 2, "2"), (" 3 ", 1, "3"), ("1", 4, "1")]
)
def test_omp_num_threads_may_be_a_list(monkeypatch: pytest.MonkeyPatch, value: str, ranks: int, wanted: str) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    assert launch.environment(False, ranks)["OMP_NUM_THREADS"] == wanted


@pytest.mark.parametrize("value", ["four", "0", ",2", "-1"])
def test_omp_num_threads_that_is_no_number_is_2(
    model: Path, engines: Engines, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    assert parity(model) == 2
    assert f"OMP_NUM_THREADS={value!r} must be a positive integer" in capsys.readouterr().err


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.11 brought the safe path")
def test_modules_in_the_working_directory_are_not_imported(tmp_path: Path) -> None:
    for name in ("random.py", "torch.py"):
        (tmp_path / name).write_text("raise SystemExit('the wrong module')")
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("raise SystemExit('the wrong package')")
    command = [sys.executable, "-m", "mindspeed_tpi.parity.recompute", "--help"]
    ended = subprocess.run(command, cwd=tmp_path, env=launch.environment(False, 1), capture_output=True, text=True)
    assert ended.returncode == 0 and "usage:" in ended.stdout, ended.stderr


def test_without_a_home(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """As for a container's numeric user."""
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)

    def nobody(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", nobody)
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    from mindspeed_tpi.cli.demo import default_cache

    with pytest.raises(InputError, match="HOME is not set.*--cache"):
        default_cache()


def test_small_shared_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Docker gives /dev/shm 64 MB, some clusters 2."""
    free = {"/dev/shm": 2 << 20, str(tmp_path): 100 << 20}
    monkeypatch.setattr(update.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(update.shutil, "disk_usage", lambda folder: _Usage(free[folder]))
    assert update._exchange_folder(1 << 19) == "/dev/shm"
    assert update._exchange_folder(50 << 20) == str(tmp_path)
    with pytest.raises(
        ParityError, match="200 MiB of a weight update find no room: /dev/shm has 2 MiB free, .* 100 MiB free; enlarge"
    ):
        update._exchange_folder(200 << 20)


class _Usage:
    def __init__(self, free: int) -> None:
        self.free = free
