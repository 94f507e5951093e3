"""The main job in small: `jaxblt demo` trains, measures and shows everything in runs/demo.

A BLT-Hyena comes with jaxblt, and so does the entropy model that cuts its patches. They read an embedded English book
that neither has seen, and train on it. The run folder holds checkpoints, the resolved recipe, and scalars as
TensorBoard events and as JSONL. It also has a picture of byte entropies with patch boundaries, and generated text. A
table compares bits per byte on the held-out end of the book.
"""

import dataclasses
import importlib.util
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxblt import recipes
from jaxblt.cli.recipe_options import shorter_warmup
from jaxblt.remote import refuse_remote

RECIPE = "english_book"
PROMPT = b"The Time Traveller "


def demo(run_dir: str = "runs/demo", steps: int | None = None) -> None:
    """Train a byte-patched Hyena on from the run that comes with jaxblt, and show what came out.

    Run again, it goes on from its checkpoints and only repeats the measuring. SIGTERM or Ctrl-C saves and ends it.

    Args:
      run_dir: folder of the run.
      steps: of the model; the recipe's by default.
    """
    import jaxblt
    from jaxblt.training.loop import fit

    refuse_remote("--run-dir", run_dir)
    began = time.perf_counter()
    recipe = _shorter(recipes.get(RECIPE), steps)
    fitted = fit(recipe, run_dir)
    if not fitted.finished:
        return
    print(f"trained in {time.perf_counter() - began:.0f} s\n")
    model = jaxblt.load(run_dir)
    _compare(model, jaxblt.load(recipe.init_from, dtype="float32"))
    _picture(run_dir)
    _generate(model, run_dir)
    print(f"\nstep {fitted.step}; everything is in {run_dir}: tensorboard --logdir {run_dir}")
    print(
        "next: a text of your own, `jaxblt score english FILE --out scores.tsv`, or docs/tutorials/own-text.md"
    )


def _shorter(recipe: Any, steps: int | None) -> Any:
    if steps is None:
        return recipe
    optimizer = shorter_warmup(recipe.optimizer, steps)
    train = dataclasses.replace(recipe.train, steps=steps)
    return dataclasses.replace(recipe, optimizer=optimizer, train=train)


def _compare(model: Any, start: Any) -> None:
    """Print bits per byte on the held-out end of the book, every byte scored once."""
    from jaxblt.data import load_sample
    from jaxblt.data.config import apply_split, open_source
    from jaxblt.data.sources import read_document
    from jaxblt.evaluation import compressor_table, fit_ngram, format_table

    data = model.recipe.data
    parts = [apply_split(data, open_source(data), part) for part in ("train", "test")]
    train, test = (b"".join(read_document(part, i) for i in range(len(part))) for part in parts)
    scored = dataclasses.replace(data, stride=None, partial="keep", context=data.seq_len // 2)
    rows: list[Sequence[Any]] = [
        (f"after {model.step} steps on it", model.evaluate("test", data=scored)["bits_per_byte"]),
        (f"{start.recipe.name}, before", start.evaluate("test", data=scored)["bits_per_byte"]),
        ("order-5 byte model", fit_ngram(train, order=5).bits_per_byte(test)),
    ]
    rows += list(compressor_table(test, primer=train).items())
    print(
        f"bits per byte on {len(test):,} held-out of {len(load_sample('book')):,} bytes, {len(train):,} to train on"
    )
    print(format_table(("model", "bits per byte"), rows, digits=3))


def _picture(run_dir: str) -> None:
    from jaxblt.cli import patching
    from jaxblt.data import load_sample

    model = patching.load_patching_model(run_dir)
    assert model.patcher is not None
    ids = patching.encode(load_sample("book")[4000:4480], bos=True)
    if importlib.util.find_spec("matplotlib") is None:
        print("\nno picture of patches: matplotlib is missing (pip install 'jaxblt[plot]')")
    else:
        patching.draw(f"{run_dir}/patches.png", ids, model.entropies(ids), model.patcher)
    patches = patching.segment(model.patcher, ids, model.entropies(ids))
    print("\npatches:", patching.render_patches(ids, patches)[:400].replace("\n", " "))


def _generate(model: Any, run_dir: str) -> None:
    from jaxblt.inference import SamplingConfig, generate

    prompts = [PROMPT, b"I saw "]
    sampling = SamplingConfig(temperature=0.6)
    drawn = generate(model.decoder, model.decoder_params, prompts, max_new_bytes=160, sampling=sampling)
    texts = [(prompt + text).decode("utf-8", "replace") for prompt, text in zip(prompts, drawn, strict=True)]
    Path(run_dir, "generated.txt").write_text("\n\n".join(texts) + "\n", encoding="utf-8")
    print("\ngenerated:", *texts, sep="\n  ")
