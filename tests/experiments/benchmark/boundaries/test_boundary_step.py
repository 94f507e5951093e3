"""The benchmark of a step by part: which operation belongs to which part."""

import re

from experiments.benchmark.boundaries.boundary_step import PARTS

INSIDE = "jit(train_step)/transpose(jvp(BLT))/BLT._decoded/"
PATHS = {
    "BLT._encode/encoder/encoder._periods/period_0/block_0/mlp/up/up.products/dot_general": "encoder",
    "BLT._encode/router/router._neighbours/router._turned/key/key.products/dot_general": "router",
    "BLT._encode/position/project/dot_general": "positions",
    "BLT.latent_forward/BLT._latent_forward/BLT._slots/up.read_bytes/up.keys/norm/rsqrt": "pooling",
    "BLT.latent_forward/BLT._latent_forward/BLT._slots/up.read_bytes/up.read/up/dot_general": "pooling",
    "BLT.latent_forward/BLT._latent_forward/BLT._over_slots/latent/latent._periods/mul": "latent",
    "BLT.latent_forward/BLT._latent_forward/BLT._over_slots/level/level._score/router/mul": "level",
    "BLT.latent_forward/BLT._latent_forward/jit(wrapper)/linear_scan/mpmd_map": "smoothing",
    "BLT._read_patches/down/up/up.products/dot_general": "un-merge",
    "BLT._read_patches/BLT._merge/keep/keep.products/dot_general": "un-merge",
    "decoder/decoder._periods/period_2/block_0/mlp/down/down.products/dot_general": "decoder",
}


def test_parts_are_told_by_paths() -> None:
    for path, part in PATHS.items():
        found = next(name for name, rule in PARTS.items() if re.search(rule, INSIDE + path))
        assert found == part, path
