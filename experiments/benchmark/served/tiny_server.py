"""A server of a tiny model with drawn parameters, to load the server itself: python -m ...served.tiny_server."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from jaxblt.cli.parsing import parse, run
from jaxblt.cli.serve import read_lane


def serve_tiny(lanes: str, max_waiting: int, port: int = 0) -> None:
    """Serve a byte model of one layer until SIGTERM, with some of the options of `jaxblt serve`.

    Args:
      lanes: rows and bytes of the one lane.
      max_waiting: requests that may wait.
      port: to listen at.
    """
    import flax.linen as nn
    import jax
    import jax.numpy as jnp

    from jaxblt.inference import Decoder
    from jaxblt.inference.engine import Engine, EngineConfig
    from jaxblt.inference.server import Service, run_server
    from jaxblt.models import ByteLMConfig, StackConfig

    model = ByteLMConfig(stack=StackConfig(dim=32, num_layers=1, pattern="A", mlp_dim=32))
    decoder = Decoder(model)
    built: Any = decoder.build()
    drawn = jax.jit(built.init)(jax.random.key(0), jnp.ones((1, 8), jnp.int32))
    params = {"model": nn.meta.unbox(drawn)["params"]}
    tiny: Any = SimpleNamespace(recipe=None, decoder=decoder, decoder_params=params)
    engine = Engine(tiny, EngineConfig((read_lane(lanes),), max_waiting), as_trained=False)
    engine.warm()
    service = Service(tiny, engine, "tiny")
    with engine:
        run_server(
            service,
            host="127.0.0.1",
            port=port,
            drain_s=60,
            started=lambda address: print(f"serving tiny at {address}", flush=True),
        )


def main(argv: Sequence[str]) -> None:
    """Parse and serve."""
    parse(serve_tiny, argv, prog="tiny_server")


if __name__ == "__main__":
    run(main)
