"""Recipes: functions that return a frozen `Recipe`, by name. Their docstrings say what they train and what came out."""

from collections.abc import Callable

from jaxblt.training.recipe import Recipe

from . import billion, books, boxed, demo, ecoli, phage, pixels, tasks, titans

RECIPES: dict[str, Callable[[], Recipe]] = {
    "demo_entropy": demo.entropy,
    "demo": demo.blt,
    "english_entropy": boxed.english_entropy,
    "english": boxed.english,
    "english_patches": boxed.english_patches,
    "english_book": boxed.english_book,
    "genes": boxed.genes,
    "proteins": boxed.proteins,
    "books_entropy": books.entropy,
    "books": books.blt,
    "books_32k": books.blt_32k,
    "books_learned": books.learned,
    "books_levels": books.learned_levels,
    "books_pulse": books.pulse,
    "books_transformer": books.transformer,
    "books_hyena": books.hyena,
    "books_hyena_implicit": books.implicit_hyena,
    "books_512": books.small,
    "books_1b_entropy": billion.entropy,
    "books_1b_transformer": billion.transformer,
    "books_1b": billion.blt,
    "ecoli": ecoli.hyena,
    "phage": phage.hyena,
    "mqar": tasks.mqar,
    "copy": tasks.copy,
    "repeat_copy": tasks.repeat_copy,
    "pattern": tasks.pattern,
    "parity": tasks.parity,
    "listops": tasks.listops,
    "imdb": tasks.imdb,
    "language_pairs": tasks.language_pairs,
    "babi": tasks.babi,
    "pathfinder": pixels.pathfinder,
    "path_x": pixels.path_x,
    "path_256": pixels.path_256,
    "cifar10_gray": pixels.cifar10_gray,
    "titan_recall": titans.recall,
    "babilong": titans.babilong,
}


def get(name: str) -> Recipe:
    """Return the recipe of that name.

    Raises:
      ValueError: there is no such recipe.
    """
    if name not in RECIPES:
        raise ValueError(f"unknown recipe {name!r}, choose one of: {', '.join(RECIPES)}")
    return RECIPES[name]()
