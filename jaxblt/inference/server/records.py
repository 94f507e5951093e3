"""The bodies of /v1/scores and /v1/embeddings."""

import base64
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxblt.inference.server.completions import check_model, count_tokens
from jaxblt.inference.server.errors import ApiError, told
from jaxblt.inference.server.fields import Fields
from jaxblt.inference.server.service import Service

INPUT = ("model", "input", "input_base64", "user")
SCORE_FIELDS = (*INPUT, "per_byte")
EMBEDDING_FIELDS = (*INPUT, "encoding_format", "pool")


async def score_records(data: bytes, service: Service) -> dict[str, Any]:
    """Return the log-likelihood of each document of a request's body, in nats.

    Raises:
      ApiError: the body is not what it should be, or the model has no likelihoods.
    """
    fields = Fields(data, SCORE_FIELDS)
    records = _records(fields, service)
    per_byte = fields.flag("per_byte")

    def ask(records: list[bytes]) -> list[dict[str, Any]]:
        scores = service.run.score(records, per_byte=per_byte, as_trained=service.engine.as_trained)
        return [_rated(scores, i) for i in range(len(records))]

    with told():
        rated = await service.answers.answer(("score", per_byte), ask, records)
    found = [{"object": "score", "index": i} | entry for i, entry in enumerate(rated)]
    return _listed(service, found, records)


async def embed_records(data: bytes, service: Service) -> dict[str, Any]:
    """Return a hidden state for each document of a request's body.

    Raises:
      ApiError: the body is not what it should be, or the model has no hidden states.
    """
    fields = Fields(data, EMBEDDING_FIELDS)
    records = _records(fields, service)
    coded = fields.choice("encoding_format", ("float", "base64")) == "base64"
    pool = fields.choice("pool", ("mean", "last"))

    def ask(records: list[bytes]) -> Sequence[np.ndarray]:
        return service.run.embed(records, pool=pool, as_trained=service.engine.as_trained).arrays

    with told():
        states = await service.answers.answer(("embed", pool), ask, records)
    found = [
        {"object": "embedding", "index": i, "embedding": _written(array, coded)}
        for i, array in enumerate(states)
    ]
    return _listed(service, found, records)


def _rated(scores: Any, i: int) -> dict[str, Any]:
    """Return what is told of a record's score."""
    found: dict[str, Any] = {
        "log_likelihood": scores.log_likelihood[i].item(),
        "bits_per_byte": _finite(scores.bits_per_byte[i].item()),
        "scored": scores.scored[i].item(),
    }
    if scores.per_byte is not None:
        found["per_byte"] = [_finite(x) for x in scores.per_byte[i].tolist()]
    return found


def _records(fields: Fields, service: Service) -> list[bytes]:
    check_model(fields, service)
    records, _ = fields.documents("input", most=service.limits.records)
    for i, record in enumerate(records):
        if not 1 <= len(record) <= service.capacity:
            raise ApiError(
                400,
                f"document {i} of input must have 1..{service.capacity} bytes, got {len(record)}",
                param="input",
            )
    return records


def _written(array: np.ndarray, coded: bool) -> Any:
    return base64.b64encode(array.astype("<f4").tobytes()).decode() if coded else array.tolist()


def _listed(service: Service, found: list[dict[str, Any]], records: list[bytes]) -> dict[str, Any]:
    usage = count_tokens(sum(map(len, records)))
    return {"object": "list", "data": found, "model": service.name, "usage": usage}


def _finite(x: float) -> float | None:
    """Return a number for JSON, which has no NaN."""
    return x if math.isfinite(x) else None
