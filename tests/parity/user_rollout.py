"""A user's own rollout script: vLLM's LLM and the public API, nothing of `mindspeed_tpi.parity`.

python tests/parity/user_rollout.py MODEL OUT      (a stock engine with MINDSPEED_TPI=0)
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

PROMPTS = [[3, 14, 15, 92, 65, 35], list(range(40, 110)), [7]]


def main(model: str, out: Path) -> None:
    from vllm import LLM, SamplingParams

    from mindspeed_tpi import Rollout

    llm = LLM(model, logprobs_mode="processed_logprobs", max_model_len=160, max_num_batched_tokens=32, max_num_seqs=4,
              skip_tokenizer_init=True, enforce_eager=True, block_size=32, generation_config="vllm", seed=5)  # fmt: skip
    stock = os.environ["MINDSPEED_TPI"] == "0"
    common = {"max_tokens": 6, "logprobs": 0, "detokenize": False, "ignore_eos": True}

    def generate(name: str, **own: object) -> None:
        parameters = SamplingParams(**common, **own)
        outputs = llm.generate([{"prompt_token_ids": p} for p in PROMPTS], parameters, use_tqdm=False)
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


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
