"""A bank whose experts start as given LoRAs."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxblt.adapters.files.distill import truncated
from jaxblt.adapters.files.merge import limited_code
from jaxblt.adapters.files.peft import places
from jaxblt.adapters.update.attach import check_sites, stacks_of
from jaxblt.adapters.update.config import AdapterConfig
from jaxblt.adapters.update.site import ADAPTER
from jaxblt.models.stack import stack_periods, unstack_periods


def warm_start(config: Any, params: Any, loras: Sequence[tuple[Any, Any]]) -> Any:
    """Return parameters of a model whose bank has the given LoRAs for experts: a one-hot code gives the update of one.

    The update dW_e = s_e V_e U_e of a site is factored by SVD, which QR of its factors makes one of r x r. Its largest
    r/E singular values go into the block of expert e: exact for LoRAs of rank r/E or less, else the best approximation
    in the Frobenius norm. Ranks that a smaller LoRA leaves keep the V that `params` has, with U = 0.

    Args:
      config: of the model, whose stacks have one adapter with `blocks`, without a governor.
      params: of the model or its trained part, as they were drawn.
      loras: (config, params) of the same model with static adapters, one for each expert; whole or the trained part.

    Raises:
      ValueError: the adapter is no bank, or governed; there are no LoRAs, or not as many as experts; one has a router
        or gates or forms, is missing at a site, or adapts more than the bank.
    """
    if not loras:
        raise ValueError("loras is empty: give a LoRA for each expert of the bank")
    banks = {name: stack.adapter for name, stack in stacks_of(config).items() if stack.adapter is not None}
    for name, bank in banks.items():
        _check_bank(name, bank, len(loras))
    there = {place.path for place in places(config)}
    for number, (own, _) in enumerate(loras):
        _check_lora(number, own, banks)
        if more := [place.path for place in places(own) if place.path not in there]:
            raise ValueError(
                f"loras[{number}] has an adapter at {'/'.join(more[0])} ({len(more)} such sites), where the bank has "
                "none: give the bank all its sites"
            )
    trees = {name: unstack_periods(params[name]) for name in check_sites(config)}
    given = [{name: unstack_periods(own[name]) for name in banks if name in own} for _, own in loras]
    for place in places(config):
        bank, path = banks[place.path[0]], (*place.path, ADAPTER)
        block = place.rank // len(loras)
        v, u = (_at(trees, path, "params")[name] for name in "vu")
        downs, ups = [], []
        for i, ((own, _), tree) in enumerate(zip(loras, given, strict=True)):
            static = stacks_of(own)[place.path[0]].adapter
            down, up = _factors(_at(tree, path, f"loras[{i}]"), static, bank.scale(place.rank), block)
            left = slice(i * block + down.shape[1], (i + 1) * block)
            downs += [down, v.reshape(-1, place.rank)[:, left].astype(jnp.float32)]
            ups += [up, jnp.zeros((block - len(up), up.shape[1]), jnp.float32)]
        new = {"v": jnp.concatenate(downs, 1).reshape(v.shape), "u": jnp.concatenate(ups).reshape(u.shape)}
        trees = _with(trees, path, new)
    stacks = stacks_of(config)
    return {**params, **{n: stack_periods(tree) if stacks[n].scan else tree for n, tree in trees.items()}}


def _check_bank(name: str, bank: AdapterConfig, loras: int) -> None:
    if bank.blocks != loras or bank.governor is not None:
        raise ValueError(
            f"{loras} LoRAs are to start the experts of stack {name!r}, whose adapter has blocks = {bank.blocks} and "
            f"governor = {bank.governor}: set blocks={loras} and governor=None"
        )


def _check_lora(number: int, config: Any, banks: Mapping[str, AdapterConfig]) -> None:
    for name in banks:
        adapter = stacks_of(config)[name].adapter if name in stacks_of(config) else None
        if adapter is None or adapter.router is not None or adapter.gates or adapter.forms:
            kind = "gates" if adapter is not None and adapter.gates else "forms"
            kind = "a router" if adapter is not None and adapter.router is not None else kind
            has = "no adapter" if adapter is None else f"an adapter with {kind}"
            raise ValueError(
                f"loras[{number}] has {has} on stack {name!r}, expected static LoRA: train or distil it"
            )


def _factors(
    tree: Mapping[str, Any], static: AdapterConfig, scale: float, most: int
) -> tuple[Float[Array, "K k"], Float[Array, "k N"]]:
    """Return V and U of `most` ranks or fewer with scale V U = dW of a LoRA, or as near to it as they come."""
    rank = tree["v"].shape[-1]
    v, u = tree["v"].astype(jnp.float32).reshape(-1, rank), tree["u"].astype(jnp.float32).reshape(rank, -1)
    code = limited_code(tree, static, v[None], u[None], jnp.ones((1,), jnp.float32))[0, 0]
    down, up = truncated(v * (code * jnp.float32(static.scale(rank))), u, min(rank, most))
    return down, up / jnp.float32(scale)


def _at(tree: Any, path: tuple[str, ...], whose: str) -> Any:
    for name in path:
        if name not in tree:
            raise ValueError(f"{whose} has no adapter at {'/'.join(path[:-1])}: use the sites of the bank")
        tree = tree[name]
    return tree


def _with(tree: Any, path: tuple[str, ...], new: Any) -> Any:
    """Return the tree with another subtree at a path."""
    return new if not path else {**tree, path[0]: _with(tree[path[0]], path[1:], new)}
