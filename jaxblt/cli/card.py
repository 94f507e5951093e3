"""`jaxblt card`: a model card of a run."""

from pathlib import Path

from jaxblt.outputs import check_output, whole_file


def card(
    run_dir: str, /, *, out: Path | None = None, licence: str = "", limits: str = "", overwrite: bool = False
) -> None:
    """Write what a run is, what it was trained on and how good it is, as Markdown.

    Args:
      run_dir: folder of the run, or the name of one that comes with jaxblt.
      out: file to write; by default it is printed.
      licence: of the data, in a sentence.
      limits: what the run is not for, in a sentence.
      overwrite: replace OUT if it is there.
    """
    from jaxblt.interchange.card import make_card

    if out is not None:
        check_output("--out", out, overwrite=overwrite)
    text = make_card(run_dir, licence=licence, limits=limits)
    if out is None:
        print(text, end="")
        return
    with whole_file(out) as file:
        file.write_text(text, encoding="utf-8")
    print(f"wrote {out}")
