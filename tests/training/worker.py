"""A process of its own that fits the tiny recipe: `python -m tests.training.worker '{"run_dir": ...}'`.

Options: run_dir; devices of this process; kill_at, the read at which it kills itself; processes, process and port;
entropy_run, for patches cut by that run's model; steps, of a run that splits its parameters over all devices.
"""

import json
import os
import signal
import sys

import jax


def main(
    run_dir: str,
    devices: int = 1,
    kill_at: int = 0,
    processes: int = 1,
    process: int = 0,
    port: int = 0,
    entropy_run: str | None = None,
    steps: int = 0,
) -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", devices)
    jax.config.update("jax_numpy_dtype_promotion", "strict")

    from jaxblt.parallel import init_distributed
    from jaxblt.training.loop import fit
    from tests.training.tiny import Letters, patched_recipe, split_recipe, tiny_recipe

    if processes > 1:
        init_distributed(
            coordinator=f"127.0.0.1:{port}", num_processes=processes, process_id=process, timeout_s=60
        )

    def kill(count: int) -> None:
        if count == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    recipe = tiny_recipe() if entropy_run is None else patched_recipe(entropy_run)
    if steps:
        recipe = split_recipe(steps)
    fit(recipe, run_dir, source=Letters(kill), resume_with=bool(steps))


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
