"""The cost of adapters in time and memory: python -m experiments.benchmark adapter_speed --out FILE."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxblt.validation import check_bounds, check_fields

if TYPE_CHECKING:
    from jaxblt.models import ByteLMConfig


ARMS = ("none", "static", "prefix", "chunk", "token", "full")
"""No adapter, a static one, routed ones by level, and all parameters trained."""


@dataclass(frozen=True)
class Setting:
    """The model, its adapters, and what is run; as it is, the model is that of the recipe `books_512`.

    Attributes:
      dim, layers: of the model.
      scan: compile one layer and loop over it, as that recipe does.
      rank, chunk, prefix, hidden: of adapters and routers; sites are "mixer/*" and "mlp/*".
      shapes: (rows, bytes) of forward passes.
      step: (rows, bytes) of a train step.
      rows: of each batch that is decoded.
      prompt, new_bytes: of each row of these.
      trials: of each timing, at least 20.
    """

    dim: int = 512
    layers: int = 8
    scan: bool = True
    rank: int = 16
    chunk: int = 64
    prefix: int = 128
    hidden: int = 48
    shapes: tuple[tuple[int, int], ...] = ((1, 128), (4, 256), (8, 512), (2, 2048))
    step: tuple[int, int] = (8, 4096)
    rows: tuple[int, ...] = (1, 64)
    prompt: int = 192
    new_bytes: int = 64
    trials: int = 20

    def __post_init__(self) -> None:
        check_fields(self)
        check_bounds(
            self, "dim", "layers", "rank", "chunk", "prefix", "hidden", "prompt", "new_bytes", least=1
        )
        check_bounds(self, "trials", least=20)


def adapter_speed(
    out: str = "runs/benchmark/adapter_speed.json",
    arms: tuple[str, ...] = ARMS,
    setting: Setting = Setting(),
) -> dict[str, Any]:
    """Time passes, steps and decoding in bf16 of a frozen model and its adapters.

    All parameters are drawn. Parameters are fp32, but the kernels of a base are bf16 in train steps, as runs hold them.
    `compared` has each arm's seconds over those of none (forward) and of full fine-tuning (steps), its bytes a second
    over those of none (decoding), and the share of a step that a router takes: what it costs more than static. A call
    with the file of an earlier one goes on with it: arms that the file has are not measured again.

    Args:
      out: file for the figures as JSON, written anew after each arm, or the file of an earlier call.
      arms: of `ARMS`.
      setting: of all of them.

    Raises:
      ValueError: there is no such arm, or the file is of another setting.
    """
    from experiments.benchmark.figures.saved import save

    if unknown := [name for name in arms if name not in ARMS]:
        raise ValueError(f"unknown arms {unknown}, choose of: {', '.join(ARMS)}")
    said = {"setting": asdict(setting)}
    found: dict[str, Any] = said | {"arms": read_back(out, said).get("arms", {})}
    for name in [name for name in arms if name not in found["arms"]]:
        found["arms"][name] = measure_arm(name, setting)
        save("adapter_speed", out, found | {"compared": compared(found["arms"])})
    return found | {"compared": compared(found["arms"])}


def model_of(name: str, setting: Setting) -> "ByteLMConfig":
    """Return the model of an arm."""
    from jaxblt.adapters import AdapterConfig, ChunkMean, Clamp, Prefix, RouterConfig, attach
    from jaxblt.mixers import AttentionConfig
    from jaxblt.models import ByteLMConfig, StackConfig
    from jaxblt.models.row_layout import RowLayout

    heads = AttentionConfig(dim=setting.dim, num_heads=max(setting.dim // 64, 1))
    stack = StackConfig(
        dim=setting.dim, num_layers=setting.layers, pattern="A", mixers={"A": heads}, scan=setting.scan
    )
    model = ByteLMConfig(stack=stack)
    if name not in ("none", "full"):
        adapter = AdapterConfig(sites=("mixer/*", "mlp/*"), rank=setting.rank, alpha=2.0 * setting.rank)
        if name != "static":
            level: Any = name
            router = RouterConfig(
                level=level,
                chunk=setting.chunk,
                reads=(ChunkMean(), Prefix(setting.prefix)),
                hidden=setting.hidden,
            )
            adapter = replace(adapter, router=router, code=(Clamp(3.0),))
        model = attach(model, adapter)
    return model.in_rows(RowLayout(packed=False), RowLayout(packed=False))


def measure_arm(name: str, setting: Setting) -> dict[str, Any]:
    """Return how many parameters are trained, and seconds of everything."""
    import flax.linen as nn
    import jax
    import jax.numpy as jnp

    from experiments.benchmark.figures.programs import time_program
    from experiments.benchmark.models.forward_pass import narrow_kernels
    from jaxblt.adapters import split_params
    from jaxblt.training.flops import count_params

    config = model_of(name, setting)
    module = config.build(dtype=jnp.bfloat16)
    drawn = jax.jit(module.init)(jax.random.key(0), jnp.zeros((1, 2), jnp.int32))
    params = nn.meta.unbox(drawn)["params"]
    base, trained = ({}, params) if name == "full" else split_params(params)
    forward = jax.jit(lambda params, ids: module.apply({"params": params}, ids)[0])
    found: dict[str, Any] = {"parameters": count_params(trained)[0]}
    found["forward"] = [
        {"rows": rows, "length": length}
        | time_program(forward, (params, _ids(rows, length)), setting.trials)[0]
        for rows, length in setting.shapes
    ]
    if name != "none":
        step, state = make_step(module)
        carried = trained, state(trained)
        found["step"] = time_program(
            step, (narrow_kernels(base), *carried, _ids(*setting.step)), setting.trials
        )[0]
    found["decoding"] = [_decoding(config, params, rows, setting) for rows in setting.rows]
    return found


def make_step(module: Any) -> tuple[Callable[..., Any], Callable[[Any], Any]]:
    """Return (base, trained, state, ids) -> trained, state, loss, compiled at its first call, and the state before."""
    import jax
    import jax.numpy as jnp
    import optax

    from jaxblt.adapters import join_params
    from jaxblt.training.metrics import cross_entropy

    optimizer = optax.adam(1e-4)

    def step(base: Any, trained: Any, state: Any, ids: Any) -> Any:
        def loss(trained: Any) -> Any:
            logits = module.apply({"params": join_params(base, trained)}, ids)[0]
            return jnp.mean(cross_entropy(logits[:, :-1], ids[:, 1:]))

        value, gradient = jax.value_and_grad(loss)(trained)
        with jax.numpy_dtype_promotion("standard"):
            update, state = optimizer.update(gradient, state)
        return optax.apply_updates(trained, update), state, value

    return jax.jit(step), optimizer.init


def _decoding(config: Any, params: Any, rows: int, setting: Setting) -> dict[str, Any]:
    """Return seconds of a prompt and of the bytes behind it."""
    import jax
    import jax.numpy as jnp

    from experiments.benchmark.figures.programs import time_program
    from jaxblt.inference import Decoder, decode_step, prefill, unroll

    decoder, total = Decoder(config, dtype=jnp.bfloat16), setting.prompt + setting.new_bytes
    params, ids = {"model": params}, _ids(rows, total)
    prompt, rest = ids[:, : setting.prompt], ids[:, setting.prompt :]

    @jax.jit
    def read(params: Any, prompt: Any) -> Any:
        return prefill(decoder, params, prompt, jnp.ones_like(prompt), num_bytes=total)

    @jax.jit
    def write(params: Any, state: Any, rest: Any) -> Any:
        def body(state: Any, column: Any) -> Any:
            logits, _, state = decode_step(decoder, params, column, state, jnp.ones_like(column))
            return state, logits

        return jax.lax.scan(body, state, rest.T)[1][-1]

    reading, (_, state) = time_program(read, (params, prompt), setting.trials)
    decoder, params, state = unroll(decoder, params, state, rows=rows)
    writing, _ = time_program(write, (params, state, rest), setting.trials)
    return {
        "rows": rows,
        "read": reading,
        "write": writing,
        "bytes_per_second": rest.size / writing["median"],
    }


def _ids(rows: int, length: int) -> Any:
    import jax.numpy as jnp
    import numpy as np

    from jaxblt.data import load_sample, vocab

    text = np.resize(vocab.encode(load_sample("book")), rows * length).astype(np.int32)
    return jnp.asarray(text.reshape(rows, length))


def compared(arms: dict[str, Any]) -> dict[str, Any]:
    """Return ratios of medians between the arms that are there."""
    none, static, full = (arms.get(name) for name in ("none", "static", "full"))
    found: dict[str, Any] = {}
    for name, arm in arms.items():
        here = found[name] = {}
        if none:
            pairs = zip(arm["forward"], none["forward"], strict=True)
            here["forward_over_none"] = [ours["median"] / theirs["median"] for ours, theirs in pairs]
            pairs = zip(arm["decoding"], none["decoding"], strict=True)
            here["decoding_over_none"] = [a["bytes_per_second"] / b["bytes_per_second"] for a, b in pairs]
        if full and "step" in arm:
            here["step_over_full"] = arm["step"]["median"] / full["step"]["median"]
        if static and name in ("prefix", "chunk", "token"):
            here["router_of_step"] = 1 - static["step"]["median"] / arm["step"]["median"]
    return found


def read_back(out: str, said: dict[str, Any]) -> dict[str, Any]:
    """Return the figures that an earlier call left in `out`; none without a file.

    Args:
      out: JSON file.
      said: what both calls must have in common.

    Raises:
      ValueError: the file says something else, or nothing, of that.
    """
    if not Path(out).is_file():
        return {}
    found = json.loads(Path(out).read_text(encoding="utf-8"))
    for name, value in json.loads(json.dumps(said)).items():
        if found.get(name) != value:
            raise ValueError(
                f"{out} has {name} = {found.get(name)}, and this call has {value}: a call goes on with what one of the "
                "same settings measured, choose another --out"
            )
    return found
