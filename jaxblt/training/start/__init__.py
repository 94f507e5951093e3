"""From a recipe to the first step: mesh, parameters, frozen trees, compiled programs."""
