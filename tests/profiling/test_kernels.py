"""Device time by kernel."""

import jax
import jax.numpy as jnp
import pytest

from jaxblt.profiling import kernel_totals, op_totals, trace
from jaxblt.profiling.kernels import _instructions

STEP = "jit(train_step)/"
BLOCK = "stack/stack._periods/period_{}/block_0/mlp/"
PROGRAM = "\n".join(
    f'  %{name} = bf16[8,{i}]{{1,0}} {call}, metadata={{op_name="{STEP}{path}"}}'
    for i, (name, call, path) in enumerate(
        [
            (
                "gemm.1",
                'custom-call(%a), custom_call_target="__cublas$lt$matmul"',
                "jvp(LM)/" + BLOCK.format(3) + "up/up.products/...d,de->...e/dot_general",
            ),
            (
                "gemm.2",
                'custom-call(%a), custom_call_target="__cublas$lt$matmul$f8"',
                "transpose(jvp(LM))/" + BLOCK.format(4) + "up/up.products/dot_general",
            ),
            (
                "fwd.7",
                'custom-call(%a), custom_call_target="__cudnn$fmhaSoftmax"',
                "jvp(LM)/mixer/dot_product_attention_fwd",
            ),
            ("all-reduce.1", "all-reduce(%a)", "add"),
            ("loop_transpose_fusion.4", "fusion(%a), kind=kInput, calls=%f", "transpose(jvp(LM))/mixer/mul"),
            ("input_reduce_fusion.12", "fusion(%a), kind=kInput, calls=%g", "reduce_sum"),
            (
                "loop_multiply_fusion.1",
                "fusion(%a), kind=kLoop, calls=%h",
                "transpose(jvp(LM))/" + BLOCK.format(2) + "rematted_computation/jit(silu)/mul",
            ),
        ]
    )
)


def test_instructions_are_told_by_kind_pass_and_part() -> None:
    told = dict(_instructions(PROGRAM))
    assert [(kind, during, path) for kind, during, _, path in told.values()] == [
        ("matrix products", "forward", "block/mlp/up/dot_general"),
        ("matrix products", "backward", "block/mlp/up/dot_general"),
        ("attention", "forward", "train_step/LM/mixer/dot_product_attention_fwd"),
        ("collectives", "update", "train_step/add"),
        ("copies", "backward", "train_step/LM/mixer/mul"),
        ("reductions", "update", "train_step/reduce_sum"),
        ("elementwise", "again", "block/mlp/silu/mul"),
    ]
    assert told["gemm.1"][2] == "__cublas$lt$matmul"
    assert told["input_reduce_fusion.12"][2] == "input_reduce_fusion"


def test_kernels_add_up_to_all_that_ran(tmp_path) -> None:
    run = jax.jit(lambda x: jnp.fft.rfft(x @ x).real + jnp.sum(x, -1, keepdims=True))
    x = jnp.ones((64, 64))
    compiled = run.lower(x).compile()
    jax.block_until_ready(compiled(x))
    with trace(tmp_path) as folder:
        for _ in range(2):
            jax.block_until_ready(compiled(x))
    rows = kernel_totals(folder, compiled.as_text() or "")
    assert any(row.path.endswith("fft") for row in rows)
    assert all(row.count % 2 == 0 for row in rows)
    assert [row.seconds for row in rows] == sorted((row.seconds for row in rows), reverse=True)
    assert sum(row.seconds for row in rows) == pytest.approx(sum(op.seconds for op in op_totals(folder)))
    with pytest.raises(ValueError, match="nothing of the program 'jit_else'"):
        kernel_totals(folder, "HloModule jit_else")
