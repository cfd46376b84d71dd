"""What each operator costs on an Ascend 910B-class core, counted: the tables of docs/ascend.md (see docs/gen_tables.py).

A cost is what one group (one cube core and its two vector cores) does for one unit of work. Nothing here was measured.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

GROUPS = 24  # 24 cube and 48 vector cores
CLOCK = 1.8e9  # cube_freq of Ascend910B2 in CANN's platform configuration
MACS = {2: 4096, 4: 1024}  # per cycle, by bytes of an operand's element: 16x16x16, and 16x16x4 for float32
LANES = 64  # float32 elements per vector instruction and cycle; Exp, Ln, Sqrt, Div count twice
# Bytes per cycle. L2 and HBM: 7 TB/s and 1.6 TB/s over all groups; the others are the platform configuration's pipe rates.
RATES = {"aic_read": 110, "aic_write": 86, "aiv_read": 2 * 110, "aiv_write": 2 * 64}
L2 = 7e12 / GROUPS / CLOCK
HBM = 1.6e12 / GROUPS / CLOCK


@dataclass(frozen=True)
class Cost:
    """Cube cycles; vector instructions of 64 elements; bytes between L2 and a cube or vector core; bytes of HBM."""

    cube: float = 0
    vector: float = 0
    aic_read: float = 0
    aic_write: float = 0
    aiv_read: float = 0
    aiv_write: float = 0
    hbm: float = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def __mul__(self, times: float) -> Cost:
        return Cost(*(getattr(self, f.name) * times for f in fields(self)))

    @property
    def l2(self) -> float:
        return self.aic_read + self.aic_write + self.aiv_read + self.aiv_write

    def parts(self) -> dict[str, float]:
        """Cycles of each resource if it were the only one; all of them overlap in a double-buffered kernel."""
        pipes = {name: getattr(self, name) / rate for name, rate in RATES.items()}
        return {
            "cube": self.cube,
            "vector": self.vector / 2,
            **pipes,
            "L2": self.l2 / L2,
            "HBM": self.hbm / HBM,
        }

    @property
    def bound(self) -> str:
        parts = self.parts()
        return max(parts, key=lambda name: parts[name])

    @property
    def cycles(self) -> float:
        return max(self.parts().values())


def product(
    m: int, n: int, k: int, leaves: int = 1, out: int = 2, size: int = 2, tile: tuple[int, int] = (128, 256)
) -> Cost:
    """[m, k] x [n, k] cut in `leaves` along k, per output tile. A leaf boundary writes the tile in f32 from L0C and reads it
    back in a vector core; one leaf leaves through Fixpipe, already rounded."""
    rows, columns = min(m, tile[0]), min(n, tile[1])
    area = rows * columns
    tiles = -(-m // rows) * -(-n // columns)
    cost = Cost(
        cube=area * k / MACS[size],
        aic_read=(rows + columns) * k * size,
        aic_write=area * out,
        hbm=((m * k + n * k) * size + m * n * out) / tiles,
    )
    if leaves > 1:
        cost = replace(
            cost,
            aic_write=area * 4 * leaves,
            aiv_read=area * 4 * leaves,
            aiv_write=area * out,
            vector=area / LANES * leaves,  # leaves - 1 additions and a cast
        )
    return cost * tiles


def attention_forward(block: int, p_size: int = 2, head: int = 128, queries: int = 128, keys: int = 512) -> Cost:
    """128 queries of one head against 512 keys in blocks of `block`: S and each block's O go L0C -> GM -> UB, P goes back."""
    scores, out = queries * keys, queries * head
    trips = keys / block
    macs = scores * head
    return Cost(
        cube=macs / MACS[2] + macs / MACS[p_size],
        vector=(scores * 7 + out * trips * 2) / LANES,  # scale, max, subtract, exp (2), add, cast; O: multiply, add
        aic_read=keys * head * (2 + p_size) + scores * p_size,
        aic_write=scores * 4 + out * 4 * trips,
        aiv_read=scores * 4 + out * 4 * trips,
        aiv_write=scores * p_size,
        hbm=keys * head * 4 / 16,  # K and V stay in L2 for the other query blocks
    )


def attention_backward(
    gradients: str, query_segment: int = 512, head: int = 128, queries: int = 128, keys: int = 512, segment: int = 2048
) -> Cost:
    """128 queries of one head against 512 keys. S and dP to GM, P and dS back, then three products out of L2. Their sums are
    `chain`: kept in L0C through a segment of keys (dQ) or of queries (dK, dV); `add`: f32 tiles of 512 keys or 128 queries
    added by a vector core; `atomic`: such tiles added in L2, order free."""
    scores = queries * keys
    q, k = queries * head, keys * head
    softmax = Cost(
        cube=2 * scores * head / MACS[2],
        vector=scores * 10 / LANES,  # scale, subtract, exp (2), divide (2), cast; subtract, multiply, cast
        aic_read=2 * k * 2 + 2 * q * 2 * keys / segment,
        aic_write=2 * scores * 4,
        aiv_read=2 * scores * 4,
        aiv_write=2 * scores * 2,
    )
    trips = (keys / segment, queries / query_segment) if gradients == "chain" else (1, 1)
    tiles = (q * trips[0] + 2 * k * trips[1]) * 4  # bytes of f32 dQ, dK and dV tiles that leave L0C
    adding = 0 if gradients == "atomic" else tiles
    products = Cost(
        cube=3 * scores * head / MACS[2],
        vector=adding / 4 / LANES,
        aic_read=3 * scores * 2 + k * 2 + 2 * q * 2 * keys / 128,  # P, dS twice; K; dO and Q per 128 keys
        aic_write=tiles,
        aiv_read=adding,
    )
    return softmax + products + Cost(hbm=k * 4 / 16)


def elementwise(elements: float, passes: float, read: float, write: float) -> Cost:
    """Vector kernel: instructions per element (exp, div count 2) and bytes per element."""
    return Cost(
        vector=elements * passes / LANES,
        aiv_read=elements * read,
        aiv_write=elements * write,
        hbm=elements * (read + write),
    )


@dataclass(frozen=True)
class Model:
    name: str
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    experts: int = 0
    topk: int = 1
    head_dim: int = 128
    vocab: int = 151936


MOE = Model("Qwen3-30B-A3B", 2048, 32, 4, 768, 128, 8)
DENSE = Model("Qwen3-8B", 4096, 32, 8, 12288)
TOKENS, ROW, MAX_TP, MAX_ETP = 8192, 4096, 8, 1


def operators(model: Model) -> list[tuple[str, str, Cost, Cost]]:
    """(operator, tile or passes, cost in the locked order, cost in a free order) of one layer, 8,192 tokens, one device."""
    t, h, d = TOKENS, model.hidden, model.head_dim
    qkv, attn = (model.heads + 2 * model.kv_heads) * d, model.heads * d
    cube, wide = "128x256", "64 lanes"
    rows: list[tuple[str, str, Cost, Cost]] = []

    def add(name: str, how: str, locked: Cost, free: Cost | None = None) -> None:
        rows.append((name, how, locked, free or locked))

    def dense(name: str, m: int, n: int, k: int, leaves: int = 1, out: int = 2, times: int = 1) -> None:
        add(name, f"{min(m, 128)}x{min(n, 256)}, {leaves} x {k // leaves}", product(m, n, k, leaves, out) * times,
            product(m, n, k, 1, out) * times)  # fmt: skip

    dense("linear qkv", t, qkv, h)
    dense("linear qkv, decode, 16 rows", 16, qkv, h)
    dense("linear o_proj", t, h, attn, MAX_TP)
    dense("linear o_proj, decode, 16 rows", 16, h, attn, MAX_TP)
    dense("linear_dx qkv", t, h, qkv, MAX_TP)
    dense("linear_dx o_proj", t, attn, h)
    dw = product(qkv, h, ROW, out=4)
    add(f"linear_dw qkv, rows of {ROW}", cube + ", rows inside the tile", dw * (t // ROW), product(qkv, h, t, out=4))
    if model.experts:
        e, per = model.experts, t * model.topk // model.experts
        dense("grouped_linear gate_up", per, 2 * model.ffn, h, times=e)
        dense("grouped_linear down", per, h, model.ffn, MAX_ETP, times=e)
        dense("grouped_linear_dx gate_up", per, h, 2 * model.ffn, MAX_ETP, times=e)
        dense("grouped_linear_dx down (f32)", per, model.ffn, h, out=4, times=e)
        expert = product(2 * model.ffn, h, per * ROW // t, out=4) * (t // ROW)
        # grad is read and written once: the later rows of a tile meet it in L2
        add(f"grouped linear_dw gate_up, rows of {ROW}", cube + ", rows inside the tile",
            replace(expert * e, hbm=product(2 * model.ffn, h, per, out=8).hbm * e),
            replace(product(2 * model.ffn, h, per, out=4) * e, hbm=product(2 * model.ffn, h, per, out=8).hbm * e))  # fmt: skip
        dense("linear router (f32 out)", t, e, h, out=4)
        add("moe_route, top 8", "30 passes", elementwise(t * e, 30, 4, 0.5))
        add("moe_route_backward", "10 passes", elementwise(t * e, 10, 4, 4))
        add("MoE permute", "row copies", elementwise(t * model.topk * h, 0, 2, 2))
        add("moe_combine", "25 passes", elementwise(t * h, 25, 16, 2), elementwise(t * h, 17, 16, 2))
        add("expert_weight_backward", wide, elementwise(t * model.topk * model.ffn, 5, 6, 2))
        ffn, pairs = model.ffn, t * model.topk
    else:
        dense("linear gate_up", t, 2 * model.ffn, h)
        dense("linear down", t, h, model.ffn, MAX_TP)
        dense("linear_dx gate_up", t, h, 2 * model.ffn, MAX_TP)
        ffn, pairs = model.ffn, t
    blocks = (ROW // 128) * (ROW // 512 + 1) / 2 * (t // ROW) * model.heads  # causal, rows of 4,096
    add("attention forward", "128 x 512", attention_forward(512) * blocks)
    # one request: 16 padded rows (the group of a KV head) against 32,768 keys
    decode = attention_forward(512, queries=16) * (32768 // 512 * model.kv_heads * 16)
    add(
        "paged decode, 16 requests of 32,768",
        "16 x 512, by segment",
        replace(decode, hbm=16 * 32768 * model.kv_heads * d * 4),
    )
    add("attention_backward", "128 x 512", attention_backward("chain") * blocks, attention_backward("atomic") * blocks)
    add("rms_norm", wide, elementwise(t * h, 8, 2, 2), elementwise(t * h, 6, 2, 2))
    add("add_rms_norm", wide, elementwise(t * h, 12, 4, 4), elementwise(t * h, 10, 4, 4))
    add("rms_norm_backward", wide, elementwise(t * h, 14, 6, 2))
    add("rms_norm_dw", "7 passes", elementwise(t * h, 7, 4, 0), elementwise(t * h, 5, 4, 0))
    add("rope q, k", "5 passes", elementwise(t * (attn + model.kv_heads * d), 5, 2, 2))
    add("swiglu", "10 passes", elementwise(pairs * ffn, 10, 4, 2))
    add("swiglu_backward", "19 passes", elementwise(pairs * ffn, 19, 6, 4))
    add("embedding", "row copies", elementwise(t * h, 0, 2, 2))
    add("embedding_dw", "2 passes", elementwise(t * h, 2, 6, 4))
    add("tree_sum of 8 (o_proj, TP 8)", "8 passes", elementwise(t / 8 * h, 8, 32, 2))
    head = product(t, model.vocab, h, out=4)
    logits = t * model.vocab
    add("linear lm_head (f32 out)", cube, head)
    # the second pass over a row finds it in L2
    sums = elementwise(logits, 5, 8, 0)
    add("vocab_max, vocab_sums", wide, replace(sums, hbm=logits * 4), elementwise(logits, 6, 4, 0))
    add("vocab_logprob_backward", "7 passes", elementwise(logits, 7, 4, 2))
    add("head and logprob fused", f"{cube}, chunks of 1,024", head + replace(sums, hbm=logits * 8))
    add(
        "linear_dx lm_head",
        f"{cube}, 8 x {model.vocab // 8}",
        product(t, h, model.vocab, MAX_TP),
        product(t, h, model.vocab),
    )
    return rows


def table(header: list[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(line) + " |" for line in [header, ["---"] * len(header), *rows])


def _us(cycles: float) -> str:
    us = cycles / GROUPS / CLOCK * 1e6
    return f"{us:,.0f}" if us >= 100 else f"{us:.1f}"


def operator_table(model: Model) -> str:
    rows = [
        [f"{name}", how, _us(c.cube), _us(c.vector / 2), f"{c.l2 / 1e6:,.0f}", f"{c.hbm / 1e6:,.0f}", c.bound, _us(c.cycles),
         f"{c.cycles / free.cycles:.2f}"]
        for name, how, c, free in operators(model)
    ]  # fmt: skip
    header = ["operator", "tile, leaves", "cube us", "vector us", "L2 MB", "HBM MB", "bound", "us", "locked / free"]
    return table(header, rows)


def leaf_table() -> str:
    rows = []
    for name, m, n, k in (
        ("o_proj, K 4,096", TOKENS, 2048, 4096),
        ("qkv dX, N 5,120", TOKENS, 2048, 5120),
        ("dense down, K 12,288", TOKENS, 4096, 12288),
        ("expert down, K 768", 512, 2048, 768),
        ("expert gate_up dX, chained pair, N 2 x 768", 512, 2048, 1536),
        ("lm_head dX, N 151,936", TOKENS, 2048, 151936),
        ("hidden 8,192, size cut only", TOKENS, 8192, 8192),
    ):
        free = product(m, n, k).cycles
        cells = []
        for leaves in (1, 2, 4, 8, 16, 128):
            cost = product(m, n, k, leaves)
            cells.append(f"{cost.cycles / free:.2f} {cost.bound}" if k // leaves >= 48 else "")
        rows.append([name, *cells])
    return table(["reduction", *(f"{n} leaves" if n > 1 else "1 leaf" for n in (1, 2, 4, 8, 16, 128))], rows)


def attention_table() -> str:
    rows = []
    base = attention_forward(512)
    for block in (128, 256, 512, 1024):
        cost = attention_forward(block, keys=max(512, block)) * (512 / max(512, block))
        l1 = (2 * block * 128 + 128 * block + 128 * 128) * 2 // 1024
        rows.append([f"forward, kv_block {block}", f"{cost.cube:,.0f}", f"{cost.vector / 2:,.0f}", f"{cost.l2 / 1024:,.0f}",
                     f"{l1}", cost.bound, f"{cost.cycles / base.cycles:.2f}"])  # fmt: skip
    wide = attention_forward(512, p_size=4)
    rows.append(["forward, 512, P and V in f32", f"{wide.cube:,.0f}", f"{wide.vector / 2:,.0f}", f"{wide.l2 / 1024:,.0f}", "",
                 wide.bound, f"{wide.cycles / base.cycles:.2f}"])  # fmt: skip
    chain = attention_backward("chain")
    for name, cost in (
        *((f"chain, query segments of {n}", attention_backward("chain", n)) for n in (2048, 512, 256)),
        ("add", attention_backward("add")),
        ("atomic", attention_backward("atomic")),
    ):
        cells = [f"{cost.cube:,.0f}", f"{cost.vector / 2:,.0f}", f"{cost.l2 / 1024:,.0f}", "", cost.bound]
        rows.append([f"backward, {name}", *cells, f"{cost.cycles / chain.cycles:.2f}"])
    header = [
        "128 queries x 512 keys of a head",
        "cube cycles",
        "vector cycles",
        "L2 KB",
        "L1 KB",
        "bound",
        "against ours",
    ]
    return table(header, rows)


def vocabulary_table() -> str:
    rows = []
    for align in (16, 64, 128):
        leaf = align * -(-MOE.vocab // (align * 128))
        rank = leaf * 128 // MAX_TP
        rows.append([str(align), f"128 x {leaf:,}", f"{rank:,}", f"{rank / (MOE.vocab / MAX_TP) - 1:.1%}",
                     f"{leaf * 4 // 32}"])  # fmt: skip
    return table(
        ["vocab_align", "leaves", "columns of TP 8's rank 0", "more than an even cut", "leaf pitch in f32, 32 B"], rows
    )


TABLES = {
    "operators-moe": lambda: operator_table(MOE),
    "operators-dense": lambda: operator_table(DENSE),
    "leaves": leaf_table,
    "attention": attention_table,
    "vocabulary": vocabulary_table,
}

if __name__ == "__main__":
    for name, make in TABLES.items():
        print(f"\n{name}\n\n{make()}")
