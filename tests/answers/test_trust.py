"""URLs of a run's config are fetched by none of its methods, unless it is trusted."""

import dataclasses

import pytest

from jaxblt.answers import build_index


def test_no_method_fetches_what_the_config_names(runs):
    run = runs["patches"]
    data = dataclasses.replace(run.recipe.data, paths=("https://elsewhere.example/a.txt",))
    run = dataclasses.replace(run, recipe=dataclasses.replace(run.recipe, data=data))
    for call in (run.evaluate, run.recalibrate, lambda: build_index(run)):
        with pytest.raises(ValueError, match=r"the run's config names https://elsewhere\.example/a\.txt"):
            call()
