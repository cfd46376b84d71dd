"""A user's own rollout script: the first snippet of docs/api.md, then more of vLLM's LLM and the public API; nothing of
`mindspeed_tpi.parity`.

python tests/parity/user_rollout.py MODEL OTHER OUT      (a stock engine with MINDSPEED_TPI=0)
"""

from __future__ import annotations

import json
import os
import re
import sys
from functools import partial
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "api.md"
PROMPTS = [[3, 14, 15, 92, 65, 35], list(range(40, 110)), [7]]


def snippets() -> list[str]:
    """The Python snippets of the API's page, in order."""
    return re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def main(model: str, other: str, out: Path) -> None:
    import vllm

    import mindspeed_tpi
    from mindspeed_tpi import Rollout
    from mindspeed_tpi.weights import Checkpoint

    settings = {"max_model_len": 160, "max_num_batched_tokens": 32, "max_num_seqs": 4, "skip_tokenizer_init": True,
                "enforce_eager": True, "block_size": 32, "generation_config": "vllm", "seed": 5}  # fmt: skip
    stock = os.environ["MINDSPEED_TPI"] == "0"
    prompts: Any = [{"prompt_token_ids": p} for p in PROMPTS]
    SamplingParams = vllm.SamplingParams
    if stock:
        llm = vllm.LLM(model, logprobs_mode="processed_logprobs", **settings)
    else:
        vllm.LLM = partial(vllm.LLM, **settings)
        os.chdir(out)
        names: dict[str, Any] = {"model_dir": model, "prompts": prompts}
        exec(snippets()[0], names)
        llm = names["llm"]
    common = {"max_tokens": 6, "logprobs": 0, "detokenize": False, "ignore_eos": True}

    def generate(name: str, **own: object) -> None:
        parameters = SamplingParams(**common, **own)
        outputs = llm.generate(prompts, parameters, use_tqdm=False)
        rollout = Rollout.from_vllm(outputs, llm, sampling=parameters if stock else None)
        rollout.save(out / f"{name}.safetensors")
        if name == "several":  # the same over a wire, as a server would send it
            wire = {
                "prompts": [o.prompt_token_ids for o in outputs for _ in o.outputs],
                "completions": [list(c.token_ids) for o in outputs for c in o.outputs],
                "logprobs": [[e[t].logprob for e, t in zip(c.logprobs, c.token_ids, strict=True)]
                             for o in outputs for c in o.outputs],
                "engine": llm.collective_rpc("tpi_report"),
                "sampling": {"temperature": parameters.temperature, "n": parameters.n},
            }  # fmt: skip
            (out / "wire.json").write_text(json.dumps(wire))

    if stock:
        generate("stock")
        return
    generate("several", n=2)
    generate("prompts", prompt_logprobs=0)
    generate("cool", temperature=0.7)
    llm.llm_engine.set_weight_version("3")
    generate("later", temperature=0.0)
    mindspeed_tpi.hf_tensors = iter  # the trainer's process is another one here
    with Checkpoint(other) as trained:
        exec(next(snippet for snippet in snippets() if "update_weights" in snippet), names | {"trained": trained})
    generate("updated")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
