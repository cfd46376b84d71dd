"""Exit statuses, refusals and documents of the command line, with stand-ins for the engines."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mindspeed_tpi.cli import demo, main
from mindspeed_tpi.parity import driver
from mindspeed_tpi.parity.request import EngineOptions
from tests.unit.engines import Engines, write_tiny

SCHEMA = {
    "tokens",
    "nonzero",
    "max_abs",
    "mean_abs",
    "contract",
    "model",
    "train",
    "rollout",
    "backend",
    "op_calls",
    "seconds",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Engines:
    launcher = Engines()
    monkeypatch.setattr(driver, "EngineProcess", launcher)
    return launcher


def parity(model: Path, *options: str | Path) -> int:
    return main(["parity", "--model", str(model), "--num-prompts", "3", "--max-new-tokens", "4", *map(str, options)])


def refused(capsys: pytest.CaptureFixture[str]) -> str:
    """What was said on stderr, which must be one line."""
    text = capsys.readouterr().err
    assert text.count("\n") == 1 and text.endswith("\n"), text
    return text


def test_exact_is_0(model: Path, engines: Engines, capsys: pytest.CaptureFixture[str]) -> None:
    assert parity(model) == 0
    assert "logdiff is exactly 0 on all 12 tokens" in capsys.readouterr().out
    assert [(module, environment["MINDSPEED_TPI"]) for module, environment, _ in engines.seen] == [
        ("engine", "strict"),
        ("trainer", "strict"),
    ]


def one_bit(logprobs: Tensor) -> Tensor:
    logprobs[-1] = torch.nextafter(logprobs[-1], torch.tensor(0.0))
    return logprobs


def one_nan(logprobs: Tensor) -> Tensor:
    logprobs[-1] = math.nan
    return logprobs


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (one_bit, "1 of 12 tokens differ"),
        (one_nan, "1 are NaN"),
        (lambda logprobs: logprobs[:-1], "1 values are missing"),
        (lambda logprobs: torch.cat([logprobs, logprobs[:1]]), "1 values are missing or were not asked for"),
    ],
)
def test_anything_but_equal_bits_is_1(
    model: Path, engines: Engines, capsys: pytest.CaptureFixture[str], spoil: object, said: str
) -> None:
    engines.spoil = spoil  # type: ignore[assignment]
    assert parity(model) == 1
    assert said in capsys.readouterr().out


def test_a_failed_engine_is_3_with_the_tail_of_its_log(
    model: Path, engines: Engines, capsys: pytest.CaptureFixture[str]
) -> None:
    engines.fail = ("trainer", -9, "first\n" * 50 + "progress 1\rprogress 2\nlast words\n")
    assert parity(model) == 3
    said = capsys.readouterr().err
    assert "the parity trainer (tp=1) failed (killed by signal 9)" in said
    assert said.endswith("progress 2\n  last words\n") and said.count("first") < 50
    assert sorted(engines.ended) == ["engine", "trainer"]


def test_an_engine_that_writes_nothing_is_3(model: Path, engines: Engines, capsys: pytest.CaptureFixture[str]) -> None:
    engines.fail = ("engine", 0, "")
    assert parity(model) == 3
    assert "wrote no result" in capsys.readouterr().err


def test_what_an_engine_refuses_is_2_with_its_own_line(
    model: Path, engines: Engines, capsys: pytest.CaptureFixture[str]
) -> None:
    engines.fail = ("engine", 2, "noise\nerror: model family 'mamba' is not supported; use llama\n")
    assert parity(model) == 2
    assert capsys.readouterr().err.splitlines()[-1] == "error: model family 'mamba' is not supported; use llama"
    assert "trainer" in engines.ended and not any(module == "trainer" for module, *_ in engines.seen)


def test_json_and_stock(model: Path, engines: Engines, tmp_path: Path) -> None:
    assert parity(model, "--stock", "--json", tmp_path / "out.json", "--train", "tp=1", "--rollout", "") == 0
    found = json.loads((tmp_path / "out.json").read_text())
    assert found.keys() >= SCHEMA and found["stock"].keys() >= SCHEMA
    assert (found["tokens"], found["nonzero"], found["max_abs"]) == (12, 0, 0)
    assert (found["stock"]["nonzero"], found["stock"]["max_abs"]) == (12, 0.25)
    assert len(found["contract"]["fingerprint"]) == 64 and found["stock"]["contract"] is None
    assert found["train"] == found["rollout"] == "tp=1" and found["model"] == str(model)
    assert found["op_calls"] == {"rollout": {"linear": 5}, "train": {"linear": 7}}
    assert found["seconds"].keys() == {"rollout", "train", "wall"}
    modes = [(module, environment["MINDSPEED_TPI"], request.stock) for module, environment, request in engines.seen]
    assert modes == [
        ("engine", "0", True),
        ("trainer", "0", True),
        ("engine", "strict", False),
        ("trainer", "strict", False),
    ]


def test_a_trainer_of_several_ranks(model: Path, engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert parity(model, "--train", "pp=2,tp=2", "--rollout", "tp=2") == 0
    (_, engine, request), (_, trainer, _) = engines.seen
    assert (request.train, request.rollout) == ("tp=2,pp=2", "tp=2")
    assert engines.commands["trainer"][2:4] == ["mindspeed_tpi.parity.process", "4"]
    assert (engine["OMP_NUM_THREADS"], trainer["OMP_NUM_THREADS"]) == ("5", "1")


def test_a_matrix_rolls_out_once_per_rollout_layout(
    model: Path, engines: Engines, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "grid").write_text("tp=1 sp=1,tp=2\n  tp=2 x\ntp=1 tp=2")
    outputs = ["--json", tmp_path / "out.json", "--report", tmp_path / "out.html"]
    assert parity(model, "--matrix", tmp_path / "grid", *outputs) == 0
    seen = [(module, request.train, request.rollout) for module, _, request in engines.seen]
    assert [rollout for module, _, rollout in seen if module == "engine"] == ["tp=1", "tp=2"]
    assert [(train, rollout) for module, train, rollout in seen if module == "trainer"] == [
        (train, rollout) for train in ("tp=1", "tp=2,sp=1", "tp=2") for rollout in ("tp=1", "tp=2")
    ]
    assert engines.ended == ["trainer"] * 2 + ["engine"] * 2  # one trainer per number of ranks
    said = capsys.readouterr().out.splitlines()
    assert [line.split()[-2:] for line in said[1:4]] == [["0", "0"]] * 3
    assert said[-1] == "logdiff is exactly 0 on all 72 tokens of 6 combinations"
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["exact"] and found["nonzero"] == [[0, 0]] * 3 and len(found["runs"]) == 6
    assert (found["train"], found["rollout"]) == (["tp=1", "tp=2,sp=1", "tp=2"], ["tp=1", "tp=2"])
    assert "6 combinations" in (tmp_path / "out.html").read_text()


def test_one_bit_in_a_matrix_is_1(model: Path, engines: Engines, capsys: pytest.CaptureFixture[str]) -> None:
    engines.spoil = one_bit
    assert parity(model, "--matrix", "tp=1 x tp=1") == 1
    assert "not exact: of 1 combinations 1 differ" in capsys.readouterr().out


def test_a_matrix_runs_every_cell(
    model: Path, engines: Engines, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A rollout layout that is refused and training layouts that fail or are refused leave the other cells alone."""
    engines.fail_layouts = {
        ("engine", "tp=4"): (2, "error: 2 KV heads for tp=4\n"),
        ("trainer", "tp=2"): (3, "words\nerror: rank 1 was killed by signal 9\n"),
        ("trainer", "tp=1,cp=2"): (2, "error: no room for cp=2\n"),
    }
    asked = "tp=1 tp=2,sp=1 tp=2 cp=2 dp=2 x tp=1 tp=4 tp=2"
    outputs = ["--json", tmp_path / "out.json", "--report", tmp_path / "out.html"]
    assert parity(model, "--matrix", asked, *outputs) == 3
    said = capsys.readouterr()
    lines = said.out.splitlines()
    assert [line.split()[1:] for line in lines[1:6]] == [
        ["0", "refused", "[1]", "0"],
        ["0", "refused", "[1]", "0"],
        ["failed", "[2]", "refused", "[1]", "failed", "[2]"],
        ["refused", "[3]", "refused", "[1]", "refused", "[3]"],
        ["0", "refused", "[1]", "0"],
    ]
    assert lines[6:] == [
        "[1] refused: 2 KV heads for tp=4",
        "[2] failed: rank 1 was killed by signal 9",
        "[3] refused: no room for cp=2",
        "not exact: of 15 combinations 7 were refused, 2 failed",
    ]
    assert "train tp=2, rollout tp=1: the parity trainer (tp=2,sp=1; tp=2" in said.err and "  words\n" in said.err
    found = json.loads((tmp_path / "out.json").read_text())
    assert not found["exact"] and found["nonzero"][0] == [0, None, 0] and len(found["runs"]) == 15
    assert found["runs"][7] == {"train": "tp=2", "rollout": "tp=4", "refused": "2 KV heads for tp=4"}
    assert "<li>failed: rank 1" in (tmp_path / "out.html").read_text()


@pytest.mark.parametrize(
    ("failing", "spoilt", "status"),
    [({}, True, 1), ({("trainer", "tp=2"): (2, "")}, False, 2), ({("trainer", "tp=2"): (2, "")}, True, 1)],
)
def test_a_matrix_ends_with_its_worst_status(
    model: Path, engines: Engines, failing: dict[tuple[str, str], tuple[int, str]], spoilt: bool, status: int
) -> None:
    engines.fail_layouts = failing
    engines.spoil = one_bit if spoilt else engines.spoil
    assert parity(model, "--matrix", "tp=1 tp=2 x tp=1") == status


def test_engine_options_pass_through(model: Path, engines: Engines) -> None:
    options = [
        "--max-num-seqs",
        "3",
        "--max-num-batched-tokens",
        "64",
        "--block-size",
        "96",
        "--no-enable-prefix-caching",
    ]
    assert parity(model, *options, "--dtype", "float16", "--temperature", "0.7", "--seed", "5") == 0
    request = engines.seen[0][2]
    assert request.engine == EngineOptions(
        max_num_seqs=3, max_num_batched_tokens=64, block_size=96, enable_prefix_caching=False
    )
    assert (request.dtype, request.temperature, request.seed, request.max_new_tokens) == ("float16", 0.7, 5, 4)


def test_random_prompts_follow_their_options(model: Path, engines: Engines) -> None:
    for _ in range(2):
        assert parity(model, "--prompt-len", "3:5", "--seed", "1") == 0
    first, second = engines.seen[0][2].prompts, engines.seen[2][2].prompts
    assert first == second and len(first) == 3
    assert all(3 <= len(prompt) <= 5 and max(prompt) < 50 for prompt in first)


def test_prompt_ids_need_no_tokenizer(model: Path, engines: Engines, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt_token_ids": [1, 2, 3]}\n\n{"prompt_token_ids": [49]}\n')
    assert parity(model, "--prompts", file) == 0
    assert engines.seen[0][2].prompts == ((1, 2, 3), (49,))


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ('{"prompt": "hello"}', "line 1: {model} has no tokenizer"),
        ('{"prompt_token_ids": [1]}\n{"prompt_token_ids": []}', "line 2: a prompt needs at least one token"),
        ('{"prompt_token_ids": [true]}', "line 1: a prompt needs at least one token, and token ids must be integers"),
        ('{"prompt": "a", "prompt_token_ids": [1]}', 'line 1: write {"prompt": text} or'),
        ("[1, 2]", 'line 1: write {"prompt": text} or'),
        ("{", "line 1: not JSON"),
        ("", "holds no prompt"),
        ('{"prompt_token_ids": [50]}', "prompt 1: token id 50 lies outside the model's vocabulary of 50"),
        (json.dumps({"prompt_token_ids": [1] * 253}), "253 tokens and 4 new ones exceed the model's 256 positions"),
    ],
)
def test_bad_prompts_are_2(
    model: Path, engines: Engines, tmp_path: Path, capsys: pytest.CaptureFixture[str], lines: str, said: str
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(lines)
    assert parity(model, "--prompts", file) == 2
    assert said.replace("{model}", str(model)) in refused(capsys)
    assert not engines.seen


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--train", "tp=3"], "train layout 'tp=3': tp=3 is no power of two"),
        (["--train", "tp=2,sp=1,cp=2", "--stock"], "stock's local layers have no sequence or context parallelism"),
        (["--train", "pp=3"], "4 layers cannot be split by pp*vpp; divisors that work: 1, 2, 4"),
        (["--train", "dp=2,ep=2"], "LlamaForCausalLM has no experts; leave ep=2 out"),
        (["--matrix", "tp=1 tp=2"], "is neither a file nor training layouts, x, rollout layouts"),
        (["--matrix", "x tp=1"], "is neither a file nor training layouts, x, rollout layouts"),
        (["--matrix", "tp=1 x sp=1"], "the rollout engine has no sp"),
        (["--matrix", "tp=1 x tp=1", "--stock"], "--matrix holds the layouts of both sides and runs no stock"),
        (["--rollout", "cp=2"], "the rollout engine has no cp"),
        (["--train", "xp=2"], "unknown key 'xp'"),
        (["--temperature", "-1"], "temperature=-1.0 must be a finite number"),
        (["--temperature", "nan"], "must be a finite number"),
        (["--block-size", "48"], "engine.block_size=48 must be a multiple of 32"),
        (["--max-num-seqs", "1000"], "--max-num-batched-tokens 512 is less than --max-num-seqs 1000"),
        (["--prompt-len", "200:255"], "exceed the model's 256 positions"),
        (["--prompts", "nowhere.jsonl"], "cannot read --prompts nowhere.jsonl"),
        (["--json", "nowhere/out.json"], "cannot write nowhere/out.json: its directory does not exist"),
        (["--seed", "-1"], "seed=-1 must be an integer"),
    ],
)
def test_bad_options_are_2_before_an_engine_starts(
    model: Path, engines: Engines, capsys: pytest.CaptureFixture[str], options: list[str], said: str
) -> None:
    assert parity(model, *options) == 2
    assert said in refused(capsys)
    assert not engines.seen


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["parity"], "the following arguments are required: --model"),
        (["parity", "--model", "m", "--dtype", "int8"], "invalid choice: 'int8'"),
        (["parity", "--model", "m", "--prompt-len", "9:3"], "'9:3' must be MIN:MAX"),
        (["parity", "--model", "m", "--max-new-tokens", "0"], "'0' must be a positive integer"),
        (["parity", "--model", "m", "--tempe", "1"], "unrecognized arguments: --tempe"),
        (["nonsense"], "invalid choice: 'nonsense'"),
        ([], "the following arguments are required: COMMAND"),
    ],
)
def test_what_argparse_refuses_is_2_in_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert said in refused(capsys)


def test_bad_models_are_2(tmp_path: Path, engines: Engines, capsys: pytest.CaptureFixture[str]) -> None:
    assert parity(tmp_path / "nowhere") == 2
    assert "is no model directory: it has no config.json" in refused(capsys)
    (tmp_path / "config.json").write_text("{")
    assert parity(tmp_path) == 2
    assert "cannot read" in refused(capsys)
    (tmp_path / "config.json").write_text("{}")
    assert parity(tmp_path) == 2
    assert "architecture none is not supported" in refused(capsys)


def test_a_fault_of_our_own_never_reads_as_not_exact(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object) -> object:
        raise KeyError("bug")

    monkeypatch.setattr(driver, "EngineProcess", broken)
    assert parity(model) == 3
    assert "Traceback" in capsys.readouterr().err


# The launcher itself, on processes that are quick to start.


def launch(tmp_path: Path, code: str) -> tuple[int, str]:
    log = tmp_path / "log"
    process = driver.EngineProcess([sys.executable, "-c", code], os.environ, log)
    try:
        return process.wait(), log.read_text()
    finally:
        process.end()


def test_progress_bars_reach_the_terminal_and_the_rest_only_the_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = r"import sys; print('out'); sys.stderr.write('a warning\n\r 1/2 \u2588\r 2/2\nanother\n'); sys.exit(5)"
    status, log = launch(tmp_path, code)
    assert status == 5
    assert capsys.readouterr().err == "\r 1/2 \u2588\r 2/2\n"
    assert all(text in log for text in ("out", "a warning", "2/2", "another"))


def test_children_of_a_failed_engine_end_with_it(tmp_path: Path) -> None:
    code = "import subprocess, sys; print(subprocess.Popen(['sleep', '60']).pid, flush=True); sys.exit(3)"
    started = time.monotonic()
    status, log = launch(tmp_path, code)
    assert status == 3 and time.monotonic() - started < 30
    assert _ends(int(log))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_engines_and_their_files(tmp_path: Path, model: Path, number: signal.Signals) -> None:
    """The command is interrupted while both engines, sleeping processes with a child each, run."""
    pids, temporary = tmp_path / "pids", tmp_path / "tmp"
    pids.mkdir()
    temporary.mkdir()
    program = f"""
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background shell starts us with it ignored
from mindspeed_tpi.parity import driver
real = driver.EngineProcess
def slow(command, environment, log):
    code = "import pathlib, subprocess; p = subprocess.Popen(['sleep', '60']); pathlib.Path({str(pids)!r}, str(p.pid)).touch(); p.wait()"
    return real([sys.executable, "-c", code], environment, log)
driver.EngineProcess = slow
from mindspeed_tpi.cli import main
sys.exit(main(["parity", "--model", {str(model)!r}]))
"""
    process = subprocess.Popen([sys.executable, "-c", program], env={**os.environ, "TMPDIR": str(temporary)})
    try:
        while len(list(pids.iterdir())) < 2:
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(number)
        assert process.wait(60) == 128 + number
    finally:
        process.kill()
    assert all(_ends(int(pid.name)) for pid in pids.iterdir())
    assert not list(temporary.iterdir())


def _ends(pid: int) -> bool:
    """Whether a process is gone (or a zombie that nobody waits for) within 10 seconds."""
    for _ in range(200):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


# The demo


@pytest.fixture
def prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    def prepare(cache: Path) -> Path:
        model = write_tiny(cache)
        (model / "prompts.jsonl").write_text('{"prompt_token_ids": [1, 2]}\n')
        return model

    monkeypatch.setattr(demo, "prepare", prepare)
    monkeypatch.setattr(demo, "NEEDS", ("matplotlib",))
    return tmp_path / "out"


def test_the_demo_writes_its_files(prepared: Path, engines: Engines, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--cache", str(prepared / "cache"), "--out", str(prepared)]) == 0
    assert {path.name for path in prepared.iterdir()} >= {"logdiff.png", "report.html", "result.json"}
    said = capsys.readouterr().out
    assert all(str(prepared / name) in said for name in ("logdiff.png", "report.html", "result.json"))
    assert "preemptions" in said and "exactly 0" in said


@pytest.mark.parametrize("counter", demo.MUST_HAPPEN)
def test_the_demo_fails_when_it_proves_too_little(
    prepared: Path, engines: Engines, capsys: pytest.CaptureFixture[str], counter: str
) -> None:
    engines.counters[counter] = 0
    assert main(["demo", "--cache", str(prepared / "cache"), "--out", str(prepared)]) == 1
    assert f"the demo proves too little: {counter} must not be 0" in capsys.readouterr().err


def test_the_demo_fails_on_one_bit(prepared: Path, engines: Engines) -> None:
    engines.spoil = one_bit
    assert main(["demo", "--cache", str(prepared / "cache"), "--out", str(prepared)]) == 1


def test_the_demo_names_what_is_not_installed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "NEEDS", ("matplotlib", "no-such-distribution"))
    assert main(["demo", "--out", str(tmp_path)]) == 2
    assert "the demo needs no-such-distribution" in refused(capsys)
