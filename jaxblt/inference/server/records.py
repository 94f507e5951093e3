"""The bodies of /v1/scores and /v1/embeddings."""

import base64
import math
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
    with told():
        scores = await service.answer(service.run.score, records, per_byte=per_byte)
    found: list[dict[str, Any]] = [
        {
            "object": "score",
            "index": i,
            "log_likelihood": scores.log_likelihood[i].item(),
            "bits_per_byte": _finite(scores.bits_per_byte[i].item()),
            "scored": scores.scored[i].item(),
        }
        for i in range(len(records))
    ]
    for entry, nats in zip(found, scores.per_byte, strict=True) if per_byte else ():
        entry["per_byte"] = [_finite(x) for x in nats.tolist()]
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
    with told():
        states = await service.answer(service.run.embed, records, pool=pool)
    found = [
        {"object": "embedding", "index": i, "embedding": _written(array, coded)}
        for i, array in enumerate(states.arrays)
    ]
    return _listed(service, found, records)


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
