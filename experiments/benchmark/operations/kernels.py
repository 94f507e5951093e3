"""Every op's benchmark, each in a process of its own: python -m experiments.benchmark kernels --out-dir DIR."""

import subprocess
import sys
import time
from pathlib import Path

SHAPES = {
    "attention": (
        *("blt_1b_latent", "blt_1b_decoder_8k", "blt_1b_decoder_8k_packed"),
        *("llama3_8b_8k", "llama3_8b_8k_packed"),
    ),
    "blocked_conv": ("evo2_7b_mr_128k", "d768_8k", "d768_64k", "d768_8191", "d768_8k_packed"),
    "byte_head": ("d512_8k", "d1024_1m"),
    "gated_delta_rule": (
        "qwen3_next_32k",
        "h32_kv8_d128_32k",
        "h32_d128_32k",
        "h32_d128_4k",
        "h32_d128_256k",
        "decode_64",
    ),
    "gated_linear_attention": (
        *("mamba2_2b_8k", "gla_1b_8k", "gsa_1b_write_8k"),
        *("gsa_1b_read_8k", "h32_d128_8k", "h32_d128_64k", "h32_d128_gla_8k"),
        *("h8_d128_1x16k", "h8_d128_gla_1x16k", "pulse_write_1x4k", "engine_write_128_1x16k"),
        *("decode_64", "decode_64_key"),
    ),
    "hash_embedding": ("d512_8k", "blt_d1024_8k"),
    "linear_scan": (
        "recurrentgemma_2b_8k",
        "recurrentgemma_2b_8k_bf16",
        "recurrentgemma_2b_64k",
        "books",
        "modal_d768_64k",
        "modal_d768_1m",
    ),
    "long_conv": (
        *("hyena_d768_1k", "hyena_d768_2k", "hyena_d768_4k", "hyena_d768_8k", "hyena_d768_16k"),
        *("hyena_d768_32k", "hyena_d768_8191", "hyena_d768_64k", "hyena_d768_8k_packed"),
        *("d768_both_ways_8k", "hyenadna_160k", "hyenadna_1m", "hyena_d768_1m", "hyena_d768_12289"),
        *("hyena_d768_128k", "hyena_d768_131071", "few_d32_8k", "few_d32_32k", "few_d32_1m"),
        *("hyena_d768_2049", "hyena_d768_20000", "hyena_d768_40000"),
    ),
    "modal_conv": (
        *("d768_8k", "d768_64k", "d768_1m", "d256_4m"),
        *("d768_128k", "d768_131071", "d768_8191", "d768_8k_packed", "books", "books_2047"),
    ),
    "neural_memory": (
        "d1024_16k_c512",
        "d1024_16k_c2048",
        "d1024_16k_c64",
        "d1024_128k_c2048",
        "linear_16k_c512",
    ),
    "norm_dropout": (
        *("transformer_1b_8k", "transformer_1b_8k_rate_0"),
        *("books_bytes", "books_patches", "d768_32k"),
    ),
    "patch_attention": (
        *("pool_blt_1b_64k", "lookup_blt_1b_64k", "lookup_blt_8b_64k"),
        *("pool_blt_1b_1m", "lookup_blt_1b_1m"),
    ),
    "routed_lora": (
        *("llama_7b_qkv", "llama_7b_qkv_r64", "llama_7b_out"),
        *("llama_7b_out_r64", "d1024_qkv_64k", "books_512_bank"),
        *("llama_7b_rows", "llama_7b_bank_10", "llama_7b_bank_50", "llama_7b_bank_90"),
    ),
    "short_conv": (
        *("evo2_7b_128k", "evo2_7b_se_128k"),
        *("hyena_d768_8k", "hyena_d768_8k_packed", "hyena_d768_8191"),
    ),
    "token_product": (
        *("heads_1024", "merged_1024", "gate_1024", "down_1024"),
        *("gate_768", "down_768", "gate_2048", "hyena_2048"),
    ),
}
"""The shapes of each op that say most."""


def kernels(out_dir: Path, ops: tuple[str, ...] = tuple(SHAPES)) -> None:
    """Run every op's benchmark: a check of values and gradients, then its versions beside plain XLA and the floor.

    Args:
      out_dir: folder for one JSON an op.
      ops: which to run; one that fails does not keep the rest from running.

    Raises:
      RuntimeError: some failed.
    """
    lines, failed = {op: command(op, out_dir) for op in ops}, []
    for op, line in lines.items():
        start = time.perf_counter()
        status = subprocess.run(line).returncode
        print(f"{op}: exit status {status} after {time.perf_counter() - start:.0f} s", flush=True)
        if status:
            failed.append(op)
    if failed:
        raise RuntimeError(f"the benchmarks of {', '.join(failed)} failed; what they say is above")


def command(op: str, out_dir: Path) -> list[str]:
    """Return the command line of one op's benchmark.

    Raises:
      ValueError: no benchmark of that name.
    """
    if op not in SHAPES:
        raise ValueError(f"no benchmark of an op {op!r}, expected some of {', '.join(SHAPES)}")
    out = str(out_dir / f"{op}.json")
    return [sys.executable, "-m", "experiments.benchmark.operations.one_operation", op, out, *SHAPES[op]]
