"""The families written out with the contract's operators and nothing else: a third witness beside the two engines.

    logprobs = PlainModel.load("model-dir").logprobs(token_ids)        # one sequence

One sequence at a time, no framework, gradients by autograd into f32 `main_grad`s.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from mindspeed_tpi import contract, ops
from mindspeed_tpi.contract import Role
from mindspeed_tpi.parity.rollout import Rollout
from mindspeed_tpi.profiles import Profile


class PlainModel:
    """A decoder of `profile` with Hugging Face tensors `weights`, cast to `dtype`."""

    def __init__(self, profile: Profile, weights: dict[str, Tensor], dtype: torch.dtype) -> None:
        self.profile = profile
        self.weights = {
            name: (tensor if name.endswith("correction_bias") else tensor.to(dtype)).requires_grad_()
            for name, tensor in weights.items()
        }
        for tensor in self.weights.values():
            tensor.main_grad = torch.zeros_like(tensor, dtype=torch.float32)  # type: ignore[attr-defined]
        self.cos, self.sin = ops.rope_tables(profile.rope)

    @classmethod
    def load(cls, directory: str | Path, dtype: torch.dtype = torch.bfloat16) -> PlainModel:
        return cls(Profile.load(directory), load_file(str(Path(directory) / "model.safetensors")), dtype)

    def logits(self, tokens: Tensor) -> Tensor:
        """f32 [T, V] for int64 [T]."""
        head = self.weights["model.embed_tokens.weight" if self.profile.tied else "lm_head.weight"]
        vocab = contract.current().head_leaves(self.profile.vocab)
        return ops.linear(self.hidden(tokens), head, dx_leaves=vocab, out_dtype=torch.float32)

    def logprobs(self, tokens: Tensor, temperature: float = 1.0) -> Tensor:
        """f32 [T - 1]: of tokens 1, 2, … given those before."""
        scale = None if temperature == 1 else torch.tensor([temperature])
        return ops.token_logprob(self.logits(tokens)[:-1], tokens[1:], scale)

    def hidden(self, tokens: Tensor) -> Tensor:
        """[T, hidden] after the final norm."""
        x = ops.embedding(self.weights["model.embed_tokens.weight"], tokens)
        for layer in range(self.profile.layers):
            x = x + self.attention(layer, self.norm(x, f"model.layers.{layer}.input_layernorm"))
            x = x + self.mlp(layer, self.norm(x, f"model.layers.{layer}.post_attention_layernorm"))
        return self.norm(x, "model.norm")

    def norm(self, x: Tensor, name: str) -> Tensor:
        return ops.rms_norm(x, self.weights[f"{name}.weight"], self.profile.eps, per_head=x.dim() == 3)

    def attention(self, layer: int, x: Tensor) -> Tensor:
        """Q, K and V are one matrix product, rows grouped by KV head as [q … | k | v]: the gradient of x is one reduction."""
        p, prefix = self.profile, f"model.layers.{layer}.self_attn."
        heads = (p.heads // p.kv_heads, 1, 1)

        def grouped(kind: str) -> Tensor:
            parts = [self.weights[f"{prefix}{n}_proj.{kind}"].unflatten(0, (p.kv_heads, -1)) for n in "qkv"]
            merged = torch.cat(parts, dim=1).flatten(0, 1)
            return merged

        weight = grouped("weight")
        cut = contract.current().leaves(len(weight), "tensor")
        qkv = ops.linear(x, weight, grouped("bias") if p.qkv_bias else None, dx_leaves=cut)
        qkv = qkv.unflatten(1, (p.kv_heads, sum(heads), p.head_dim))
        q, k, v = (part.flatten(1, 2) for part in qkv.split(heads, dim=2))
        if p.qk_norm:
            q, k = self.norm(q, prefix + "q_norm"), self.norm(k, prefix + "k_norm")
        positions = torch.arange(len(x))
        q, k = ops.rope(q, self.cos, self.sin, positions), ops.rope(k, self.cos, self.sin, positions)
        out = ops.attention(q, k, v, ops.causal_seqs([len(x)]), scale=p.head_dim**-0.5, window=p.window)
        cut = contract.current().leaves(p.heads * p.head_dim, "tensor")
        return ops.linear(out.flatten(1), self.weights[prefix + "o_proj.weight"], leaves=cut)

    def mlp(self, layer: int, x: Tensor) -> Tensor:
        moe = self.profile.moe
        if moe and layer not in moe.dense_layers:
            return self.experts(f"model.layers.{layer}.", x)
        return self.ffn(x, f"model.layers.{layer}.mlp.", ("gate_proj", "up_proj", "down_proj"))

    def ffn(self, x: Tensor, prefix: str, names: tuple[str, str, str], role: Role = "tensor") -> Tensor:
        gate, up, down = (self.weights[f"{prefix}{name}.weight"] for name in names)
        cut = contract.current().leaves(len(gate), role)
        active = ops.swiglu(ops.linear(x, torch.cat([gate, up]), paired=True, dx_leaves=cut))
        return ops.linear(active, down, leaves=cut)

    def experts(self, prefix: str, x: Tensor) -> Tensor:
        """Token by token, expert by expert; forward only."""
        moe = self.profile.moe
        assert moe is not None
        mixtral = self.profile.family == "MixtralForCausalLM"
        prefix += "block_sparse_moe." if mixtral else "mlp."
        names = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
        weights, ids = ops.moe_route(
            ops.linear(x, self.weights[prefix + "gate.weight"], out_dtype=torch.float32),
            moe.topk,
            expert_bias=self.weights[prefix + "gate.e_score_correction_bias"] if moe.bias else None,
            score=moe.score,
            renormalize=moe.renormalize,
            groups=moe.groups,
            topk_groups=moe.topk_groups,
            scaling=moe.scaling,
            eps=moe.eps,
        )
        chosen = [(t, e) for t, row in enumerate(ids.tolist()) for e in row]
        y = torch.cat([self.ffn(x[t : t + 1], f"{prefix}experts.{e}.", names, "expert") for t, e in chosen])
        out = ops.moe_combine(y, torch.arange(len(chosen)).view(ids.shape), weights)
        if not moe.shared_ffn:
            return out
        shared = self.ffn(x, prefix + ("shared_expert." if moe.shared_gate else "shared_experts."), names)
        if moe.shared_gate:
            gate = ops.linear(x, self.weights[prefix + "shared_expert_gate.weight"], out_dtype=torch.float32)
            shared = ops.sigmoid_gate(shared, gate)
        return out + shared


def sampled_as_written_out(rollout: Rollout, directory: str | Path) -> bool:
    """Whether every generated token of a record has the bits that the model written out gives it."""
    model = PlainModel.load(directory)
    with torch.no_grad():
        expected = torch.cat([model.logprobs(sequence) for sequence in rollout.sequences])
    firsts = torch.zeros_like(rollout.generated)
    firsts[rollout.offsets[:-1]] = True
    return torch.equal(
        expected[rollout.generated[~firsts]].view(torch.int32), rollout.logprobs[rollout.generated].view(torch.int32)
    )
