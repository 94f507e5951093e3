"""Putting adapters on the stacks of a model's config, and asking which products of its blocks can have one."""

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import lru_cache
from inspect import signature
from math import prod
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxblt.adapters.retrieval.neighbours import Neighbours
from jaxblt.adapters.update.config import AdapterConfig
from jaxblt.adapters.update.site import BIAS_SITE, is_site
from jaxblt.einsums import read_equation
from jaxblt.layers import Linear
from jaxblt.mixers.attention.attention import AttentionConfig
from jaxblt.models.row_layout import RowLayout, promise
from jaxblt.models.stack import Block, StackConfig
from jaxblt.parallel.mesh import off_mesh
from jaxblt.random_keys import make_key
from pallas_kernels.runtime import Device, compiling_for, reference_ops

SHOWN = 4
"""Names that an error lists."""
ROUTER_SHARE = 0.05
"""Of the base's parameters, above which a report says that the routers are large."""
LENGTH = 16
"""Tokens of the row that a block is traced with."""
ANY_DEVICE = Device("gpu", (9, 0), "NVIDIA H200")
"""What a block is traced for: it has the ops that a config may name."""


class Site(NamedTuple):
    """Place where an adapter may go: a product of a block of one kind.

    Attributes:
      kind: of the block, a name of the stack's pattern.
      name: of the product below the block.
      into, out: sizes of the kernel's axes that are summed over, and of the others.
    """

    kind: str
    name: str
    into: tuple[int, ...]
    out: tuple[int, ...]

    @property
    def inputs(self) -> int:
        """Number of inputs, K."""
        return prod(self.into)

    @property
    def outputs(self) -> int:
        """Number of outputs, N."""
        return prod(self.out)


class Adapted(NamedTuple):
    """A site of one block that has an adapter.

    Attributes:
      site: the product.
      layer: number of the block in its stack.
      rank: of the adapter.
    """

    site: Site
    layer: int
    rank: int


def attach[C](config: C, adapter: AdapterConfig, stacks: Sequence[str] | None = None) -> C:
    """Return a model's config whose stacks have the adapter; parameters of the base keep their names.

    Args:
      config: of the model.
      adapter: what to attach. It takes the place of one that is attached already.
      stacks: names of the model's stacks, such as ("latent", "decoder"); None for all.

    Raises:
      ValueError: there is no such stack; routers read side features, and the model takes none; or as of `check_sites`.
    """
    found = stacks_of(config)
    names = tuple(found) if stacks is None else (stacks,) if isinstance(stacks, str) else tuple(stacks)
    unknown = [name for name in names if name not in found]
    if unknown or not names:
        raise ValueError(
            f"stacks {list(names)} of {type(config).__name__}: expected names of {list(found)}, its stacks"
        )
    changed: Any = {name: dataclasses.replace(found[name], adapter=adapter) for name in names}
    config = dataclasses.replace(config, **changed)  # pyright: ignore[reportArgumentType]
    check_sites(config)
    _check_queries(config)
    _check_side(config)
    return config


def retrievals(config: Any) -> dict[str, StackConfig]:
    """Return the stacks of a model's config whose routers search an index, by name."""
    if not dataclasses.is_dataclass(config):
        return {}
    routers = {name: getattr(stack.adapter, "router", None) for name, stack in stacks_of(config).items()}
    searching = [name for name, router in routers.items() if router and router.reads_of(Neighbours)]
    return {name: stacks_of(config)[name] for name in searching}


def _check_queries(config: Any) -> None:
    """Check that no stack before a router with an index has an adapter: queries are vectors of the base."""
    adapted = [name for name, stack in stacks_of(config).items() if stack.adapter is not None]
    for name in retrievals(config):
        if name != adapted[0]:
            raise ValueError(
                f"the router of stack {name!r} searches an index of the base, and stack {adapted[0]!r} before it "
                f"has an adapter, which changes its queries: use stacks=({adapted[0]!r},), or leave Neighbours out"
            )


def _check_side(config: Any) -> None:
    """Check that the model takes side features, through which they reach a router."""
    adapters = {name: stack.adapter for name, stack in stacks_of(config).items() if stack.adapter is not None}
    asked = {name: adapter.router.side for name, adapter in adapters.items() if adapter.router is not None}
    if any(asked.values()) and "side" not in signature(config.build().__call__).parameters:
        raise ValueError(
            f"routers read {asked} side features by stack, and the model of {type(config).__name__} takes none: "
            "leave Side out, or call a jaxblt.models.Stack, which takes `side`, in a model of your own"
        )


def detach[C](config: C) -> C:
    """Return the config of the base: no stack has an adapter."""
    found: Any = {n: dataclasses.replace(s, adapter=None) for n, s in stacks_of(config).items() if s.adapter}
    return dataclasses.replace(config, **found) if found else config  # pyright: ignore[reportArgumentType]


def stacks_of(config: Any) -> dict[str, StackConfig]:
    """Return the stacks of a model's config by the names of their fields, which are those of its submodules."""
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return {name: value for name, value in fields.items() if isinstance(value, StackConfig)}


def check_sites(config: Any) -> dict[str, list[Adapted]]:
    """Return the sites of every stack that have a low-rank update, layer by layer, each with its rank.

    Raises:
      ValueError: a pattern matches no product of any stack that has its adapter, patterns give a site two ranks or
        levels or a rank and a gate, a form does not fit a site, a rank is larger than the product's inputs or outputs,
        numbers of the code do not divide a gate's heads, or no site is left at the router's level.
    """
    adapted = {name: stack for name, stack in stacks_of(config).items() if stack.adapter is not None}
    known = {name: find_sites(stack) for name, stack in adapted.items()}
    # Stacks that share an adapter may read rows of different layouts, of bytes and of slots
    own = {name: promise(stack.adapter, RowLayout()) for name, stack in adapted.items()}
    for adapter in set(own.values()):
        names = {s.name for n in own if own[n] == adapter for s in known[n]}
        _check_patterns(adapter, sorted(names))
    for name, stack in adapted.items():
        _check_gates(name, stack.adapter, known[name])
        _check_forms(name, stack.adapter, known[name])
    return {name: list(_of_layers(name, stack, known[name])) for name, stack in adapted.items()}


def _of_layers(name: str, stack: StackConfig, sites: Sequence[Site]) -> Iterator[Adapted]:
    """Yield the sites of each layer that have an adapter."""
    for layer in range(stack.num_layers):
        kind = stack.pattern[layer % len(stack.pattern)]
        for site in sites:
            if site.kind == kind and (rank := _rank(stack.adapter, name, site, layer)) is not None:
                yield Adapted(site, layer, rank)


def _check_patterns(adapter: AdapterConfig, names: Sequence[str]) -> None:
    patterns = [pattern for pattern, _ in (*adapter.patterns, *adapter.forms)]
    for pattern in (*patterns, *adapter.gates):
        if not any(fnmatchcase(name, pattern) for name in names):
            near = get_close_matches(pattern, names, SHOWN, 0.0)
            raise ValueError(f"site pattern {pattern!r} matches no product; the nearest names are {near}")
    coded = [name for name in names if has_update(adapter, name)]
    _check_levels(adapter, [*coded, *([BIAS_SITE] if adapter.key_bias else [])])


def has_update(adapter: AdapterConfig, name: str) -> bool:
    """Return whether a site of a name has a low-rank update, a gate or a form."""
    return bool(adapter.ranks(name, 0) or adapter.has_gate(name) or adapter.forms_at(name))


def _check_gates(stack: str, adapter: AdapterConfig, sites: Sequence[Site]) -> None:
    for site in sites:
        if not adapter.has_gate(site.name):
            continue
        if adapter.ranks(site.name, 0):
            raise ValueError(
                f"site {site.name!r} of stack {stack!r} is given a rank by the patterns {adapter.patterns} and a gate "
                f"by {adapter.gates}: leave one of them out"
            )
        if adapter.router is not None and site.out[0] % adapter.numbers:
            raise ValueError(
                f"the gate of site {site.name!r} of stack {stack!r} has {site.out[0]} heads, and the code "
                f"{adapter.numbers} numbers, which do not divide them: set blocks, or rank without blocks, to a divisor"
            )


def _check_forms(stack: str, adapter: AdapterConfig, sites: Sequence[Site]) -> None:
    for site in sites:
        forms = adapter.forms_at(site.name)
        names = [form.name for form in forms]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(
                f"site {site.name!r} of stack {stack!r} is given two forms called {twice[0]!r} by the patterns "
                f"{adapter.forms}: leave one out"
            )
        for form in forms:
            form.check(site.name, site.inputs, site.outputs, adapter.form_numbers)


def _check_levels(adapter: AdapterConfig, sites: Sequence[str]) -> None:
    for pattern, _ in adapter.levels:
        if not any(fnmatchcase(name, pattern) for name in sites):
            near = get_close_matches(pattern, sites, SHOWN, 0.0)
            raise ValueError(f"level pattern {pattern!r} matches no site; the nearest names are {near}")
    asked = {name: adapter.levels_at(name) for name in sites}
    for name, levels in asked.items():
        if len(levels) > 1:
            raise ValueError(
                f"site {name!r} is given levels {sorted(levels)} by the patterns {adapter.levels}: leave one out"
            )
    if all(asked.values()) and adapter.levels:
        raise ValueError(
            f"levels {adapter.levels} leave no site to the router's own level: set RouterConfig.level to one of them"
        )


def _rank(adapter: AdapterConfig, stack: str, site: Site, layer: int) -> int | None:
    """Return the rank at a site, None without an adapter; raise ValueError for two, or one that is too large."""
    ranks = adapter.ranks(site.name, layer)
    if len(ranks) > 1:
        raise ValueError(
            f"site {site.name!r} of stack {stack!r} is given ranks {sorted(ranks)} by the patterns "
            f"{adapter.patterns}: leave one of them out"
        )
    for rank in ranks:
        if rank > min(site.inputs, site.outputs):
            raise ValueError(
                f"rank {rank} at site {site.name!r} of stack {stack!r} is more than its {site.inputs} inputs or "
                f"{site.outputs} outputs: use a rank of at most {min(site.inputs, site.outputs)}"
            )
        return rank
    return None


def find_sites(stack: StackConfig) -> list[Site]:
    """Return the products of a stack's blocks that an adapter may go to, by the kinds of its pattern."""
    bare = dataclasses.replace(stack, adapter=None)
    return [site for kind in dict.fromkeys(stack.pattern) for site in _of_block(bare, kind)]


@lru_cache(maxsize=256)
def _of_block(stack: StackConfig, kind: str) -> tuple[Site, ...]:
    found: dict[str, Site] = {}

    def record(call: Any, args: Any, options: Any, context: Any) -> Any:
        module = context.module
        if isinstance(module, Linear) and context.method_name == "weights" and is_site(module, args[0]):
            shape, name = module.kernel_shape(args[0]), "/".join(module.path)
            count = len(read_equation(module.equation).summed)
            found[name] = Site(kind, name, shape[:count], shape[count:])
        return call(*args, **options)

    @contextmanager
    def recording() -> Any:
        # Start no backend, before which several processes have to join: name a device, and take no op made for it
        with off_mesh(), compiling_for(ANY_DEVICE), reference_ops(), nn.intercept_methods(record):
            yield

    with recording():
        x = jax.ShapeDtypeStruct((1, LENGTH, stack.dim), jnp.float32)
        block = Block(stack, kind, jnp.float32)
        jax.eval_shape(lambda x: block.init(make_key(0), x, None, None, None), x)
    return tuple(found.values())


def _gated(config: StackConfig) -> list[Site]:
    """Return the sites with gates."""
    return [site for site in find_sites(config) if config.adapter.has_gate(site.name)]


def _formed(stack: str, config: StackConfig) -> Iterator[str]:
    """Yield a line with the sites of each form."""
    sites = find_sites(config)
    for form in dict.fromkeys(form for _, form in config.adapter.forms):
        own = [f"{site.kind}:{site.name}" for site in sites if form in config.adapter.forms_at(site.name)]
        yield f"forms           {stack}, {form.name}: {', '.join(own)}"


def _levels(stack: str, config: StackConfig, sites: Sequence[Adapted]) -> Iterator[str]:
    """Yield a line with the sites of each level, where there are several."""
    adapter = config.adapter
    there = (
        site.name for site in find_sites(config) if adapter.has_gate(site.name) or adapter.forms_at(site.name)
    )
    names = dict.fromkeys([*(each.site.name for each in sites), *there])
    for place, level in enumerate(adapter.level_names if adapter.levels else ()):
        own = [name for name in names if adapter.place(name) == place]
        yield f"levels          {stack}, {level}: {', '.join(own)}"


def _routers(stack: str, config: StackConfig) -> Iterator[str]:
    """Yield a line with the number of routers, where each block has its own."""
    if config.adapter.of_blocks:
        count = config.num_layers * len(config.adapter.level_names)
        yield f"routers         {stack}: {count}, each reads the input of its block"


def _named(sites: Sequence[Adapted], rank: int) -> Iterator[str]:
    """Yield the sites of a rank; with their layers where it is another one elsewhere."""
    for site in dict.fromkeys(each.site for each in sites if each.rank == rank):
        layers = [str(each.layer) for each in sites if (each.site, each.rank) == (site, rank)]
        several = {each.rank for each in sites if each.site == site} != {rank}
        yield f"{site.kind}:{site.name}" + (f" (layers {' '.join(layers)})" if several else "")


def describe_sites(config: Any, trained: int, router: int, base: int, total: int | None = None) -> list[str]:
    """Return a run's report of its adapters: sites, ranks, trained parameters, and the routers' share of the base.

    Args:
      config: of the model.
      trained: number of parameters that are trained.
      router: of these, the routers'.
      base: number of parameters of the base.
      total: of the whole model; None for the base and what is trained, which may share parameters.
    """
    lines = []
    for name, sites in check_sites(config).items():
        stack = stacks_of(config)[name]
        for rank in sorted({each.rank for each in sites}):
            lines.append(f"adapters        {name}, rank {rank}: {', '.join(_named(sites, rank))}")
        if gated := _gated(stack):
            lines.append(f"gates           {name}: {', '.join(f'{site.kind}:{site.name}' for site in gated)}")
        if stack.adapter.key_bias:
            found = [kind for kind, mixer in stack.mixers.items() if isinstance(mixer, AttentionConfig)]
            lines.append(f"key bias        {name}: {', '.join(found)}")
        lines += _formed(name, stack)
        lines += _levels(name, stack, sites)
        lines += _routers(name, stack)
    share = f", of which routers {router:,} ({router / max(base, 1):.2%} of the base)" if router else ""
    lines.append(f"trained         {trained:,} of {total or base + trained:,} parameters{share}")
    if router > ROUTER_SHARE * base:
        lines.append(
            f"large router    over {ROUTER_SHARE:.0%} of the base: RouterConfig.hidden makes it smaller"
        )
    return lines
