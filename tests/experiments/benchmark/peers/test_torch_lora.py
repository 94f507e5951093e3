"""What of the LoRA peer in torch runs without torch: its maths, its overhead, and what it refuses."""

import sys
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from experiments.benchmark.peers import torch_lora
from pallas_kernels.routed_lora.reference import routed_lora_reference
from tests.tolerances import assert_close

LIKE_TORCH = SimpleNamespace(nn=SimpleNamespace(functional=SimpleNamespace(linear=lambda x, w: x @ w.T)))


def test_the_chain_is_the_reference_without_a_code() -> None:
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((2, 5, 6), np.float32))
    sizes = ((4, 6), (3, 6), (4, 3))
    sites = [
        torch_lora.Site(*(jnp.asarray(rng.standard_normal(size, np.float32)) for size in sizes))
        for _ in range(2)
    ]
    w, v, u = (tuple(z.T for z in matrices) for matrices in zip(*sites, strict=True))
    expected = routed_lora_reference(x, w, v, u, None, chunk=1, scale=torch_lora.SCALE)
    for found, wanted in zip(torch_lora.chain(LIKE_TORCH, x, sites), expected, strict=True):
        assert_close(found, wanted, n=9)
    plain = routed_lora_reference(x, w, v, u, None, chunk=1, scale=0.0)
    for found, wanted in zip(torch_lora.products(LIKE_TORCH, x, sites), plain, strict=True):
        assert_close(found, wanted, n=6)


def test_the_overhead_is_over_the_fastest_product_of_each_pass() -> None:
    ms = {
        "chain": {"forward": 3.0, "forward+backward": 9.0},
        "products": {"forward": 2.0, "forward+backward": 8.0},
        "joined": {"forward": 2.5, "forward+backward": 6.0},
    }
    assert torch_lora.overhead(ms) == {"forward": 0.5, "forward+backward": 0.5}


def test_its_shapes_exist_and_others_are_refused(monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(RuntimeError, match="install torch on a machine with a GPU"):
        torch_lora.torch_lora()
    with pytest.raises(ValueError, match="no shapes llama_7b_rows: expected some of llama_7b_qkv,"):
        torch_lora.torch_lora(shapes=("llama_7b_rows",))
