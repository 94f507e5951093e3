"""The parts of `evo2` on vortex 1.1.0, Evo 2's own code in PyTorch; its licence is Apache-2.0.

It wants flash-attn, for which no wheel exists: PyTorch's attention, which runs the same kernels, stands in. Without
Transformer Engine it runs models in bf16 only, so input projections are bf16 on both sides.
"""

import logging
import os
import sys
import tempfile
import types
from typing import Any

import numpy as np

from experiments.benchmark.peers.evo2_setting import Setting, Timed
from jaxblt.models.striped_hyena import Evo2

PROMPT = 128
"""Bytes that fill all states of its filters; its own way to fill the modal ones takes memory as the length does."""

FIXED = {
    "vocab_size": 512,
    "hcm_filter_length": 128,
    "hcs_filter_length": 7,
    "short_filter_length": 3,
    "short_filter_bias": False,
    "eps": 1e-6,
    "state_size": 16,
    "inner_size_multiple_of": 16,
    "proj_groups": 1,
    "hyena_filter_groups": 1,
    "column_split_hyena": False,
    "column_split": True,
    "interleave": True,
    "evo2_style_activations": True,
    "model_parallel_size": 1,
    "tie_embeddings": True,
    "mha_out_proj_bias": True,
    "hyena_out_proj_bias": True,
    "hyena_flip_x1x2": False,
    "qkv_proj_bias": False,
    "use_fp8_input_projections": False,
    "final_norm": True,
    "use_flash_attn": False,
    "use_flashfft": False,
    "prefill_style": "fft",
    "mlp_activation": "gelu",
}
"""Settings of all released models; precision and attention are those that need no package besides PyTorch."""

LAYERS = {"S": "hcs", "M": "hcm", "H": "hcl", "A": "attn"}


def settings(sizes: Evo2, *, kernels: bool) -> dict[str, Any]:
    """Return a model's settings under the peer's names."""
    pattern = (sizes.pattern * sizes.num_layers)[: sizes.num_layers]
    places = {
        f"{own}_layer_idxs": [i for i, kind in enumerate(pattern) if kind == letter]
        for letter, own in LAYERS.items()
    }
    interpolated = {"use_interpolated_rotary_pos_emb": True, "rotary_emb_scaling_factor": sizes.rope_scale}
    return {
        **FIXED,
        **places,
        **(interpolated if sizes.rope_scale != 1 else {}),
        **dict.fromkeys(("use_hcs_kernel", "use_hcm_kernel", "use_hcl_kernel"), kernels),
        "hidden_size": sizes.dim,
        "num_filters": sizes.dim,
        "hcl_filter_groups": sizes.dim,
        "hcm_filter_groups": sizes.groups,
        "hcs_filter_groups": sizes.groups,
        "num_layers": sizes.num_layers,
        "num_attention_heads": sizes.num_heads,
        "inner_mlp_size": sizes.mlp_dim,
        "rotary_emb_base": sizes.rope_theta,
        "max_seqlen": sizes.max_len,
    }


class Vortex:
    """Parts of `evo2` on the peer."""

    parts = ("forward", "long", "write", "write_long", "write_rows")

    def __init__(self, sizes: Evo2, tensors: dict[str, Any], setting: Setting) -> None:
        from experiments.benchmark.peers.torch_calls import import_torch

        self.torch, self.setting = import_torch(), setting
        self.net = load(self.torch, settings(sizes, kernels=setting.kernels), tensors)

    def about(self) -> dict[str, Any]:
        """Return versions and settings."""
        return versions(self.torch)

    def close(self) -> None:
        """Give the memory back."""
        del self.net
        self.torch.cuda.empty_cache()

    def why(self, error: Exception) -> str:
        """Return what an exception is of: a part that the peer cannot run leaves those of ours to be timed."""
        self.torch.cuda.empty_cache()
        return "out_of_memory" if isinstance(error, self.torch.OutOfMemoryError) else "failed"

    def logits(self, text: np.ndarray) -> np.ndarray:
        """Return logits behind the end of a document and each byte but the last."""
        return read(self.torch, self.net, np.concatenate([[0], text[:-1]]))

    def prepare(self, part: str) -> Timed:
        """Return the call of a part."""
        torch, setting = self.torch, self.setting
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        if part in ("forward", "long"):
            rows, length = setting.forward if part == "forward" else (1, setting.long)
            ids = bases(torch, rows, length)
            call = lambda: self._pass(ids)  # noqa: E731
        else:
            rows = setting.rows if part == "write_rows" else 1
            behind = setting.long if part == "write_long" else setting.short
            call = Writer(torch, self.net, rows, behind, setting.new_bytes)

        def waited() -> None:
            call()
            torch.cuda.synchronize()

        return Timed(waited, {"peak_bytes": torch.cuda.max_memory_allocated})

    def _pass(self, ids: Any) -> Any:
        with self.torch.inference_mode():
            return self.net(ids)[0]


class Writer:
    """Greedy bytes behind caches that hold zeros, as its own generator draws them."""

    def __init__(self, torch: Any, net: Any, rows: int, behind: int, count: int) -> None:
        self.torch, self.net, self.behind, self.count = torch, net, behind, count
        self.caches = net.initialize_inference_params(max_seqlen=behind + count)
        self.caches["mha"].max_batch_size = rows
        self.ids = bases(torch, rows, PROMPT)
        with torch.inference_mode():
            net(self.ids, inference_params_dict=self.caches)
            for held in self.caches["mha"].key_value_memory_dict.values():
                held[:, PROMPT:].zero_()

    def __call__(self) -> None:
        """Write the bytes."""
        ids = self.ids[:, -1:]
        with self.torch.inference_mode():
            for place in range(self.behind, self.behind + self.count):
                for cache in self.caches.values():
                    cache.seqlen_offset = place
                logits, _ = self.net(ids, inference_params_dict=self.caches)
                ids = logits[:, -1].argmax(-1, keepdim=True)


def versions(torch: Any) -> dict[str, Any]:
    """Return versions of PyTorch and the peer, and whose attention it runs."""
    from importlib.metadata import version

    from experiments.benchmark.peers.torch_calls import about

    stands_in = "scaled_dot_product_attention of PyTorch"
    return {**about(torch), "vtx": version("vtx"), "attention": stands_in}


def bases(torch: Any, rows: int, length: int) -> Any:
    """Return rows of bases as the peer reads them, behind the end of a document."""
    drawn = np.random.default_rng(1).choice(np.frombuffer(b"ACGT", np.uint8), (rows, length)).astype(np.int64)
    drawn[:, 0] = 0
    return torch.as_tensor(drawn, device="cuda")


def import_vortex(torch: Any) -> Any:
    """Import the peer's model without flash-attn.

    Raises:
      RuntimeError: it is not installed.
    """
    # Let its operations be imported: none of them calls this library while `use_flash_attn` is off
    sys.modules.setdefault("flash_attn_2_cuda", types.ModuleType("flash_attn_2_cuda"))
    here = os.getcwd()
    # Avoid its log where the benchmark runs: it is opened at import
    os.chdir(tempfile.mkdtemp())
    try:
        from vortex.model import attention, model
    except ImportError as error:
        raise RuntimeError("the peer is not installed: pip install vtx==1.1.0 --no-deps") from error
    finally:
        os.chdir(here)
    logging.getLogger(model.StripedHyena.__name__).setLevel(logging.WARNING)
    attention.CrossAttention.forward = lambda own, q, kv, **_: attend(torch, q, kv)
    return model


def attend(torch: Any, q: Any, kv: Any) -> Any:
    """Return causal attention of the last queries [B, T, H, K] to keys and values [B, S, 2, H, K], T = S or T = 1."""
    q, k, v = (x.transpose(1, 2) for x in (q, *kv.unbind(2)))
    causal = q.shape[2] > 1
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)


def load(torch: Any, given: dict[str, Any], tensors: dict[str, Any]) -> Any:
    """Return the peer's model with these weights, loaded and rounded as its own loader does."""
    model = import_vortex(torch)
    from vortex.model.utils import dotdict

    net = model.StripedHyena(dotdict(given)).eval()
    with torch.inference_mode():
        net.to_bfloat16_except_pr_lc(to_float32=True)
        net.custom_load_state_dict({name: to_torch(torch, x) for name, x in tensors.items()})
        net.to_bfloat16_except_pr_lc()
    return net


def read(torch: Any, net: Any, ids: np.ndarray) -> np.ndarray:
    """Return logits [T, V] behind each id of a row."""
    # jax-triton empties this name for the whole process, and Triton then has no place to keep the peer's kernels
    if not os.environ.get("TRITON_CACHE_DIR", "unset"):
        del os.environ["TRITON_CACHE_DIR"]
    with torch.inference_mode():
        found = net(torch.as_tensor(ids.astype(np.int64)[None], device="cuda"))[0][0]
    return found.float().cpu().numpy()


def to_torch(torch: Any, array: Any) -> Any:
    """Return a tensor of an array of JAX, over the host; numpy has no bf16 that torch would take."""
    host = np.array(array)
    return (
        torch.from_numpy(host)
        if host.dtype == np.float32
        else torch.from_numpy(host.view(np.int16)).view(torch.bfloat16)
    )
