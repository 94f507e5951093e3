"""`jaxblt doctor`: what is installed, what hardware JAX sees, and what each op will run on it."""

import argparse
import importlib
import importlib.util
import os
import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

ESSENTIAL = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
OPTIONAL = {
    "arrow": ("pyarrow",),
    "plot": ("matplotlib",),
    "export": ("flatbuffers",),
    "remote": ("fsspec", "obstore", "huggingface_hub"),
    "wandb": ("wandb",),
    "trackio": ("trackio",),
    "cuda13": ("jax_cuda13_plugin", "jax_triton"),
    "cuda12": ("jax_cuda12_plugin", "jax_triton"),
    "triton": ("triton", "jax_triton"),
    "jla": ("jla",),
}
Verdict = Literal["ok", "note", "bad"]


@dataclass(frozen=True)
class Finding:
    """One line of the report; "bad" makes the exit status non-zero."""

    verdict: Verdict
    text: str


def check_versions() -> list[Finding]:
    """Check Python and the packages that nothing works without."""
    from jaxblt.profiling.provenance import PACKAGES, package_versions

    fine = sys.version_info >= (3, 12)
    text = f"python {platform.python_version()}"
    findings = [Finding("ok", text) if fine else Finding("bad", f"{text}: 3.12 or newer is needed")]
    found = package_versions(PACKAGES)
    findings += [Finding("ok", f"{name} {version}") for name, version in found.items()]
    missing = [name for name in ESSENTIAL if name not in found]
    findings += [Finding("bad", f"{name} is missing: pip install jaxblt") for name in missing]
    if found.get("jax") != found.get("jaxlib"):
        findings.append(Finding("note", "jax and jaxlib differ in version: install them together"))
    return findings


def check_extras() -> list[Finding]:
    """Report which optional groups of packages are present."""
    findings = []
    for extra, modules in OPTIONAL.items():
        absent = [name for name in modules if importlib.util.find_spec(name) is None]
        state = "present" if not absent else f"lacks {', '.join(absent)} (pip install 'jaxblt[{extra}]')"
        findings.append(Finding("ok" if not absent else "note", f"{extra}: {state}"))
    return findings


def _gib(count: float) -> str:
    return f"{count / 2**30:.1f} GiB"


def check_devices() -> list[Finding]:
    """List devices with capability and memory, and the host's memory."""
    import jax

    findings = []
    for device in jax.local_devices():
        capability = getattr(device, "compute_capability", None)
        memory = (device.memory_stats() or {}).get("bytes_limit")
        details = [device.device_kind]
        details += [] if capability is None else [f"compute capability {capability}"]
        details += [] if memory is None else [f"{_gib(memory)} for JAX"]
        findings.append(Finding("ok", f"{device}: {', '.join(details)}"))
    if jax.local_devices()[0].platform == "cpu" and os.path.exists("/dev/nvidia0"):
        findings.append(
            Finding(
                "note", "an NVIDIA GPU is here but JAX has no plugin for it: pip install 'jaxblt[cuda13]'"
            )
        )
    pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    findings.append(Finding("ok", f"host: {os.cpu_count()} CPUs, {_gib(pages * size)} of memory"))
    return findings


def check_computation() -> list[Finding]:
    """Compare a matrix product and an FFT on the first device with NumPy."""
    import jax
    import jax.numpy as jnp

    x = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)

    @jax.jit
    def both(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        product = jnp.matmul(x, x.T, precision=jax.lax.Precision.HIGHEST)
        return product, jnp.fft.irfft(jnp.fft.rfft(x, axis=1), axis=1)

    product, same = (np.asarray(y) for y in both(x))
    error = max(float(np.abs(product - x @ x.T).max()), float(np.abs(same - x).max()))
    verdict: Verdict = "ok" if error < 1e-3 else "bad"
    return [Finding(verdict, f"matrix product and FFT on {jax.devices()[0]}: largest error {error:.1e}")]


def _sample_calls() -> dict[str, Callable[[Any], str]]:
    """Return a call of each op: a layer of width 1,024 over 8,192 positions in bfloat16."""
    import jax
    import jax.numpy as jnp

    from pallas_kernels.attention.masks import CAUSAL

    def array(*shape: int, dtype: Any = jnp.bfloat16) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    x, fp32 = array(1, 1024, 8192), jnp.float32
    heads, gates = array(1, 8192, 8, 128), array(1, 8192, 8, dtype=fp32)
    poles = array(1024, 16, dtype=fp32)
    tables, rows = array(6 * 30_000, 1024, dtype=fp32), array(1, 8192, 6, dtype=jnp.int32)
    return {
        "attention": lambda op: op.explain(heads, heads, CAUSAL),
        "blocked_conv": lambda op: op.explain(x, array(1024, 128, dtype=fp32)),
        "byte_head": lambda op: f"{op.explain('cross_entropy')}\n{op.explain('entropy')}",
        "gated_delta_rule": lambda op: op.explain(heads, heads, heads, gates, log_gate=gates),
        "gated_linear_attention": lambda op: op.explain(heads, heads, heads, log_gate=gates),
        "hash_embedding": lambda op: op.explain(tables, rows),
        "linear_scan": lambda op: op.explain(
            array(1, 8192, 1024, dtype=fp32), array(1, 8192, 1024, dtype=fp32)
        ),
        "long_conv": lambda op: op.explain(x, array(1024, 8192, dtype=fp32)),
        "modal_conv": lambda op: op.explain(x, poles, poles),
        "neural_memory": lambda op: op.explain(
            heads,
            heads,
            heads,
            gates,
            gates,
            gates,
            (array(8, 128, 512, dtype=fp32), array(8, 512, 128, dtype=fp32)),
        ),
        "norm_dropout": lambda op: op.explain(array(1, 8192, 1024), array(1024, dtype=fp32)),
        "patch_attention": lambda op: f"{op.explain('pool')}\n{op.explain('lookup')}",
        "routed_lora": lambda op: op.explain(
            array(1, 8192, 1024),
            (array(1024, 1024),),
            (array(1024, 16),),
            (array(16, 1024),),
            array(1, 8192, 16, dtype=fp32),
        ),
        "short_conv": lambda op: op.explain(x, array(1024, 3, dtype=fp32)),
        "token_product": lambda op: op.explain(array(1024), (array(1024, 1024),)),
    }


def check_ops() -> list[Finding]:
    """List the implementation that each op picks on the default device."""
    findings = []
    for name, ask in _sample_calls().items():
        try:
            text = ask(importlib.import_module(f"pallas_kernels.{name}.api"))
        except (ImportError, AttributeError, TypeError, ValueError) as error:
            findings.append(Finding("bad", f"{name}: {error}"))
        else:
            findings.append(Finding("ok", text))
    return findings


SECTIONS: dict[str, Callable[[], list[Finding]]] = {
    "versions": check_versions,
    "optional extras": check_extras,
    "devices and memory": check_devices,
    "first computation": check_computation,
    "what each op runs here (D 1024, T 8192, bfloat16)": check_ops,
}
SIGNS: dict[Verdict, str] = {"ok": "  ok ", "note": "  -- ", "bad": "  !! "}


def examine(sections: dict[str, Callable[[], list[Finding]]] = SECTIONS) -> dict[str, list[Finding]]:
    """Return all findings by section.

    A section that cannot be examined is itself a bad finding.
    """
    report = {}
    for title, check in sections.items():
        try:
            report[title] = check()
        except Exception as error:
            report[title] = [Finding("bad", f"{type(error).__name__}: {error}")]
    return report


def main(argv: list[str] | None = None) -> int:
    """Print the report and return 1 if something essential is broken."""
    parser = argparse.ArgumentParser(
        prog="jaxblt doctor",
        description="Versions, devices, memory, a first computation, and what each op would run here. "
        "Lines marked !! are broken and make the exit status 1; lines marked -- are worth knowing.",
    )
    parser.parse_args(argv)
    report = examine()
    for title, findings in report.items():
        print(title)
        for finding in findings:
            print(SIGNS[finding.verdict] + finding.text.replace("\n", "\n     "))
    broken = sum(finding.verdict == "bad" for findings in report.values() for finding in findings)
    print("all is well" if not broken else f"{broken} broken: see the lines marked !!")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
