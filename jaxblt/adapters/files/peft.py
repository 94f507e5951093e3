"""Adapters as files that the PEFT library reads and writes: `adapter_config.json`, `adapter_model.safetensors`.

A site is `base_model.model.<stack>.<period>.<block>.<name>`, with dots, by the names of an unrolled stack. Its entry
`lora_A.weight` [r, K] is V transposed and `lora_B.weight` [N, r] is U transposed, both fp32. What `also_train` trained
is in no such file. The metadata of the weights have a seal (`jaxblt.seals`) on both files, without the base's name in
the config. PEFT writes none.
"""

import json
import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jaxblt.adapters.files.merge import code_at, code_to_merge, limited_code
from jaxblt.adapters.update.attach import Site, check_sites, stacks_of
from jaxblt.adapters.update.site import ADAPTER
from jaxblt.models.stack import StackConfig, stack_periods, unstack_periods
from jaxblt.outputs import whole_file
from jaxblt.precision.weights import refuse_quantized
from jaxblt.seals import check_seal, seal

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
SHOWN = 3
"""Entries that an error names."""
PLAIN = {"peft_type": "LORA", "bias": "none", "use_rslora": False, "use_dora": False, "modules_to_save": None}
"""What a file must say of settings that change what its entries mean, if it says anything."""
PLAIN_READ = PLAIN | {
    "alpha_pattern": {},
    "lora_bias": False,
    "alora_invocation_tokens": None,
    "arrow_config": None,
}
"""Of files of others, which may say more; the last two switch an adapter on by the text, where ours is always on."""
OURS = ("r", "lora_alpha", "rank_pattern")
"""Settings that `attach` has, too."""
UNSAID = {"r": 8, "lora_alpha": 8}
"""What PEFT takes where a file says nothing of them."""
MOVE_THE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Starts of `init_lora_weights` after which PEFT takes the first update out of the base: entries mean another base."""
FILES_MOST = 1 << 20
"""Bytes of a config that is read."""


class Place(NamedTuple):
    """A site of one block: its path below the model, what it is, and its rank."""

    path: tuple[str, ...]
    site: Site
    rank: int

    @property
    def names(self) -> tuple[str, str]:
        """Names of the entries for V and U."""
        stem = PREFIX + ".".join(self.path)
        return f"{stem}.lora_A.weight", f"{stem}.lora_B.weight"


def places(config: Any) -> Iterator[Place]:
    """Return the sites of every block of a model's config, by the names of unrolled stacks."""
    stacks = stacks_of(config)
    for name, sites in check_sites(config).items():
        for site, layer, rank in sites:
            yield Place((name, *_block(stacks[name], layer), *site.name.split("/")), site, rank)


def _block(stack: StackConfig, layer: int) -> tuple[str, str]:
    period, place = divmod(layer, len(stack.pattern))
    return ("rest" if period == stack.repeats else f"period_{period}"), f"block_{place}"


def save_peft(
    folder: str | os.PathLike[str],
    config: Any,
    params: Any,
    *,
    code: Float[Array, "*L W"] | None = None,
    base_name: str = "",
    base_hash: str | None = None,
) -> None:
    """Write a model's adapters; nothing is overwritten.

    Args:
      folder: made if it is not there.
      config: of the model.
      params: of the model, or the trained part.
      code: of a routed adapter, which such files cannot hold: the one to fix it at, as for `fuse`.
      base_name: of the base, for readers.
      base_hash: content hash of the base (`Run.base_hash`), which `load_peft` compares; stored as its "revision".

    Raises:
      FileExistsError: the folder holds an adapter already.
      ValueError: there is a router and no code, the stacks' adapters have other alphas, or one has gates or forms.
    """
    file = Path(folder) / WEIGHTS
    if file.exists() or (Path(folder) / CONFIG).exists():
        raise FileExistsError(
            f"{folder} holds an adapter already, and nothing is overwritten: choose another folder"
        )
    said = _described(config) | {"base_model_name_or_path": base_name, "revision": base_hash}
    arrays, stacks = {}, stacks_of(config)
    unrolled = {name: unstack_periods(params[name]) for name in check_sites(config)}
    for place in places(config):
        tree = _at(unrolled, (*place.path, ADAPTER))
        refuse_quantized(tree, "writing adapters")
        stack = stacks[place.path[0]]
        numbers = code_at(stack, code_to_merge(stack, code), place.path[1:])
        numbers = jnp.ones((1,), jnp.float32) if numbers is None else numbers.reshape(-1)
        v, u = tree["v"].reshape(-1, place.rank), tree["u"].reshape(place.rank, -1)
        v, u = (x.astype(jnp.float32) for x in (v, u))
        numbers = limited_code(tree, stack.adapter, v[None], u[None], numbers)[0]
        u = u * jnp.repeat(numbers, place.rank // len(numbers))[:, None]
        v, u = np.asarray(v).T, np.asarray(u).T
        arrays |= dict(zip(place.names, map(np.ascontiguousarray, (v, u)), strict=True))
    Path(folder).mkdir(parents=True, exist_ok=True)
    with whole_file(file) as partial:
        save_file(arrays, partial, metadata=seal(arrays, {"format": "pt"}, beside=_sealed(said)))
    (Path(folder) / CONFIG).write_text(json.dumps(said, indent=2) + "\n", encoding="utf-8")


def _at(tree: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        if name not in tree:
            raise ValueError(f"the parameters have no adapter at {'/'.join(path)}: load or train it first")
        tree = tree[name]
    return tree


def _described(config: Any) -> dict[str, Any]:
    """Return the contents of `adapter_config.json`; PEFT scales by alpha over the rank of a site."""
    found = [(place, stacks_of(config)[place.path[0]].adapter) for place in places(config)]
    adapters = [stack.adapter for stack in stacks_of(config).values() if stack.adapter is not None]
    if gates := [adapter.gates for adapter in adapters if adapter.gates]:
        raise ValueError(
            f"such files hold LoRA only, and the config's adapter has gates {gates[0]}: leave them out"
        )
    if forms := [adapter.forms for adapter in adapters if adapter.forms]:
        raise ValueError(
            f"such files hold LoRA only, and the config's adapter has forms {forms[0]}: leave them out"
        )
    if not found:
        raise ValueError("the config has no adapter: attach one (jaxblt.adapters.update.attach)")
    alphas = {adapter.alpha * (adapter.blocks or 1) for _, adapter in found}
    if len(alphas) > 1:
        raise ValueError(
            f"stacks have adapters of alphas {sorted(alphas)}, and such a file holds one: use one alpha"
        )
    rank = found[0][0].rank
    return PLAIN | {
        "r": rank,
        "lora_alpha": alphas.pop(),
        "lora_dropout": 0.0,
        "rank_pattern": _rank_pattern([place for place, _ in found], rank),
        "target_modules": sorted({_dotted(place.site.name) for place, _ in found}),
        "inference_mode": True,
        "task_type": None,
    }


def _rank_pattern(found: Sequence[Place], rank: int) -> dict[str, int]:
    """Return the ranks that are not `rank`, by the names of products; by paths where these have several."""
    ranks: dict[str, set[int]] = defaultdict(set)
    for place in found:
        ranks[place.site.name].add(place.rank)
    return {
        _dotted(place.site.name) if len(ranks[place.site.name]) == 1 else ".".join(place.path): place.rank
        for place in found
        if place.rank != rank
    }


def _dotted(name: str) -> str:
    return name.replace("/", ".")


def load_peft(folder: str | os.PathLike[str], config: Any, *, base_hash: str | None = None) -> dict[str, Any]:
    """Return the adapters of a model's config from files, to lay over the base with `join_params`; fp32.

    Args:
      folder: that `save_peft` or PEFT wrote.
      config: of the model, with a static adapter of the files' sites, rank and alpha.
      base_hash: content hash of the base (`Run.base_hash`); None compares nothing.

    Raises:
      FileNotFoundError: a file is missing.
      ValueError: an entry is missing, foreign, not finite or of another shape; rank, alpha or base differs; the files
        name no base and `base_hash` is given; they use what is not supported (DoRA, rsLoRA, biases, alphas by site,
        invocation by tokens or by Arrow, starts that change the base); or they are damaged, or not as they were sealed.
    """
    said, arrays, text = _read(folder)
    _check_config(said, config, folder, base_hash)
    expected = {name: place for place in places(config) for name in place.names}
    for words, names in (("lacks", expected.keys() - arrays), ("has the foreign", arrays.keys() - expected)):
        if names:
            shown = ", ".join(sorted(names)[:SHOWN])
            raise ValueError(
                f"{folder} {words} entries {shown} ({len(names)} in all): its sites are not those of the config's "
                "adapter, attach one with the same"
            )
    check_seal(Path(folder) / WEIGHTS, arrays, text, beside=_sealed(said), ours=False)
    trees: dict[str, Any] = {}
    stacks = stacks_of(config)
    for place in places(config):
        v, u = (arrays[name] for name in place.names)
        shapes = (place.rank, place.site.inputs), (place.site.outputs, place.rank)
        if (v.shape, u.shape) != shapes:
            raise ValueError(
                f"{folder}: {place.names[0]} and lora_B have shapes {v.shape} and {u.shape}, expected {shapes[0]} and "
                f"{shapes[1]}: use files of a model of this width"
            )
        if not all(jnp.issubdtype(x.dtype, jnp.floating) for x in (v, u)):
            raise ValueError(
                f"{folder}: {place.names[0]} and lora_B hold {v.dtype} and {u.dtype}, expected floats: have PEFT write "
                "them again"
            )
        tree = trees
        for name in (*place.path, ADAPTER):
            tree = tree.setdefault(name, {})
        tree["v"] = jnp.asarray(v.T.astype(np.float32).reshape(*place.site.into, place.rank))
        tree["u"] = jnp.asarray(u.T.astype(np.float32).reshape(place.rank, *place.site.out))
        if (governor := stacks[place.path[0]].adapter.governor) is not None:
            tree["tau"] = jnp.full((1,), governor.start, jnp.float32)
    return {name: stack_periods(tree) if stacks[name].scan else tree for name, tree in trees.items()}


def _sealed(said: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a config that the weights' seal covers: a base may be renamed when it is published."""
    return {name: value for name, value in said.items() if name != "base_model_name_or_path"}


def read_config(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Read what a folder's `adapter_config.json` says.

    Raises:
      FileNotFoundError: it is missing.
      ValueError: it is no JSON object of at most a megabyte.
    """
    with _readable(folder, CONFIG) as path, open(path, "rb") as file:
        said = json.loads(file.read(FILES_MOST))
    if not isinstance(said, dict):
        raise ValueError(f"{folder}/{CONFIG} holds a {type(said).__name__}, expected an object")
    return said


def _read(folder: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, np.ndarray], dict[str, str]]:
    """Return the config, the weights by name, and the text of the weights' file."""
    said = read_config(folder)
    with _readable(folder, WEIGHTS) as path, safe_open(path, framework="np") as file:
        arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
        return said, arrays, dict(file.metadata() or {})


@contextmanager
def _readable(folder: str | os.PathLike[str], name: str) -> Iterator[Path]:
    """Return the path of a file of an adapter inside a context that tells in one line what stops its reader."""
    path = Path(folder) / name
    if not path.is_file():
        raise FileNotFoundError(f"{folder} holds no adapter: {name} is missing")
    try:
        yield path
    except (ValueError, RecursionError, SafetensorError) as error:
        line = " ".join(str(error).split())
        raise ValueError(f"{path} holds no adapter that can be read: {line}") from error


def _check_config(said: dict[str, Any], config: Any, folder: Any, base_hash: str | None) -> None:
    if any(stack.adapter and stack.adapter.router for stack in stacks_of(config).values()):
        raise ValueError("such files hold static adapters, and the config's has a router: set router=None")
    start = str(said.get("init_lora_weights"))
    if start.lower().startswith(MOVE_THE_BASE):
        raise ValueError(
            f"{folder}/{CONFIG}: init_lora_weights is {start!r}, which changed the base, too: have PEFT convert it, "
            "save_pretrained(path_initial_model_for_weight_conversion=)"
        )
    wanted = PLAIN_READ | {name: _described(config)[name] for name in ("r", "lora_alpha")}
    if said.get("rank_pattern"):
        wanted["rank_pattern"] = _described(config)["rank_pattern"]
    for name, value in wanted.items():
        if (told := said.get(name, UNSAID.get(name, value))) != value:
            fix = "attach an adapter like the files'" if name in OURS else "have PEFT write plain LoRA"
            raise ValueError(f"{folder}/{CONFIG}: {name} is {told!r}, expected {value!r}: {fix}")
    if base_hash is None or (found := said.get("revision")) == base_hash:
        return
    if found is None:
        raise ValueError(
            f"{folder}/{CONFIG} names no base to compare with base_hash = {base_hash}: write the files with "
            "save_peft(base_hash=), or leave base_hash out to compare nothing"
        )
    raise ValueError(
        f"{folder} was trained over another base: its content hash is {found}, expected {base_hash}: use files of this "
        "base"
    )
