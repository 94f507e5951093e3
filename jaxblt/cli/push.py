"""`jaxblt push`: a run onto the Hugging Face hub."""

from typing import Literal


def push(
    run_dir: str,
    url: str,
    /,
    *,
    step: int | Literal["best"] | None = None,
    licence: str = "",
    limits: str = "",
    private: bool = False,
    overwrite: bool = False,
) -> None:
    """Upload a run and its card to a model repository of the hub, which is made where there is none.

    `HF_TOKEN` or `hf auth login` says who uploads. Every command that reads a run then takes the URL.

    Args:
      run_dir: folder of the run, or the name of one that comes with jaxblt.
      url: hf://owner/name.
      step: of the checkpoint: a number, or best; by default the newest.
      licence: of the data, in a sentence.
      limits: what the run is not for, in a sentence.
      private: make the repository a private one.
      overwrite: replace the run that the repository holds.
    """
    from jaxblt.interchange.hub import push_run

    options = {"step": step, "licence": licence, "limits": limits, "private": private, "overwrite": overwrite}
    print(f"uploaded step {push_run(run_dir, url, **options)}; next: jaxblt evaluate {url}")
