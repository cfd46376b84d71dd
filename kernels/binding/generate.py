"""Writes the C++ header of the operators from mindspeed_tpi/ops/table.py: per row a struct of checked arguments, `take` that fills
it or refuses the call, `make` that allocates the results, and the exported function. Needs neither torch nor the package."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
KINDS = {"int": "i64", "float": "float", "bool": "bool", "dtype": "int", "str": "i64"}
CODES = {"f32": "TPI_F32", "bf16": "TPI_BF16", "f16": "TPI_F16", "i32": "kInt32", "i64": "kInt64"}


def load_table() -> ModuleType:
    """`mindspeed_tpi.ops.table` without its package."""
    spec = importlib.util.spec_from_file_location("tpi_operator_table", ROOT / "mindspeed_tpi/ops/table.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def header() -> str:
    table = load_table()
    parts = [
        "// Written by kernels/binding/generate.py from mindspeed_tpi/ops/table.py.",
        "#pragma once",
        '#include "binding.h"',
    ]
    parts += [
        "namespace tpi::binding {",
        *(_operator(row, table) for row in table.OPERATORS.values()),
        "}  // namespace tpi::binding",
    ]
    return "\n\n".join(parts) + "\n"


def _operator(row: Any, table: ModuleType) -> str:
    operands = [p for p in row.parameters if isinstance(p, table.Operand)]
    attributes = [p for p in row.parameters if isinstance(p, table.Attribute)]
    dims = list(dict.fromkeys(d.name for o in operands for d in o.leading + o.trailing if d.name))
    letters = list(dict.fromkeys(o.dtype for o in operands if o.dtype in "SU"))
    struct = [f"Operand {o.name}{{{row.parameters.index(o)}}};" for o in operands]
    struct += [f"{KINDS[a.kind]} {a.name} = 0;" for a in attributes]
    struct += [f"i64 {d} = -1;" for d in dims] + [f"int dtype_{d} = -1;" for d in letters] + ["Star star;"]
    results = [r.name or "value" for r in row.results]
    if results:
        struct.append(f"struct {{ Result {', '.join(results)}; }} result;")

    take = [f"if (count != {len(row.parameters)}) return false;"]
    take += [_take(p, i, table) for i, p in enumerate(row.parameters)]
    take += [f"if (!({_names(c, operands, attributes, dims)})) return false;" for c in row.conditions]
    take += [
        f"if (!apart(c.{m.name}, c.{o.name})) return false;"
        for m in operands
        if m.mutated
        for o in operands
        if o is not m
    ]

    make = [
        f"c.result.{r.name or 'value'}.make({_result_dtype(r, letters)}, {_shape(r, operands, attributes, dims)});"
        for r in row.results
    ]
    give = [f"c.result.{name}.give({i}, result);" for i, name in enumerate(results)]
    name = row.name
    lines = [f"struct {name}_call {{", *(f"  {s}" for s in struct), "};", f"int run({name}_call& c);", ""]
    lines += [
        f"inline bool take({name}_call& c, const AnyView* args, int count) {{",
        *(f"  {s}" for s in take),
        "  return true;",
        "}",
    ]
    lines += [f"TPI_BINDING({name}, {{", *(f"  {s}" for s in make), "}, {", *(f"  {s}" for s in give), "})"]
    return "\n".join(lines)


def _take(p: Any, i: int, table: ModuleType) -> str:
    if isinstance(p, table.Attribute):
        if p.kind == "str":
            choices = ", ".join(f'"{c}"' for c in p.choices)
            return f"if (!take_choice(c.{p.name}, args[{i}], {{{choices}}})) return false;"
        return f"if (!take_{p.kind}(c.{p.name}, args[{i}]{', true' if p.optional else ''})) return false;"
    ranks = f"c.{p.name}.rank({len(p.leading) + len(p.trailing)}{', c.star, ' + str(len(p.leading)) if p.star else ''})"
    letter = p.dtype in "SU"
    tests = [f"c.{p.name}.{f'shares(c.dtype_{p.dtype})' if letter else f'is({CODES[p.dtype]})'}", ranks]
    for j, d in enumerate(p.leading):
        tests.append(_bind(p, str(j), d))
    for j, d in enumerate(reversed(p.trailing), 1):
        tests.append(_bind(p, f"-{j}", d))
    if p.dense:
        tests.append(f"c.{p.name}.dense({p.dense}{', true' if p.transposable else ''})")
    if p.mutated:
        tests.append(f"c.{p.name}.disjoint()")
    condition = " && ".join(tests)
    given = f"c.{p.name}.take(args[{i}], {'true' if p.optional else 'false'})"
    return f"if (!{given} || (c.{p.name}.given() && !({condition}))) return false;"


def _bind(p: Any, index: str, d: Any) -> str:
    if not d.name:
        return f"c.{p.name}.size({index}) == {d.offset}"
    return f"bind(c.{d.name}, c.{p.name}.size({index}), {d.factor}, {d.offset})"


def _names(expression: str, operands: list[Any], attributes: list[Any], dims: list[str]) -> str:
    """The expression over fields of the call."""
    optional = {o.name for o in operands if o.optional}
    known = {a.name for a in attributes} | set(dims)

    def field(match: re.Match[str]) -> str:
        name = match[0]
        if name == "star":
            return "c.star.count"
        if name in known:
            return f"c.{name}"
        return f"c.{name}.given()" if name in optional else name

    return re.sub(r"[A-Za-z_]\w*", field, expression)


def _result_dtype(r: Any, letters: list[str]) -> str:
    def code(dtype: str) -> str:
        if dtype in CODES:
            return CODES[dtype]
        return f"c.dtype_{dtype}" if dtype in ("S", "U") else f"c.{dtype}"

    if r.flag:
        return f"c.{r.flag} ? int({code(r.dtype)}) : int({code(r.otherwise)})"
    if r.dtype in CODES or r.dtype in ("S", "U"):
        return code(r.dtype)
    return f"c.{r.dtype} < 0 ? c.dtype_S : c.{r.dtype}" if "S" in letters else f"c.{r.dtype}"


def _shape(r: Any, operands: list[Any], attributes: list[Any], dims: list[str]) -> str:
    sizes = [d for d in r.shape if d]
    star = sizes.index("*") if "*" in sizes else -1
    values = [f"i64({_names(d, operands, attributes, dims)})" for d in sizes if d != "*"]
    return f"{{{', '.join(values)}}}" + (f", c.star, {star}" if star >= 0 else "")
